"""The warden: what carries a run's marks ends with the process that it watches for, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import warden

pytestmark = pytest.mark.slow

FORGET = "import os, subprocess, sys; os.setsid(); subprocess.Popen(['sleep', '1000']); print('up', flush=True)"
"""Starts a grandchild in a session of its own, and ends."""
WAIT = "import time; print('up', flush=True); time.sleep(1000)"
HOLDER = """
import os, sys, time
from pathlib import Path
from launch import warden
warden.watch_me({"ROCSTAR_RUN": sys.argv[1]}, Path(sys.argv[2]))
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    marks = {"ROCSTAR_RUN": uuid.uuid4().hex}
    yield marks
    warden.kill_marked(marks)


def start(marks: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """A marked process that has said that it is up."""
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments], env=os.environ | marks, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_forgotten_grandchild_is_found_and_ended(mark: dict[str, str]) -> None:
    with start(mark, FORGET) as process:
        process.wait()
    (orphan,) = warden.marked(mark)
    sleeper = psutil.Process(orphan)
    assert sleeper.name() == "sleep"
    assert warden.kill_marked(mark) == 1
    assert warden.marked(mark) == []


def test_other_marks_and_none_are_left_alone(mark: dict[str, str]) -> None:
    with (
        start({"ROCSTAR_RUN": "other"}, WAIT) as other,
        start({}, WAIT) as unmarked,
    ):
        assert warden.kill_marked({**mark, "ROCSTAR_ROLE": "rollout-0"}) == 0
        assert warden.kill_marked({"ROCSTAR_RUN": "other", "ROCSTAR_ROLE": "rollout-0"}) == 0
        assert other.poll() is None
        assert unmarked.poll() is None
        for process in (other, unmarked):
            process.kill()


def test_what_a_killed_process_leaves_behind_is_ended_with_its_scratch(mark: dict[str, str], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").write_text("")
    with start({}, HOLDER, mark["ROCSTAR_RUN"], str(scratch)) as holder:
        with start(mark, FORGET) as process:
            process.wait()
        assert len(warden.marked(mark)) == 1
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    end_s = time.monotonic() + warden.GRACE_S + warden.PATIENCE_S
    while (warden.marked(mark) or scratch.exists()) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert warden.marked(mark) == []
    assert not scratch.exists()
