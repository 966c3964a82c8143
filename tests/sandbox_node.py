"""A real sandbox node and client on a loop of their own, driven from plain test functions; and a look at processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sandbox.api import Limits, Result, Verdict
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings

T = TypeVar("T")

_PYTHON_HOMES = [os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix, *sys.path]
PYTHONS_OWN_TMP = sorted({Path(home).parts[2] for home in _PYTHON_HOMES if home.startswith("/tmp/")})
"""What a call sees in its /tmp before it writes there: nothing, unless this Python or its packages live under /tmp."""


class Node:
    """A node with one client."""

    def __init__(self, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = SandboxServer(SandboxSettings(**settings))
        try:
            self.endpoint = self.wait(self.server.start())
        except BaseException:
            self._end_loop()
            raise
        self.client = SandboxClient([self.endpoint], timeout_s=60)

    def wait(self, work: Awaitable[T], timeout_s: float = 90) -> T:
        """Run something on the node's loop and wait for it."""

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout_s)

    def run(self, code: str, stdin: str = "", **options: Any) -> Result:
        """One call; keyword arguments that Limits knows become limits."""
        bounds = {name: options.pop(name) for name in Limits.__dataclass_fields__ if name in options}
        limits = Limits(**bounds) if bounds else None
        return self.wait(self.client.run(code, stdin, limits=limits, **options))

    def run_all(self, codes: Iterable[str], **options: Any) -> list[Result]:
        """Many calls at once, results in order."""

        async def gather() -> list[Result]:
            return list(await asyncio.gather(*(self.client.run(code, **options) for code in codes)))

        return self.wait(gather())

    def check_all(self, pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
        """Many answers at once, verdicts in order."""
        return self.start_checks(pairs).result(90)

    def start_checks(self, pairs: Iterable[tuple[str, str]]) -> concurrent.futures.Future[list[Verdict]]:
        """The same, without waiting."""

        async def gather() -> list[Verdict]:
            return list(await asyncio.gather(*(self.client.check(*pair) for pair in pairs)))

        return asyncio.run_coroutine_threadsafe(gather(), self._loop)

    def supervisors(self) -> list[int]:
        """Their process ids."""
        return [shard.pid for shard in self.server._shards]

    def zygotes(self) -> list[int]:
        """Their process ids."""
        own = [pid for parent in self.supervisors() for pid in children(parent)]
        # Without root there is a parent in between, which stays outside the user namespace.
        return own if os.getuid() == 0 else [pid for parent in own for pid in children(parent)]

    def guests(self) -> list[int]:
        """Processes of calls: those in the slots, without the slots' init processes and graders at rest."""
        found = []
        level = self.zygotes()
        while level:
            level = [pid for parent in level for pid in children(parent)]
            found += [pid for pid in level if namespace_pid(pid) > 1 and process_name(pid) != "rocstar-grader"]
        return found

    def close(self) -> None:
        """Stop both."""
        self.wait(self.client.close())
        self.wait(self.server.stop())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def leaving_nothing(**settings: Any) -> Iterator[Node]:
    """A node; at its end no process of a call is left, and then no process, mount, file or cgroup of the node."""
    mounts, files = _mounts(), set(os.listdir("/tmp"))
    node = Node(**settings)
    try:
        yield node
        assert eventually(lambda: not node.guests()), "a call left a process behind"
        processes = node.supervisors() + node.zygotes()
    finally:
        node.close()
    assert eventually(lambda: not any(alive(pid) for pid in processes))
    assert _mounts() == mounts
    assert not {name for name in set(os.listdir("/tmp")) - files if name.startswith("rocstar-call")}
    assert not _groups(processes), "a cgroup was left behind"


def _mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def _groups(makers: list[int]) -> list[Path]:
    """The control groups that these supervisors made."""
    return [path for pid in makers for path in Path("/sys/fs/cgroup").glob(f"**/rocstar-{pid}-*")]


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie (whose parent has yet to ask for its status)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def process_name(pid: int) -> str:
    """What lists of processes show; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def namespace_pid(pid: int) -> int:
    """A process's number in its own pid namespace; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def eventually(condition: Callable[[], bool], within_s: float = 3.0) -> bool:
    """Whether a condition about other processes becomes true in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
