"""Tickets: permission for one group to be worked on, and the errors of whoever breaks the staleness law.

Imports     nothing of ours; records and errors only
Invariant   base and deadline of a ticket never change; deadline - base is the staleness promised at its issue

Errors
    LedgerError         a call that the law does not allow; the message carries ticket, base, deadline and step
        FencedError     the caller's life, lease or group is over; it must not be heard again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["waiting", "leased", "finished", "taken", "released", "dropped", "unused"]
"""waiting, leased: being worked on; finished: kept by RoC; taken: in a batch and not yet released; the rest: over"""

OUTSTANDING: frozenset[State] = frozenset({"waiting", "leased", "finished"})
"""issued, neither taken nor dropped"""
ACTIVE: frozenset[State] = OUTSTANDING | {"taken"}
"""what the bound B counts"""


class LedgerError(Exception):
    """A call that the staleness law does not allow."""


class FencedError(LedgerError):
    """A message of a life, lease or group that is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Permission for one group to be worked on.

    Example: issued at S = 2 when all live engines had acknowledged version 4:
        Ticket(group=31, problem_index=31, base=4, deadline=6)
    """

    group: int
    problem_index: int
    """position in the endless sequence of problems; used once, whatever becomes of the group"""
    base: int
    """acknowledged version at issue; no token of the group is older"""
    deadline: int
    """last step that may train the group"""
    state: State = "waiting"
    step: int | None = None
    """the step that took it"""
    drop_reason: str = ""

    @property
    def staleness(self) -> int:
        """S at issue: what the check at the learner and the reports hold the group to."""
        return self.deadline - self.base

    def __str__(self) -> str:
        return f"ticket of group {self.group} ({self.state}, base {self.base}, deadline {self.deadline})"


def check_promise(ticket: Ticket, step: int, version: int) -> None:
    """Whether a token sampled by `version` may be trained at `step` under `ticket`: the law, checked where it counts.

    Raises:
        LedgerError: the token is older than the staleness of the ticket's issue.
    """
    if step - version > ticket.staleness:
        raise LedgerError(
            f"{ticket}: a token of version {version} is {step - version} steps old at step {step}, "
            f"allowed are {ticket.staleness} (S at issue); the batch must not be trained"
        )
