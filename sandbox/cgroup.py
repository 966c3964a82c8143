"""Memory limits of whole process trees, where control groups can be written.

Consumes    the host's cgroup v2 or v1 hierarchy
Produces    one group per slot: a descriptor to join it by, and its count of kills for want of memory
Waits for   nothing
Invariant   groups are removed when the node stops; those of a node that was killed, when the next one starts
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "rocstar-"
_REMOVE_TRIES = 50
_REMOVE_PAUSE_S = 0.004
_SLACK_BYTES = 64 << 20


class Group:
    """The memory group of one slot."""

    def __init__(self, path: Path, version: int) -> None:
        path.mkdir(exist_ok=True)
        self._path = path
        self._limit = path / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        self._events = os.open(path / ("memory.events" if version == 2 else "memory.oom_control"), os.O_RDONLY)
        self._memory_mib = 0
        if version == 2:
            (path / "memory.swap.max").exists() and (path / "memory.swap.max").write_text("0")
        self._kills = self._count()

    def open_members(self) -> int:
        """A descriptor; a process that writes "0" to it joins."""
        return os.open(self._path / "cgroup.procs", os.O_WRONLY)

    def limit(self, memory_mib: int) -> None:
        """Set what the tree may use together."""
        if memory_mib != self._memory_mib:
            self._limit.write_text(str((memory_mib << 20) + _SLACK_BYTES))
            self._memory_mib = memory_mib

    def killed(self) -> bool:
        """Whether the kernel killed a member for want of memory since the last time this was asked."""
        count = self._count()
        grown, self._kills = count > self._kills, count
        return grown

    def _count(self) -> int:
        for line in os.pread(self._events, 4096, 0).decode().splitlines():
            name, value = line.split()
            if name == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> None:
        """Give the group up; its members are gone or going."""
        os.close(self._events)
        for _ in range(_REMOVE_TRIES):
            try:
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # a member is still ending; the kernel tells nobody when it has
                time.sleep(_REMOVE_PAUSE_S)
            else:
                return


class Groups:
    """The groups of one supervisor."""

    def __init__(self, parent: Path, version: int) -> None:
        self._parent = parent
        self._version = version

    def make(self, name: str) -> Group:
        """A new group."""
        return Group(self._parent / f"{_PREFIX}{os.getpid()}-{name}", self._version)


def detect() -> Groups | None:
    """The hierarchy that can be used here, or None."""
    for version, parent in ((2, _v2_parent()), (1, _v1_parent())):
        if parent is None:
            continue
        sweep(parent)
        probe = parent / f"{_PREFIX}{os.getpid()}-probe"
        try:
            group = Group(probe, version)
            group.limit(64)
            group.remove()
        except OSError:
            with contextlib.suppress(OSError):
                probe.rmdir()
            continue
        return Groups(parent, version)
    return None


def sweep(parent: Path) -> None:
    """Remove the groups of supervisors that are no more."""
    for path in parent.glob(f"{_PREFIX}*"):
        pid = path.name[len(_PREFIX) :].split("-")[0]
        if not pid.isdigit() or not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _own_path(controller: str) -> str | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return None


def _v2_parent() -> Path | None:
    """The unified hierarchy's group of this process, when it hands the memory controller to children."""
    own = _own_path("")
    if own is None:
        return None
    base = Path("/sys/fs/cgroup" + own)
    control = base / "cgroup.subtree_control"
    try:
        if "memory" not in (base / "cgroup.controllers").read_text().split():
            return None
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
    except OSError:
        return None
    return base


def _v1_parent() -> Path | None:
    own = _own_path("memory")
    if own is None:
        return None
    base = Path("/sys/fs/cgroup/memory")
    return next((path for path in (Path(f"{base}{own}"), base) if path.is_dir() and os.access(path, os.W_OK)), None)
