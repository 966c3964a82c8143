"""Mutants of the staleness law, each without one sentence of it: taking, S changed live.

Invariant   a mutant differs from the cores or their shell in one rule; everything else is inherited
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from buffer import taking
from buffer.ledger import Ledger
from buffer.tickets import LedgerError, Ticket
from tests.law.shell import Shell

# Taking


class _Take(Ledger):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        raise NotImplementedError

    def take(self, step: int) -> list[Ticket] | None:
        if step != self.next_step:
            raise LedgerError(f"step {step}")
        batch = self.choose(step)
        if not batch:
            return None
        self.next_step += 1
        return [self._change(t, "taken", step) for t in batch]

    def pool(self) -> list[Ticket]:
        return sorted(self.outstanding, key=lambda t: t.group)

    def by(self, need: Callable[[list[Ticket], list[Ticket], Ticket], bool], order: int = 1) -> list[Ticket] | None:
        """The rule with its parts replaced."""
        pool = self.pool()
        if self.exhausted and len(pool) < self.P:
            return taking.choose(self.next_step, self.P, pool, exhausted=True)
        chosen = [t for t in pool if t.deadline <= self.next_step]
        if any(t.state != "finished" or t.deadline < self.next_step for t in chosen):
            return taking.choose(self.next_step, self.P, pool, exhausted=self.exhausted)
        for t in pool[::order]:
            if len(chosen) < self.P and t.state == "finished" and t not in chosen and need(pool, chosen, t):
                chosen.append(t)
        return chosen if len(chosen) == self.P else None


class DueMayMiss(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        finished = [t for t in self.pool() if t.state == "finished"]
        if self.exhausted and len(self.pool()) < self.P:
            return taking.choose(step, self.P, self.pool(), exhausted=True)
        return finished[: self.P] if len(finished) >= self.P else None


class DueNotWaited(_Take):
    """A due group that is not finished is left out of the batch."""

    def choose(self, step: int) -> Sequence[Ticket] | None:
        pool = [t for t in self.pool() if t.state == "finished" or t.deadline > step]
        return taking.choose(step, self.P, pool, exhausted=self.exhausted)


class UnfinishedTaken(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        pool = self.pool()
        started = [replace(t, state="finished") if t.state == "leased" else t for t in pool]
        return taking.choose(step, self.P, started, exhausted=self.exhausted)


class NoNeed(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        return self.by(lambda pool, chosen, t: True)


class ChosenStillCounted(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        return self.by(lambda pool, chosen, t: taking.worst_need(step, self.P, pool) <= self.P - len(chosen) - 1)


class NewestFirst(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        def fits(pool: list[Ticket], chosen: list[Ticket], t: Ticket) -> bool:
            rest = [x for x in pool if x not in chosen and x is not t]
            return taking.worst_need(step, self.P, rest) <= self.P - len(chosen) - 1

        return self.by(fits, -1)


class ShortAnyTime(_Take):
    """Whatever is finished when the due groups are."""

    def choose(self, step: int) -> Sequence[Ticket] | None:
        pool = self.pool()
        return taking.choose(step, self.P, pool, exhausted=self.exhausted) or taking.choose(
            step, self.P, [t for t in pool if t.state == "finished"], exhausted=True
        )


class ShortWithoutWaiting(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        pool = [t for t in self.pool() if t.state == "finished"] if self.exhausted else self.pool()
        return taking.choose(step, self.P, pool, exhausted=self.exhausted)


class NeverShort(_Take):
    def choose(self, step: int) -> Sequence[Ticket] | None:
        return taking.choose(step, self.P, self.pool(), exhausted=False)


class EpochsApart(Shell):
    """Issuing waits at the end of an epoch until its groups are taken."""

    def source(self, index: int) -> str:
        boundary = index > 0 and index % self.plan.epoch_size == 0
        return "wait" if boundary and self.ledger.outstanding else super().source(index)


class GoalLeavesGroups(Ledger):
    def goal_reached(self, step: int) -> list[Ticket]:
        self.goal = True
        return []


# S changed live


class MovedDeadlines(Ledger):
    def set_staleness(self, S: int) -> None:
        super().set_staleness(S)
        for t in self.outstanding:
            self._tickets[t.group] = replace(t, deadline=t.base + S)


class OldBoundStays(Ledger):
    largest = 0

    @property
    def bound(self) -> int:
        self.largest = max(self.largest, self.S)
        return (self.largest + 1) * self.P


class CheckByCurrentS(Shell):
    def check(self, ticket: Ticket, step: int, version: int) -> None:
        if step - version > self.disk.S:
            raise LedgerError(f"{ticket} at step {step}")
