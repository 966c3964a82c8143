"""The ticket ledger: which groups may be worked on, and the last step that may train each.

Consumes    acknowledged versions, finished and dropped groups, requests to issue and to take
Produces    tickets; every method that changes some returns them, so that the shell writes them in one transaction
Waits for   nothing: a pure state machine; numbers of problems are arguments, time plays no part
Invariant   for every d, at most (d - k + 1) * P outstanding groups have a deadline <= d, k being the next step;
            active tickets never become more while they are at or above B = (S + 1) * P

Example, P = 8, S = 1: engines acknowledge version 0; 16 tickets go out with base 0, deadline 1. Step 0 takes 8, the
learner publishes version 1; once every live engine has acknowledged it, acked is 1, those 8 are released, and 8 new
tickets go out with base 1, deadline 2.

The shell keeps on disk: every ticket, `acked`, `members`, `next_step`, `S`. It writes what a method changed, `acked`
included, in one transaction before anything else happens. Only active tickets stay in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from buffer import taking
from buffer.membership import Member, Members
from buffer.tickets import ACTIVE, OUTSTANDING, LedgerError, State, Ticket


class Ledger:
    """The staleness law (ARCHITECTURE.md, the staleness law) as a state machine."""

    def __init__(self, P: int, S: int, steps: int) -> None:
        """P `groups_per_step`, S `max_staleness`, `steps` learner steps until the goal."""
        if P < 1 or S < 0 or steps < 0:
            raise ValueError(f"P = {P} must be >= 1, S = {S} >= 0, steps = {steps} >= 0")
        self.P = P
        self.S = S
        self.steps = steps
        self.acked = 0
        """least version that the live engines have loaded; never falls"""
        self.next_step = 0
        """first step without a batch"""
        self.next_group = 0
        self.next_problem = 0
        """problems below it are used"""
        self.exhausted = False
        """set by the shell when the source has no further problem"""
        self.goal = False
        self.drops: Counter[str] = Counter()
        """dropped groups by reason"""
        self.unused = 0
        """groups outstanding when the goal was reached"""
        self._tickets: dict[int, Ticket] = {}
        self._members = Members()

    def restore(self, tickets: Iterable[Ticket], acked: int, members: Iterable[Member], next_step: int, S: int) -> None:
        """Take up what is on disk: all tickets (those that are over give the counts), the members of the previous life.

        Those members hold `acked` as before until they speak or the shell removes them.

        Raises:
            LedgerError: the parts do not fit together, which one transaction per change rules out.
        """
        self.acked, self.next_step, self.S = acked, next_step, S
        self._members = Members(members)
        for ticket in tickets:
            self.next_group = max(self.next_group, ticket.group + 1)
            self.next_problem = max(self.next_problem, ticket.problem_index + 1)
            self._refuse_torn(ticket)
            if ticket.state in ACTIVE:
                self._tickets[ticket.group] = ticket
            elif ticket.state == "dropped":
                self.drops[ticket.drop_reason] += 1
            elif ticket.state == "unused":
                self.unused += 1

    # Membership

    @property
    def members(self) -> list[Member]:
        return self._members.all()

    @property
    def live(self) -> list[Member]:
        """The engines that issuing and releasing depend on; one that is still loading is not among them."""
        return self._members.live(self.acked)

    def join(self, name: str, epoch: int) -> list[Ticket]:
        """A life of an engine begins, its earlier one is over. Returns the tickets released by that.

        Raises:
            FencedError: a newer life of `name` has joined.
        """
        self._members.join(name, epoch)
        return self._settle()

    def acknowledge(self, name: str, epoch: int, version: int) -> list[Ticket]:
        """The engine has loaded `version`. Returns the released tickets; `acked` may have risen.

        Raises:
            FencedError: this life of the engine is over.
            LedgerError: a version that can't exist yet, or one older than the engine had.
        """
        if version > self.next_step:
            raise LedgerError(
                f"{name}: acknowledges version {version}, but the next step to be taken is {self.next_step}"
            )
        self._members.acknowledge(name, epoch, version)
        return self._settle()

    def remove(self, name: str, epoch: int | None = None) -> list[Ticket]:
        """The engine died or is fenced. Returns the tickets released, when it was the one that held `acked` back."""
        self._members.remove(name, epoch)
        return self._settle()

    # Tickets

    @property
    def bound(self) -> int:
        """B"""
        return (self.S + 1) * self.P

    @property
    def active(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        """The active tickets, oldest first."""
        return list(self._tickets.values())

    @property
    def outstanding(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.state in OUTSTANDING]

    @property
    def spent(self) -> bool:
        """No batch can come any more: the source is exhausted and nothing is outstanding."""
        return self.exhausted and not self.outstanding

    def get(self, group: int) -> Ticket | None:
        """The group's ticket while it is active."""
        return self._tickets.get(group)

    def issue_waits_for(self) -> str:
        """Why no ticket can be issued, for people; "" when one can."""
        if self.goal or self.next_step >= self.steps:
            return "nothing: the last batch is taken"
        if self.exhausted:
            return "nothing: the source of problems is exhausted"
        if not self.live:
            return f"an engine that has loaded version {self.acked} or later"
        if self.active >= self.bound:
            return f"a ticket: {self.active} are active, the bound is {self.bound}"
        return ""

    def can_issue(self) -> bool:
        return not self.issue_waits_for()

    def issue(self, next_problem_index: int) -> Ticket | None:
        """A ticket for the group of this problem, or None when none may be issued now (`issue_waits_for`).

        Raises:
            LedgerError: the problem is used already.
        """
        if next_problem_index < self.next_problem:
            raise LedgerError(f"problem {next_problem_index} is used already, the next one is {self.next_problem}")
        if not self.can_issue():
            return None
        ticket = Ticket(
            group=self.next_group,
            problem_index=next_problem_index,
            base=self.acked,
            deadline=self.acked + self.S,
        )
        self._tickets[ticket.group] = ticket
        self.next_group += 1
        self.next_problem = next_problem_index + 1
        return ticket

    def lease(self, group: int) -> list[Ticket]:
        """A rollout of the group was leased; changes the ticket the first time only."""
        ticket = self._expect(group, OUTSTANDING, "lease")
        return [self._change(ticket, "leased")] if ticket.state == "waiting" else []

    def finish(self, group: int) -> list[Ticket]:
        """RoC keeps the group: it can be taken."""
        return [self._change(self._expect(group, OUTSTANDING - {"finished"}, "finish"), "finished")]

    def drop(self, group: int, reason: str) -> list[Ticket]:
        """The group will not be trained: its ticket is free at once, its problem stays used."""
        if not reason:
            raise LedgerError(f"group {group}: a drop needs a reason, so that it can be counted")
        ticket = self._expect(group, OUTSTANDING, "drop")
        self.drops[reason] += 1
        return [self._retire(replace(ticket, state="dropped", drop_reason=reason))]

    def take(self, step: int) -> list[Ticket] | None:
        """The groups that step `step` trains, or None while it has to wait (`take_waits_for`).

        Every group whose deadline is `step` is among them; the other places go to finished groups, oldest first, as
        long as what remains can still meet its deadlines. A step that was taken before is the shell's to answer from
        its record.

        Raises:
            LedgerError: `step` is not the next one, or a deadline before it is outstanding.
        """
        if step != self.next_step or step >= self.steps:
            raise LedgerError(f"step {step} can't be taken: the next one is {self.next_step} of {self.steps}")
        batch = taking.choose(step, self.P, self.outstanding, exhausted=self.exhausted)
        if batch is None:
            return None
        self.next_step += 1
        return [self._change(ticket, "taken", step) for ticket in batch]

    def take_waits_for(self) -> str:
        """Why the next batch is not there yet, for people."""
        return taking.waits_for(self.next_step, self.P, self.outstanding)

    def set_staleness(self, S: int) -> None:
        """Tickets keep their deadlines; issuing pauses until fewer than the new B are active."""
        if S < 0:
            raise LedgerError(f"S = {S} must be >= 0")
        self.S = S

    def goal_reached(self, step: int) -> list[Ticket]:
        """The last step trained is `step`: nothing is issued any more, what is outstanding is counted as unused."""
        if step > self.next_step:
            raise LedgerError(
                f"the goal can't be reached at step {step}: the next step to be taken is {self.next_step}"
            )
        self.goal = True
        over = [self._retire(replace(ticket, state="unused")) for ticket in self.outstanding]
        self.unused += len(over)
        return over

    # Rules

    def _settle(self) -> list[Ticket]:
        """Raise `acked` to what every live engine has, and release every step below it: one change.

        With no live engine neither happens.
        """
        live = self.live
        if not live:
            return []
        self.acked = max(self.acked, min(member.version for member in live))
        done = [t for t in self._tickets.values() if t.state == "taken" and t.step is not None and t.step < self.acked]
        return [self._retire(replace(ticket, state="released")) for ticket in done]

    def _expect(self, group: int, states: frozenset[State], action: str) -> Ticket:
        ticket = self._tickets.get(group)
        if ticket is None:
            raise LedgerError(f"group {group}: can't {action}, it has no active ticket (next step {self.next_step})")
        if ticket.state not in states:
            raise LedgerError(
                f"{ticket}: can't {action} at step {self.next_step}; it would have to be {sorted(states)}"
            )
        return ticket

    def _change(self, ticket: Ticket, state: State, step: int | None = None) -> Ticket:
        changed = replace(ticket, state=state, step=step)
        self._tickets[ticket.group] = changed
        return changed

    def _retire(self, ticket: Ticket) -> Ticket:
        del self._tickets[ticket.group]
        return ticket

    def _refuse_torn(self, ticket: Ticket) -> None:
        if ticket.state in OUTSTANDING and ticket.deadline < self.next_step:
            raise LedgerError(f"{ticket}: outstanding on disk, but the next step is {self.next_step}")
        if ticket.state == "taken" and not (ticket.step is not None and self.acked <= ticket.step < self.next_step):
            raise LedgerError(
                f"{ticket}: taken by step {ticket.step} on disk, but acked is {self.acked} and the next step "
                f"{self.next_step}: a change was written in parts"
            )
