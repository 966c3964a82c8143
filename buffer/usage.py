"""What a role's processes have used of their host's cores, and how long they waited for one.

Consumes    /proc of this process, of what it started and of what those started
Produces    `Usage.read(now_s)`: cumulative figures, one part of a role's snapshot
Waits for   nothing
Imports     nothing of ours; every package may import this file
Invariant   figures never fall, whichever processes end; where /proc lacks a file, they count less, and nothing fails

CPU seconds of children that have ended are their parent's `cutime`, so the sum over the tree holds them too. Seconds
in which a thread could have run but had no core (`schedstat`) are summed over the threads that are alive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

MIN_INTERVAL_S = 2.0
"""Readings closer together than this are the same reading: one takes some milliseconds where threads are many."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """Of the process tree below `root`, this process by default.

    Example:
        Usage().read(now_s=12.0)
        # {"host": "node3", "cores": 2, "read_s": 12.0, "cpu_s": 8.1, "core_wait_s": 0.4, "host_cpu_s": 21.7}
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = root
        self._read_s = float("-inf")
        self._waits: dict[int, int] = {}
        self._figures: dict[str, Any] = {
            "host": socket.gethostname(),
            "cores": len(os.sched_getaffinity(0)),
            "read_s": 0.0,
            "cpu_s": 0.0,
            "core_wait_s": 0.0,
            "host_cpu_s": 0.0,
        }

    def read(self, now_s: float) -> dict[str, Any]:
        """Everything up to now."""
        if now_s - self._read_s >= MIN_INTERVAL_S:
            self._read_s = self._figures["read_s"] = now_s
            cpu_s, waited_ns = self._walk()
            self._figures["cpu_s"] = max(self._figures["cpu_s"], cpu_s)
            self._figures["core_wait_s"] += waited_ns / 1e9
            self._figures["host_cpu_s"] = max(self._figures["host_cpu_s"], _host_cpu_s())
        return dict(self._figures)

    def _walk(self) -> tuple[float, int]:
        """CPU seconds of the tree, and nanoseconds that its threads waited since the walk before."""
        cpu_s, waited_ns, waits = 0.0, 0, {}
        for pid, threads in _tree(self._root or os.getpid()):
            cpu_s += _cpu_s(pid)
            for thread in threads:
                waits[thread] = _waited_ns(pid, thread)
                waited_ns += max(0, waits[thread] - self._waits.get(thread, 0))
        self._waits = waits
        return cpu_s, waited_ns


def _tree(root: int) -> Iterator[tuple[int, list[int]]]:
    """Processes with their threads."""
    stack = [root]
    while stack:
        pid = stack.pop()
        threads = _threads(pid)
        yield pid, threads
        for thread in threads:
            stack += map(int, _text(f"/proc/{pid}/task/{thread}/children").split())


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # it has ended meanwhile
        return []


def _cpu_s(pid: int) -> float:
    """Its own, and that of its children that have ended."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _waited_ns(pid: int, thread: int) -> int:
    fields = _text(f"/proc/{pid}/task/{thread}/schedstat").split()
    return int(fields[1]) if len(fields) > 1 else 0


def _host_cpu_s() -> float:
    """Of all processes of the host: user, nice, system, interrupts; neither idle nor waiting for disks."""
    fields = _text("/proc/stat").split(maxsplit=9)
    return sum(int(fields[at]) for at in (1, 2, 3, 6, 7)) / _TICKS_PER_S if len(fields) > 8 else 0.0


def _text(path: str) -> str:
    """Read without Python's layers of files: a walk reads hundreds of them."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    parts = b""
    try:
        while part := os.read(file, 1 << 14):
            parts += part
    except OSError:  # its process has ended meanwhile
        return ""
    finally:
        os.close(file)
    return parts.decode("ascii", "replace")
