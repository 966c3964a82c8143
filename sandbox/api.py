"""The sandbox's vocabulary: what is asked, what comes back, and which outcomes count as the model's failure.

Consumes    nothing
Produces    Call, Limits, Result, Status, Check, Verdict; `is_failure` and `is_infra` (read by RoC)
Waits for   nothing: pure records and functions
Invariant   a status says what happened to the process; nothing the code printed can change it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a call ended."""

    OK = "ok"
    """The code ran to its end."""
    ERROR = "error"
    """An exception reached the top level (`exception`, `line`)."""
    EXIT = "exit"
    """The code left with a non-zero exit code (`exit_code`)."""
    SIGNAL = "signal"
    """A signal that the sandbox did not send ended the process (`signal`)."""
    TIMEOUT = "timeout"
    """Wall-clock limit, counted from dispatch."""
    CPU_TIMEOUT = "cpu_timeout"
    """CPU limit."""
    MEMORY = "memory"
    """MemoryError, or the process tree went over its memory limit."""
    OUTPUT_LIMIT = "output_limit"
    """More output than a call may write."""
    BAD_REQUEST = "bad_request"
    """The sandbox cannot run this text as a program (a lone surrogate, a NUL, too long)."""
    MALFORMED = "malformed"
    """The call could not be parsed out of the model's text. Made by the rollout actor, never by a sandbox."""
    OVERLOADED = "overloaded"
    """The queue is full; `Result.retry_after_s` says when to come back."""
    CANCELLED = "cancelled"
    """The client took the call back, or its deadline passed before it was dispatched."""
    WORKER_LOST = "worker_lost"
    """The process that ran the call died twice, or no node answered in time."""
    INTERNAL = "internal"
    """The sandbox could not start the call; `exception` says why."""
    SESSION_LOST = "session_lost"
    """The session's live process is gone (evicted, or its node died); nothing was run."""


INFRA = frozenset({Status.OVERLOADED, Status.CANCELLED, Status.WORKER_LOST, Status.INTERNAL})
"""Outcomes that say nothing about the code: retried, and excluded where they persist."""

_NO_FAILURE = INFRA | {Status.OK, Status.SESSION_LOST}


def is_infra(status: Status) -> bool:
    """Whether the outcome is the sandbox's own: neither a call nor a failure of the model's."""
    return status in INFRA


def is_failure(status: Status) -> bool:
    """Whether the outcome is a failed call of the model's."""
    return status not in _NO_FAILURE


class Verdict(StrEnum):
    """What grading an answer found."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    """The comparison did not end in time: known neither right nor wrong."""
    UNPARSABLE = "unparsable"
    """No mathematical expression was found in the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one call may use."""

    wall_s: float = 4.0
    """Seconds from dispatch."""
    cpu_s: float = 4.0
    """CPU-seconds of the process and of its ended children."""
    memory_mib: int = 256
    """MiB of memory on top of the warm interpreter, for the process tree."""
    output_kib: int = 8192
    """KiB of stdout plus stderr that a call may write before it is stopped."""


KEEP_BYTES = 32 * 1024
"""Of each output stream, this many first and this many last bytes are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One program to run. Example: Call(id="g1-r3-t0", code="print(6 * 7)")."""

    id: str
    """Idempotency key: the same id is run once, however often it is sent."""
    code: str
    """Python source; a last expression's value is shown as IPython does when nothing was printed."""
    input: str = ""
    """Text on standard input."""
    limits: Limits | None = None
    """None: those of the node's settings."""
    session: str = ""
    """Name of the session it is a cell of; "" for a program of its own."""
    first: bool = False
    """Whether it may begin the session; else a session that is not there is `session_lost`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What happened to one call. Example: Result(id="g1-r3-t0", status=Status.OK, stdout="42\\n")."""

    id: str
    status: Status
    stdout: str = ""
    """Decoded with replacement; the middle is cut out beyond 2 * KEEP_BYTES."""
    stderr: str = ""
    exception: str = ""
    """`Type: message` of the exception that ended the code; for infrastructure statuses the cause."""
    line: int = 0
    """Line of the user's code where it happened, from 1; 0 where none applies."""
    exit_code: int = 0
    signal: int = 0
    truncated: bool = False
    """Whether a part of stdout or stderr was cut out."""
    queue_s: float = 0.0
    """Seconds between arrival and dispatch."""
    run_s: float = 0.0
    """Seconds between dispatch and outcome."""
    cpu_s: float = 0.0
    """CPU-seconds used."""
    retry_after_s: float = 0.0
    """With OVERLOADED: seconds after which another try makes sense."""

    @property
    def infra(self) -> bool:
        """Whether the outcome is the sandbox's own (see `is_infra`)."""
        return is_infra(self.status)

    def to_text(self) -> str:
        """The observation as short text for the model: bare output on success, else output so far and one line."""
        line = _status_line(self)
        parts = [self.stdout.rstrip("\n"), line]
        if self.status is Status.EXIT and self.exit_code == 1:
            parts.insert(1, self.stderr.strip())
        return "\n".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One answer to grade. Example: Check(id="g1-r3", answer="\\\\frac{1}{2}", gold="0.5")."""

    id: str
    answer: str
    gold: str


def _status_line(result: Result) -> str:
    """One line that names the outcome; empty for success."""
    where = f" (line {result.line})" if result.line else ""
    match result.status:
        case Status.OK:
            return ""
        case Status.ERROR | Status.BAD_REQUEST | Status.MALFORMED:
            return (result.exception or result.status.value) + where
        case Status.EXIT:
            return f"exit code {result.exit_code}"
        case Status.SIGNAL:
            return f"killed by signal {result.signal}"
        case Status.TIMEOUT:
            return "timed out"
        case Status.CPU_TIMEOUT:
            return "CPU time limit exceeded"
        case Status.MEMORY:
            return "out of memory" + where
        case Status.OUTPUT_LIMIT:
            return "too much output"
        case Status.SESSION_LOST:
            return "session lost: its variables are gone"
        case _:
            return f"tool unavailable ({result.status.value})"
