"""What the sandbox does on hosts that offer less, and what it leaves behind when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.api import Status
from tests.sandbox_node import PYTHONS_OWN_TMP, Node, alive, children, eventually, process_name

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).resolve().parent.parent
_HOSTILE = ("tests/test_sandbox_hostile.py", "tests/test_sandbox_results.py")
_START = """
import asyncio
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from sandbox.shard import StartRefused

async def main():
    try:
        await SandboxServer(SandboxSettings(workers=1)).start()
    except StartRefused as error:
        print(error)

asyncio.run(main())
"""
_SERVE = """
import asyncio, sys
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings

async def main():
    server = SandboxServer(SandboxSettings(workers=1, wall_s=60, cpu_s=60))
    client = SandboxClient([await server.start()])
    code = "import subprocess, time; subprocess.Popen(['sleep', '77']); time.sleep(77)"
    calls = [asyncio.ensure_future(client.run(code))]
    while not server.snapshot()["placed"]:
        await asyncio.sleep(0.01)
    print("busy", flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


def _as_nobody(mode: str, *command: str) -> subprocess.CompletedProcess[str]:
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    whole = [sys.executable, "-m", "tests.sandbox_rootless", mode, sys.executable, *command]
    return subprocess.run(whole, cwd=_ROOT, capture_output=True, text=True, timeout=120)


def test_every_hostile_program_is_held_without_root_as_well() -> None:
    done = _as_nobody("namespaces", "-m", "pytest", "-p", "no:cacheprovider", *_HOSTILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_namespaces_are_forbidden_the_start_is_refused_with_the_reason() -> None:
    done = _as_nobody("none", "-c", _START)
    assert done.returncode == 0, done.stderr
    assert "sandbox.isolation = full needs user namespaces, which this host refuses" in done.stdout
    assert 'isolation = "rlimits"' in done.stdout


def test_rlimits_alone_still_limit() -> None:
    done = _as_nobody(
        "none", "-m", "pytest", "-p", "no:cacheprovider", "tests/test_sandbox_host.py", "-k", "without_namespaces"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="run as nobody by the test above")
def test_without_namespaces_a_call_is_limited() -> None:
    before = set(Path("/tmp").glob("rocstar-call-*"))
    node = Node(workers=1, isolation="rlimits", wall_s=0.5, memory_mib=64)
    try:
        assert node.run("print(6 * 7)").stdout == "42\n"
        assert node.run("while True: pass").status is Status.TIMEOUT
        assert node.run("bytearray(1 << 30)").status is Status.MEMORY
        result = node.run("import subprocess; open('x', 'w').close(); print(subprocess.Popen(['sleep', '50']).pid)")
        assert result.status is Status.OK, result
        assert eventually(lambda: process_name(int(result.stdout)) != "sleep")
        assert node.run("import socket; socket.socket()").exception.startswith("PermissionError")
        assert node.run("import os; os.kill(-1, 9)").exception.startswith("PermissionError")
        assert node.run("import subprocess; subprocess.run('true', start_new_session=True)").status is Status.ERROR
        assert node.run("print(1)").stdout == "1\n"
    finally:
        node.close()
    assert set(Path("/tmp").glob("rocstar-call-*")) == before


_ELSEWHERE = """
from sandbox.local import Sandbox
from sandbox.settings import SandboxSettings

with Sandbox(SandboxSettings(workers=1)) as sandbox:
    print(sandbox.run("import sys, csv, msgpack; open('/tmp/x', 'w').close(); print(sys.prefix)"))
    print(sandbox.run("import os; print(sorted(os.listdir('/tmp')), os.path.exists('/tmp/secret'))"))
"""


def test_a_python_that_lives_in_tmp_is_seen_beside_a_calls_own_tmp(tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("temporary files are elsewhere")
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    packages = next(home.glob("lib/python*/site-packages"))
    known = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "known.pth").write_text("\n".join([*known, str(_ROOT)]))
    done = subprocess.run([home / "bin/python", "-c", _ELSEWHERE], capture_output=True, text=True, timeout=60)
    assert str(home) in done.stdout, done.stdout + done.stderr
    assert "ERROR" not in done.stdout
    top = home.relative_to("/tmp").parts[0]
    assert f"{sorted({top, *PYTHONS_OWN_TMP})} False" in done.stdout


def _tree(pid: int) -> list[int]:
    below = [pid]
    for parent in below:
        below += children(parent)
    return below


@pytest.mark.parametrize("victim", ["server", "supervisor", "zygote"])
def test_a_killed_part_takes_everything_below_along(victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVE], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "busy\n"
        assert eventually(lambda: any(process_name(pid) == "sleep" for pid in _tree(server.pid)), 10)
        sleeper = next(pid for pid in _tree(server.pid) if process_name(pid) == "sleep")
        below = _tree(server.pid)[1:]
        depth = {"server": server.pid, "supervisor": below[0], "zygote": children(below[0])[0]}
        os.kill(depth[victim], signal.SIGKILL)
        assert eventually(lambda: process_name(sleeper) != "sleep", 5)
        server.kill()
        assert eventually(lambda: not any(alive(pid) for pid in below), 5)
