"""A child that grades answers, batch after batch.

Consumes    batches of answers; the verdicts and the end of the child
Produces    a verdict per answer; what a batch left over when its child ended
Waits for   see running; each answer has its own time
Invariant   gold answers and model code are never in one child; an answer that brings its grader down costs itself a
            `timeout` and no other answer anything; a grader in which a comparison was interrupted grades no more
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sandbox import guest
from sandbox.answers import GRADE_S
from sandbox.api import Limits, Status, Verdict
from sandbox.jobs import GradeJob
from sandbox.loop import Loop
from sandbox.running import Running
from sandbox.slots import Slots

_GRADE_GRACE_S = 1.0
_GRADE_MEMORY_MIB = 1024
_GRADER_CPU_S = 86400.0
"""No bound: each answer has its time, and so many answers end a grader."""
_GRADER_REST_S = 60.0
"""Seconds without an answer after which a grader ends."""
_GATHER_S = 0.005
"""Seconds that the verdicts of a batch gather, so that each does not wake the front."""
MAX_GRADER_ANSWERS = 2000
"""After these a grader ends, so that nothing that they left behind can gather."""


class Grading(Running):
    """A child that grades batch after batch: what it finds out about the form of answers serves the next ones."""

    def __init__(
        self,
        loop: Loop,
        slots: Slots,
        on_blocked: Callable[[], None],
        on_verdict: Callable[[int, Verdict], None],
        on_end: Callable[[Grading, list[tuple[int, str, str]]], None],
    ) -> None:
        self.job: GradeJob | None = None
        self.graded = 0
        """Of the batch at hand."""
        self._life = 0
        self._on_verdict, self._on_end = on_verdict, on_end
        super().__init__(loop, slots, Limits(wall_s=1.0, cpu_s=_GRADER_CPU_S, memory_mib=_GRADE_MEMORY_MIB), on_blocked)
        self.send(["grade"])

    def run(self, job: GradeJob) -> None:
        """Give it a batch."""
        self.job, self.graded = job, 0
        self._life += len(job.items)
        self.discard_output()
        whole_s = len(job.items) * (GRADE_S + _GRADE_GRACE_S) + 1
        self.begin([[[answer, gold] for _, answer, gold in job.items], GRADE_S], replace(self.limits, wall_s=whole_s))
        self._arm()

    def _arm(self) -> None:
        """Give the answer being graded its time."""
        at = (self.job, self.graded)
        self.loop.after(GRADE_S + _GRADE_GRACE_S, lambda: self.kill(Status.TIMEOUT) if at == self._at() else None)

    def _at(self) -> tuple[GradeJob | None, int]:
        return self.job, self.graded

    def unsettled(self) -> list[int]:
        """What is left of the batch at hand."""
        return [] if self.job is None else [name for name, _, _ in self.job.items[self.graded :]]

    def take(self, record: list[Any]) -> None:
        """A verdict, or the end of the batch."""
        job = self.job
        if job is None:
            self.finish()
        elif record[0] == guest.VERDICT and record[1] == self.graded < len(job.items):
            self._settle(job, Verdict(record[2]))
            self._arm()
        elif record[0] == guest.OUTCOME and self.graded == len(job.items):
            self._end()
        else:
            self.misused()

    def _settle(self, job: GradeJob, verdict: Verdict) -> None:
        self._on_verdict(job.items[self.graded][0], verdict)
        self.graded += 1
        if verdict is Verdict.TIMEOUT:  # it ends itself, as what was interrupted may be in any state
            self._life = MAX_GRADER_ANSWERS

    def misused(self) -> None:
        """No code of a model's runs here: the answer at hand brought the grader down."""
        self.kill(Status.TIMEOUT)

    def broken(self, why: str) -> None:
        """It could not be started: nothing was graded."""
        self._end(alive=False)

    def died(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """The answer at hand took too long or too much; the others go into another child."""
        job, ended_itself = self.job, wait_status == 0 and self._life >= MAX_GRADER_ANSWERS
        if job is not None and wait_status >= 0 and self.graded < len(job.items) and not ended_itself:
            self._settle(job, Verdict.TIMEOUT)
        self._end(alive=False)

    def _end(self, *, alive: bool = True) -> None:
        """The batch is over, or as much of it as this child does."""
        job, self.job = self.job, None
        if alive and self._life < MAX_GRADER_ANSWERS:
            self.rest()
            turn = self._turn
            self.loop.after(_GRADER_REST_S, lambda: self.finish() if turn == self._turn and not self.busy else None)
        else:
            self.finish()
        if job is not None:
            self._on_end(self, job.items[self.graded :])


class Graders:
    """The graders of one supervisor: one is kept from batch to batch."""

    def __init__(
        self,
        loop: Loop,
        *,
        on_blocked: Callable[[], None],
        on_verdicts: Callable[[list[tuple[int, str]]], None],
        on_end: Callable[[Grading, list[tuple[int, str, str]]], None],
    ) -> None:
        self._loop, self._on_blocked, self._on_verdicts, self._on_end = loop, on_blocked, on_verdicts, on_end
        self._resting: Grading | None = None
        self._verdicts: list[tuple[int, str]] = []

    def take(self, zygote: Slots) -> Grading:
        """The one that rests, or another."""
        grader, self._resting = self._resting, None
        if grader is not None and not grader.done:
            return grader
        return Grading(self._loop, zygote, self._on_blocked, self._gather, self._ended)

    def _gather(self, name: int, verdict: Verdict) -> None:
        self._verdicts.append((name, verdict.value))
        if len(self._verdicts) == 1:
            self._loop.after(_GATHER_S, self._report)

    def _report(self) -> None:
        verdicts, self._verdicts = self._verdicts, []
        if verdicts:
            self._on_verdicts(verdicts)

    def _ended(self, grader: Grading, rest: list[tuple[int, str, str]]) -> None:
        if self._resting is None or self._resting.done:
            self._resting = grader
        else:
            grader.finish()
        self._report()
        self._on_end(grader, rest)
