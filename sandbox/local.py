"""A sandbox for plain programs: a node and its client on a loop in a thread of their own.

Consumes    programs and answers, from any thread
Produces    Results and Verdicts
Waits for   each call, as its limits say
Invariant   closing it (or the end of the process) ends every process it started

Example:
    with Sandbox() as sandbox:
        print(sandbox.run("print(6 * 7)").stdout)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from sandbox.api import Limits, Result, Verdict
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.session import Session
from sandbox.settings import SandboxSettings

T = TypeVar("T")


class Sandbox:
    """A sandbox node of one's own, or (`endpoints`) other machines' nodes, without asyncio."""

    def __init__(self, settings: SandboxSettings | None = None, *, endpoints: Sequence[str] = ()) -> None:
        """Start.

        Raises:
            StartRefused: this host lacks a piece of isolation; the message names it and the remedy.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
        self._thread.start()
        self._server: SandboxServer | None = None
        try:
            if not endpoints:
                self._server = SandboxServer(settings or SandboxSettings())
                endpoints = [self._wait(self._server.start())]
        except BaseException:
            self._end_loop()
            raise
        self._client = SandboxClient(endpoints)

    def run(self, code: str, input: str = "", *, limits: Limits | None = None) -> Result:
        """Run a program."""
        return self._wait(self._client.run(code, input, limits=limits))

    def run_all(self, codes: Sequence[str], *, limits: Limits | None = None) -> list[Result]:
        """Run programs side by side; results in their order."""

        async def gather() -> list[Result]:
            return list(await asyncio.gather(*(self._client.run(code, limits=limits) for code in codes)))

        return self._wait(gather())

    def check(self, answer: str, gold: str) -> Verdict:
        """Grade an answer."""
        return self._wait(self._client.check(answer, gold))

    def session(self) -> LocalSession:
        """A session: variables survive from one cell to the next."""
        return LocalSession(self, self._client.session())

    def snapshot(self) -> dict[str, Any]:
        """The node's counters; empty for other machines' nodes."""
        return self._server.snapshot() if self._server is not None else {}

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the node and everything in it."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            if self._server is not None:
                self._wait(self._server.stop())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalSession:
    """A session without asyncio."""

    def __init__(self, sandbox: Sandbox, session: Session) -> None:
        self._sandbox, self._session = sandbox, session

    def run(self, code: str, input: str = "", *, limits: Limits | None = None) -> Result:
        """Run a cell."""
        return self._sandbox._wait(self._session.run(code, input, limits=limits))

    def close(self) -> None:
        """End the session."""

        async def end() -> None:
            self._session.close()

        self._sandbox._wait(end())
