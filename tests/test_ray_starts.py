"""Ray as RoCstar sets it: one actor's process that dies while it starts holds up no other actor."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from launch import warden

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = """
import os, signal, sys, tempfile, time
from launch import warden
from launch.cluster import make_token
from launch.environment import ALONE, RAY
from pathlib import Path

mark, scratch = sys.argv[1:]
os.environ.update(RAY | ALONE | {"RAY_AUTH_TOKEN_PATH": str(make_token(Path(scratch) / "token"))})
import ray

ray.init(
    address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
    logging_level="error", resources={"a": 1, "b": 1}, _temp_dir=scratch,
)

class Actor:
    def pid(self):
        return os.getpid()

def start(name):
    marks = {"ROCSTAR_TEST": mark, "ROCSTAR_ROLE": name}
    options = dict(num_cpus=0, resources={name: 1}, max_restarts=9, runtime_env={"env_vars": marks})
    return ray.remote(Actor).options(**options).remote()

actors = {name: start(name) for name in "ab"}
pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
os.kill(pids["a"], signal.SIGKILL)
while not (born := set(warden.marked({"ROCSTAR_TEST": mark, "ROCSTAR_ROLE": "a"})) - {pids["a"]}):
    time.sleep(0.01)
for pid in born:  # long before Ray's worker has said that it is there
    os.kill(pid, signal.SIGKILL)
os.kill(pids["b"], signal.SIGKILL)
end_s = time.monotonic() + 25.0
while time.monotonic() < end_s:
    try:
        if ray.get(actors["b"].pid.remote(), timeout=1.0) != pids["b"]:
            print("b is back", flush=True)
            break
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        time.sleep(0.1)
os._exit(0)
"""


def test_a_process_that_dies_while_it_starts_holds_up_no_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    marks = {"ROCSTAR_TEST": uuid.uuid4().hex}
    scratch = tmp_path_factory.mktemp("r")  # short: sockets lie in it
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, marks["ROCSTAR_TEST"], str(scratch)],
            cwd=ROOT,
            env=os.environ | marks,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120.0,
            check=True,
        )
        assert "b is back" in done.stdout
    finally:
        warden.kill_marked(marks)
