"""The run under chaos: its command, its processes, and what may be done to them.

Consumes    overrides of the quickstart's recipe; blows
Produces    a `rocstar run` in a process of its own; signals to the processes of its roles
Waits for   the command's end, at most as long as it is told
Invariant   only processes that carry this run's mark are touched; when this process is gone, however, so are they
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO

import psutil

from launch import warden

ROOT = Path(__file__).parents[2]
RECIPE = "launch/recipes/quickstart.toml"
SMALL = (
    "groups.groups_per_step=2",
    "groups.group_size=4",
    "roc.min_per_side=1",
    "problems.num_heldout=32",
    "rollout.concurrency=32",
    "learner.checkpoint_every=3",
    "learner.lr=2e-6",
    "evaluation.at_start=false",
)
"""Steps of a second or two; so little is learnt in one that there always is something left to learn from."""
ALWAYS = ("buffer.keep_segments=true", "run.max_restarts=1000")
"""The audit reads every payload file; overrides come after these."""


class Victim:
    """One run directory and the commands that work in it, one at a time."""

    def __init__(self, directory: Path, *, recipe: str = RECIPE, overrides: tuple[str, ...] = SMALL) -> None:
        self.directory = directory
        self._recipe = recipe
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port: int = probe.getsockname()[1]  # fixed, so that connections to the buffer can be told from others
        self._overrides = (*ALWAYS, *overrides, f"buffer.port={self._port}", f"run.directory={directory}")
        self._marks = {"ROCSTAR_CHAOS": uuid.uuid4().hex}
        self._guard = warden.watch_me(self._marks)
        self._command: subprocess.Popen[bytes] | None = None
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = open(directory.with_suffix(".out"), "ab")  # noqa: SIM115 - as long as this lives

    def start(self, *overrides: str) -> None:
        """`rocstar run`."""
        self._start("run", self._recipe, *self._sets(*self._overrides, *overrides))

    def resume(self, *overrides: str) -> None:
        """`rocstar resume`."""
        self._start("resume", str(self.directory), *self._sets(*overrides))

    def _sets(self, *overrides: str) -> list[str]:
        return [part for override in overrides for part in ("--set", override)]

    def _start(self, *arguments: str) -> None:
        self._command = subprocess.Popen(
            [sys.executable, "-m", "launch", *arguments],
            cwd=ROOT,
            env=os.environ | self._marks | {"OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's signals are for chaos, which passes on what it means to
        )

    @property
    def exit_code(self) -> int | None:
        """Of the latest command; None while it runs."""
        assert self._command is not None, "nothing was started"
        return self._command.poll()

    def interrupt(self) -> None:
        """SIGTERM to the driver: it drains, checkpoints and ends with 75."""
        assert self._command is not None, "nothing was started"
        self._command.send_signal(signal.SIGTERM)

    def ended(self, patience_s: float) -> int:
        """The command's exit code, once it has ended."""
        assert self._command is not None, "nothing was started"
        return self._command.wait(patience_s)

    def head(self, role: str) -> psutil.Process | None:
        """The process that Ray started for the role, which is a child of its node's; None while there is none.

        What a dead one leaves for a moment (an engine's processes) has been handed to another parent.
        """
        for pid in warden.marked(self._marks | {"ROCSTAR_ROLE": f"{role}-0"}):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if psutil.Process(process.ppid()).name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def families(self) -> dict[str, dict[int, psutil.Process]]:
        """Processes by role, by pid ("rest": Ray and the driver): those that carry the mark, and their descendants."""
        out: dict[str, dict[int, psutil.Process]] = {}
        seen: set[int] = set()
        for pid in warden.marked(self._marks):
            with contextlib.suppress(psutil.Error):
                head = psutil.Process(pid)
                role = head.environ().get("ROCSTAR_ROLE", "rest").rpartition("-")[0] or "rest"
                family = [head] if role == "rest" else [head, *head.children(recursive=True)]
                new = {process.pid: process for process in family if process.pid not in seen}
                seen |= new.keys()
                out.setdefault(role, {}).update(new)
        return out

    def cpu_seconds(self) -> dict[str, float]:
        """CPU-seconds so far by role ("rest": Ray and the driver); a process counts with the children it reaped."""
        out: dict[str, float] = {}
        for role, family in self.families().items():
            for process in family.values():
                with contextlib.suppress(psutil.Error):
                    out[role] = out.get(role, 0.0) + sum(process.cpu_times()[:4])
        return out

    def cut(self, process: psutil.Process) -> int:
        """Resets the role's connections to the buffer (the buffer's: all of them); how many are gone."""
        before = connections(process, self._port)
        for port in {own for own, _ in before}:
            words = ("state", "established", "sport", "=", f":{port}")
            subprocess.run(["ss", "-K", *words], capture_output=True, check=False)
        return len(before - connections(process, self._port))

    def told(self) -> str:
        """The last words of every log."""
        logs = [self.directory.with_suffix(".out"), *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def close(self) -> None:
        """Ends whatever is left."""
        warden.kill_marked(self._marks)
        if self._command is not None:
            self._command.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._log.close()


def boot_error_s() -> float:
    """What to add to a process's time of birth: it is told relative to the machine's start in whole seconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()


def connections(process: psutil.Process, port: int) -> set[tuple[int, int]]:
    """(own port, the other's) of each that is established and has `port` at either end."""
    with contextlib.suppress(psutil.Error):
        return {
            (one.laddr.port, one.raddr.port)
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED and port in (one.laddr.port, one.raddr.port)
        }
    return set()


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether it was there; a process id that now is another process's is not touched."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
