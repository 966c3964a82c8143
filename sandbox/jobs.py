"""The work a child is given, and the child that runs a program: how its claims and its end become a result.

Consumes    a request of the front; the records and the end of the child that serves it
Produces    a result (fields of api.Result in order)
Waits for   see running
Invariant   one result per program, whatever the child says or does
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox import guest
from sandbox.api import Limits, Status
from sandbox.loop import Loop
from sandbox.running import Running
from sandbox.slots import Slots

_CLAIMS = {"ok": Status.OK, "error": Status.ERROR, "memory": Status.MEMORY, "exit": Status.EXIT}
_NEEDS_SCI = re.compile(r"\b(numpy|sympy|math_verify|scipy)\b")
MISUSE = "RuntimeError: the code wrote to the sandbox's own descriptor"


@dataclass(kw_only=True, slots=True, eq=False)
class ProgramJob:
    """A program to run, or a cell of a session."""

    id: int
    arrived_s: float
    """CLOCK_MONOTONIC of its arrival at the node."""
    code: str
    stdin: str
    limits: Limits
    profile: str
    preamble: str = ""
    session: str = ""
    first: bool = False

    def lead(self) -> list[list[Any]]:
        """Records that the child is sent before its work."""
        return [["preamble", self.preamble, self.id]] if self.preamble else []


@dataclass(kw_only=True, slots=True, eq=False)
class GradeJob:
    """A batch of (id, answer, gold)."""

    items: list[tuple[int, str, str]]


def job_ids(job: ProgramJob | GradeJob) -> list[int]:
    """The front's ids in a job."""
    return [job.id] if isinstance(job, ProgramJob) else [name for name, _, _ in job.items]


OnResult = Callable[["Coding", list[Any]], None]


class Coding(Running):
    """A child that runs a model's code: how its claims and its end become a result."""

    def __init__(
        self, loop: Loop, slots: Slots, limits: Limits, *, on_blocked: Callable[[], None], on_result: OnResult
    ) -> None:
        self.job: ProgramJob | None = None
        self._on_result = on_result
        super().__init__(loop, slots, limits, on_blocked)

    def take_outcome(self, record: list[Any]) -> None:
        """The outcome as the guest claims it: checked, and none of those that only the sandbox can know."""
        kind, claim, value, exception, line, exit_code, cpu_s = record
        texts_ok = isinstance(value, str) and isinstance(exception, str)
        if kind != guest.OUTCOME or not texts_ok or not isinstance(line, int) or not isinstance(exit_code, int):
            self.misused()
            return
        self.drain()
        self.used_cpu_s = max(self.used_cpu_s, float(cpu_s))
        if value and self.out.total == 0:
            self.out.add(f"{value}\n".encode("utf-8", "replace"))
        self.conclude(_CLAIMS[claim], exception=exception, line=line & 0x7FFFFFFF, exit_code=exit_code & 0xFF)

    def unsettled(self) -> list[int]:
        """The job at hand, if there is one."""
        return [] if self.job is None else [self.job.id]

    def misused(self) -> None:
        """It found the control socket and wrote to it."""
        self.conclude(Status.ERROR, exception=MISUSE)

    def broken(self, why: str) -> None:
        """It could not be started."""
        self.conclude(Status.INTERNAL, exception=why)

    def died(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """It ended by a signal, by a kill of ours, or by leaving past the interpreter."""
        self.used_cpu_s = max(self.used_cpu_s, cpu_s)
        if wait_status < 0:
            self.conclude(Status.INTERNAL, exception=f"no child process: {os.strerror(-wait_status)}")
        elif self.reason is not None:
            self.conclude(self.reason)
        elif os.WIFEXITED(wait_status):
            code = os.WEXITSTATUS(wait_status)
            self.conclude(Status.EXIT if code else Status.OK, exit_code=code)
        else:
            number = os.WTERMSIG(wait_status)
            if out_of_memory:
                self.conclude(Status.MEMORY)
            elif number == signal.SIGXCPU or (number == signal.SIGKILL and self.used_cpu_s >= self.limits.cpu_s):
                self.conclude(Status.CPU_TIMEOUT)
            else:
                self.conclude(Status.SIGNAL, number=number)

    def conclude(
        self, status: Status, *, exception: str = "", line: int = 0, exit_code: int = 0, number: int = 0
    ) -> None:
        """Report the result, once."""
        job, self.job = self.job, None
        if job is None:
            return
        if self.over_output():
            status = Status.OUTPUT_LIMIT
        now = time.monotonic()
        self.over()
        truncated = self.out.truncated or self.err.truncated
        queue_s, run_s = self.started_s - job.arrived_s, now - self.started_s
        details = [exception, line, exit_code, number, truncated, queue_s, run_s, self.used_cpu_s]
        self._on_result(self, [job.id, status.value, self.out.text(), self.err.text(), *details])

    def over(self) -> None:
        """The job is done."""
        raise NotImplementedError


class Program(Coding):
    """A program at work, or a spare: a child that waits for one. The child ends with it."""

    def run(self, job: ProgramJob) -> None:
        """Give it its program."""
        self.job = job
        self.begin(["run", job.code, job.stdin.encode()], job.limits, *job.lead())

    def fits(self, job: ProgramJob) -> bool:
        """Whether a spare was made with the limits that this program needs."""
        mine, wanted = self.limits, job.limits
        return not self.done and (mine.memory_mib, mine.cpu_s) == (wanted.memory_mib, wanted.cpu_s)

    def died(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """As for all code; a spare just ends."""
        if self.job is None:
            self.finish()
        else:
            super().died(wait_status, cpu_s, out_of_memory)

    def broken(self, why: str) -> None:
        """It could not be started; a spare just ends."""
        if self.job is None:
            self.finish()
        else:
            super().broken(why)

    def take(self, record: list[Any]) -> None:
        """Its outcome."""
        self.take_outcome(record)

    def over(self) -> None:
        """The child is done with."""
        self.finish()


def program_job(fields: list[Any], profile: str, preamble: str = "") -> ProgramJob:
    """A program or cell from the front's message; `profile` auto: by the modules that its text names."""
    number, arrived_s, code, stdin, wall_s, cpu_s, memory_mib, output_kib, session, first = fields
    if profile == "auto":
        profile = "sci" if _NEEDS_SCI.search(code) or _NEEDS_SCI.search(preamble) else "lean"
    return ProgramJob(
        id=number,
        arrived_s=arrived_s,
        code=code,
        stdin=stdin,
        limits=Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=memory_mib, output_kib=output_kib),
        profile=profile,
        preamble=preamble,
        session=session,
        first=first,
    )
