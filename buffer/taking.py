"""Which groups the batch of a step consists of: deadlines first, then oldest first as far as deadlines allow.

Consumes    the outstanding tickets (issued, neither taken nor dropped)
Produces    the P tickets of a step, or None
Waits for   every outstanding group whose deadline is the step; P finished groups that may go together
Invariant   if for every d at most (d - k + 1) * P outstanding groups have a deadline <= d, so it is for k + 1

Example, P = 2, step 4, finished in brackets, written group:deadline
    [7:5] 8:5 9:5 [10:6]    no group is due at 4; 7 goes first. If 10 went second, 8 and 9 would be left for step 5's
                            two places: allowed, so the batch is 7, 10.
    [7:5] 8:5 9:5 11:5 [10:6]  now 10 would leave 8, 9, 11 for two places: it is skipped, step 4 waits for 8, 9 or 11.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from buffer.tickets import LedgerError, Ticket


def worst_need(step: int, P: int, remaining: Sequence[Ticket]) -> int:
    """The largest need(j) over j >= 1: places that step `step` itself must still give to groups of later deadlines.

    need(j) = (groups in `remaining` with deadline <= step + j) - j * P; 0 at least.
    """
    return _worst(step, P, Counter(ticket.deadline for ticket in remaining))


def _worst(step: int, P: int, by_deadline: Counter[int]) -> int:
    worst = count = 0
    for deadline in sorted(by_deadline):
        count += by_deadline[deadline]
        worst = max(worst, count - (deadline - step) * P)
    return worst


def choose(step: int, P: int, outstanding: Sequence[Ticket], *, exhausted: bool) -> list[Ticket] | None:
    """The tickets that step `step` trains, or None while it has to wait.

    A batch is short only when the source is exhausted and fewer than P groups are outstanding: it is all of them.

    Raises:
        LedgerError: a deadline before `step` is outstanding, or more than P are due: the law was broken before.
    """
    ordered = sorted(outstanding, key=lambda t: t.group)
    due = [t for t in ordered if t.deadline <= step]
    _refuse_broken(step, P, due)
    if exhausted and len(ordered) < P:
        return ordered if ordered and all(t.state == "finished" for t in ordered) else None
    if any(t.state != "finished" for t in due):
        return None
    chosen = list(due)
    left = Counter(ticket.deadline for ticket in ordered if ticket.deadline > step)
    for ticket in ordered:
        if len(chosen) == P:
            break
        if ticket.state != "finished" or ticket.deadline <= step:
            continue
        left[ticket.deadline] -= 1
        if _worst(step, P, left) <= P - len(chosen) - 1:
            chosen.append(ticket)
        else:
            left[ticket.deadline] += 1
    return chosen if len(chosen) == P else None


def waits_for(step: int, P: int, outstanding: Sequence[Ticket]) -> str:
    """Why the batch of `step` is not there yet, for people."""
    due = [t.group for t in outstanding if t.deadline <= step and t.state != "finished"]
    if due:
        return f"step {step} waits for groups {due}, due at this step"
    finished = sum(t.state == "finished" for t in outstanding)
    return f"step {step} waits for {P} groups that may go together; {finished} of {len(outstanding)} are finished"


def _refuse_broken(step: int, P: int, due: Sequence[Ticket]) -> None:
    for ticket in due:
        if ticket.deadline < step:
            raise LedgerError(f"{ticket}: still outstanding at step {step}, its deadline has passed")
    if len(due) > P:
        raise LedgerError(
            f"{len(due)} groups are due at step {step}, a step has {P} places; the first two: {due[0]}, {due[1]}"
        )
