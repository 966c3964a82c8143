"""Nothing outlives a run: ends the processes of a run, however their parents ended.

Consumes    marks, i.e. environment variables such as ROCSTAR_RUN=abc that a run's processes inherit; their folder for
            temporary files; end of file on standard input
Produces    SIGKILL to every process of this user that carries all marks; the folder is removed
Waits for   the end of the process that holds the other end of standard input
Unblocked by  that process's end, SIGKILL included
Invariant   a process without the marks is never touched, nor is the one that asks

A mark is read from the environment a process was started with, which forks share and which no reparenting changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

GRACE_S = 3.0
"""Given to processes that end by themselves when their parent does."""
PATIENCE_S = 10.0
"""Longest time in which killed processes must be gone."""


def marked(marks: Mapping[str, str], spare: Iterable[int] = ()) -> list[int]:
    """Process ids that carry every mark."""
    wanted = {f"{key}={value}".encode() for key, value in marks.items()}
    kept = {os.getpid(), *spare}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in kept and wanted <= _environment(int(entry)):
            found.append(int(entry))
    return found


def _environment(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:  # it ended meanwhile, or belongs to another user
        return set()


def kill_marked(marks: Mapping[str, str], spare: Iterable[int] = ()) -> int:
    """SIGKILL to all that carry the marks, again until none is left; how many there were at first."""
    spared = tuple(spare)
    end_s = time.monotonic() + PATIENCE_S
    first = -1
    while True:
        pids = marked(marks, spared)
        first = len(pids) if first < 0 else first
        if not pids or time.monotonic() > end_s:
            return first
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.05)


def kill_one(marks: Mapping[str, str], pid: int) -> None:
    """SIGKILL to this process, if it carries the marks: its number may be another's by now."""
    if pid in marked(marks):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def watch_me(marks: Mapping[str, str], scratch: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts a warden for the calling process: when the caller is gone, so are everything marked and `scratch`.

    Close its `stdin` to end it in good order. It carries no mark itself and ignores the terminal's signals.
    """
    environment = {key: value for key, value in os.environ.items() if key not in marks}
    arguments = [f"{key}={value}" for key, value in marks.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.warden", str(scratch or ""), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def main() -> None:
    scratch, *arguments = sys.argv[1:]
    marks = dict(argument.split("=", 1) for argument in arguments)
    assert marks, "a warden without marks would kill everything"
    sys.stdin.buffer.read()
    end_s = time.monotonic() + GRACE_S
    while marked(marks) and time.monotonic() < end_s:
        time.sleep(0.1)
    kill_marked(marks)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
