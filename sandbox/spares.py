"""Spare children: forked and walled in while nothing else runs, so that the next program starts at once.

Consumes    idle moments; the limits of the programs that came before
Produces    a child that waits for its program, at most one per zygote
Waits for   a moment without work
Invariant   a spare is made only when nothing runs: under load it would only move work about
"""

from __future__ import annotations

from collections.abc import Callable

from sandbox.api import Limits
from sandbox.jobs import OnResult, Program, ProgramJob
from sandbox.loop import Loop
from sandbox.slots import Slots

_IDLE_S = 0.003


class Spares:
    """The spares of one supervisor."""

    def __init__(
        self,
        loop: Loop,
        wanted: bool,
        is_idle: Callable[[], bool],
        *,
        on_blocked: Callable[[], None],
        on_result: OnResult,
    ) -> None:
        self._loop, self._wanted, self._is_idle = loop, wanted, is_idle
        self._on_blocked, self._on_result = on_blocked, on_result
        self._spares: dict[Slots, Program] = {}
        self._usual: dict[Slots, Limits] = {}
        self._waiting = False

    def make(self, zygote: Slots, limits: Limits) -> Program:
        """A child without a program, for programs with these limits."""
        self._usual[zygote] = limits
        return Program(self._loop, zygote, limits, on_blocked=self._on_blocked, on_result=self._on_result)

    def take(self, zygote: Slots, job: ProgramJob) -> Program | None:
        """The zygote's spare, if there is one and it fits."""
        spare = self._spares.pop(zygote, None)
        if spare is None or spare.fits(job):
            return None if spare is None or spare.done else spare
        spare.finish()
        return None

    def drop(self, zygote: Slots) -> None:
        """The zygote is gone."""
        self._usual.pop(zygote, None)
        spare = self._spares.pop(zygote, None)
        if spare is not None:
            spare.finish()

    def idle(self) -> None:
        """Nothing runs: in a moment, if that is still so, make what is missing."""
        if self._wanted and not self._waiting:
            self._waiting = True
            self._loop.after(_IDLE_S, self._refill)

    def _refill(self) -> None:
        self._waiting = False
        if not self._is_idle():
            return
        for zygote, limits in self._usual.items():
            present = self._spares.get(zygote)
            if (present is None or present.done) and zygote.has_room():
                self._spares[zygote] = self.make(zygote, limits)
