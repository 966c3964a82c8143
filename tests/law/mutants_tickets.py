"""Mutants of the staleness law, each without one sentence of it: tickets, versions, issue, release.

Invariant   a mutant differs from the cores or their shell in one rule; everything else is inherited
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from buffer.leases import Leases
from buffer.ledger import Ledger
from buffer.membership import NOTHING, Member
from buffer.tickets import Ticket
from tests.law.shell import Shell

# Tickets and versions


class BoundOfOutstanding(Ledger):
    @property
    def active(self) -> int:
        return len(self.outstanding)


class BoundWithoutFinished(Ledger):
    @property
    def active(self) -> int:
        return sum(t.state != "finished" for t in self.tickets)


class BoundOneMore(Ledger):
    @property
    def bound(self) -> int:
        return super().bound + 1


class AnotherBound(Ledger):
    """Only P groups are worked on at a time."""

    def issue_waits_for(self) -> str:
        working = sum(t.state in ("waiting", "leased") for t in self.tickets)
        return super().issue_waits_for() or ("others" if working >= self.P else "")


class CumulativeBound(Ledger):
    """Outstanding work reckoned from counts that do not know of drops: the quota shrinks for ever."""

    @property
    def active(self) -> int:
        return self.next_group - min(self.acked, self.next_step) * self.P


class JoinerHolds(Ledger):
    @property
    def live(self) -> list[Member]:
        return self.members


class LiveAtAnyAck(Ledger):
    @property
    def live(self) -> list[Member]:
        return [m for m in self.members if m.version != NOTHING]


class DeadStay(Ledger):
    def remove(self, name: str, epoch: int | None = None) -> list[Ticket]:
        return []


class AckedIsNewest(Ledger):
    def _settle(self) -> list[Ticket]:
        self.acked = max([self.acked, *(m.version for m in self.members)])
        done = [t for t in self.tickets if t.step is not None and t.step < self.acked]
        return [self._retire(replace(t, state="released")) for t in done]


class AckedForgotten(Ledger):
    """acked is worked out from the members that are there, not kept."""

    @property
    def live(self) -> list[Member]:
        return [m for m in self.members if m.version != NOTHING]

    def _settle(self) -> list[Ticket]:
        live = self.live
        if not live:
            return []
        self.acked = min(m.version for m in live)
        done = [t for t in self.tickets if t.step is not None and t.step < self.acked]
        return [self._retire(replace(t, state="released")) for t in done]


class AckedNotDurable(Ledger):
    def restore(self, tickets: Any, acked: int, members: Iterable[Member], next_step: int, S: int) -> None:
        super().restore(tickets, 0, members, next_step, S)


class MembersForgotten(Ledger):
    def restore(self, tickets: Any, acked: int, members: Iterable[Member], next_step: int, S: int) -> None:
        super().restore(tickets, acked, [], next_step, S)


class PreviousLifeStays(Shell):
    def restore_peers(self) -> None:
        super().restore_peers()
        for peer in self.peers.by_name.values():
            peer.heard_s = float("inf")


class AckByLineage(Shell):
    """An acknowledgement of another lineage than the newest does not count."""

    def acknowledge(self, name: str, epoch: int, lineage: int, version: int) -> None:
        if lineage == self.learner_lineage:
            super().acknowledge(name, epoch, lineage, version)
        else:
            self.judge.acknowledged(name, version)
            self.commit([])


# Issue


class _Issue(Ledger):
    def terms(self) -> tuple[int, int]:
        raise NotImplementedError

    def issue(self, next_problem_index: int) -> Ticket | None:
        ticket = super().issue(next_problem_index)
        if ticket is None:
            return None
        base, deadline = self.terms()
        changed = replace(ticket, base=base, deadline=deadline)
        self._tickets[ticket.group] = changed
        return changed


class BaseIsPublished(_Issue):
    def terms(self) -> tuple[int, int]:
        return max(m.version for m in self.members), self.acked + self.S


class DeadlineFromPublished(_Issue):
    def terms(self) -> tuple[int, int]:
        return self.acked, self.next_step + self.S


class DeadlineLater(_Issue):
    def terms(self) -> tuple[int, int]:
        return self.acked, self.acked + self.S + 1


class AckedBeforeRelease(_Issue):
    """Issuing goes on with the value of acked from before the release."""

    stale = 0

    def terms(self) -> tuple[int, int]:
        return self.stale, self.stale + self.S

    def _settle(self) -> list[Ticket]:
        self.stale = self.acked
        return super()._settle()


class IssueWithoutEngine(Ledger):
    @property
    def live(self) -> list[Member]:
        return super().live or [Member(name="nobody", epoch=0, version=self.acked)]


class AnyVersionMayLease(Leases):
    def grant(self, engine: str, epoch: int, loaded: int, want: int, now_s: float) -> list[tuple[int, int, int]]:
        return super().grant(engine, epoch, 10**6, want, now_s)


class LatestDeadlineFirst(Leases):
    def grant(self, engine: str, epoch: int, loaded: int, want: int, now_s: float) -> list[tuple[int, int, int]]:
        for group in self._groups.values():
            group.deadline *= -1
        try:
            return super().grant(engine, epoch, loaded, want, now_s)
        finally:
            for group in self._groups.values():
                group.deadline *= -1


class LeaseRenews(Shell):
    """A rollout leased again brings its group a fresh base and deadline."""

    def lease(self, name: str, epoch: int, loaded: int, want: int) -> list[tuple[int, int, int]]:
        granted = super().lease(name, epoch, loaded, want)
        for group, _, attempt in granted:
            if attempt > 1:
                ticket = self.ledger._tickets[group]
                fresh = replace(ticket, base=self.ledger.acked, deadline=self.ledger.acked + self.disk.S)
                self.ledger._tickets[group] = fresh
                self.commit([fresh])
        return granted


# Release


class _Release(Ledger):
    def ready(self, step: int) -> bool:
        raise NotImplementedError

    def _settle(self) -> list[Ticket]:
        live = self.live
        if live:
            self.acked = max(self.acked, min(m.version for m in live))
        done = [t for t in self.tickets if t.state == "taken" and t.step is not None and self.ready(t.step)]
        return [self._retire(replace(t, state="released")) for t in done]

    def _refuse_torn(self, ticket: Ticket) -> None:
        pass


class ReleaseEarly(_Release):
    def ready(self, step: int) -> bool:
        return bool(self.live) and self.acked >= step


class ReleaseExact(_Release):
    def ready(self, step: int) -> bool:
        return bool(self.live) and self.acked == step + 1


class ReleaseWithoutEngine(_Release):
    def ready(self, step: int) -> bool:
        return not self.live or self.acked >= step + 1


class ReleaseAtTake(Ledger):
    def take(self, step: int) -> list[Ticket] | None:
        taken = super().take(step)
        return None if taken is None else [self._retire(replace(t, state="released")) for t in taken]


class TwoTransactions(Shell):
    """acked is written, the buffer dies, the released tickets are not (or the other way round)."""

    acked_first = True

    def acknowledge(self, name: str, epoch: int, lineage: int, version: int) -> None:
        acked, members = self.disk.acked, self.disk.members
        super().acknowledge(name, epoch, lineage, version)
        released = [t for t in self.disk.tickets.values() if t.state == "released" and (t.step or 0) >= acked]
        if self.disk.acked > acked and self.now_s % 3 == 0:
            if self.acked_first:
                self.disk.tickets |= {t.group: replace(t, state="taken") for t in released}
            else:
                self.disk.acked, self.disk.members = acked, members
                self.judge.acked = acked
                self.judge.live = {m.name: m.version for m in members.values() if m.version >= acked}
            self.start()


class TwoTransactionsReleaseFirst(TwoTransactions):
    acked_first = False


class DropKeepsTicket(Ledger):
    """A dropped group's ticket is free only once its deadline's step is acknowledged."""

    def drop(self, group: int, reason: str) -> list[Ticket]:
        self.drops[reason] += 1
        return [self._change(replace(self._tickets[group], drop_reason=reason), "taken", self._tickets[group].deadline)]

    def _refuse_torn(self, ticket: Ticket) -> None:
        pass


class DropOnlyWithEngine(Ledger):
    def drop(self, group: int, reason: str) -> list[Ticket]:
        if self.live:
            return super().drop(group, reason)
        self.drops[reason] += 1
        return [self._change(self._tickets[group], "leased")]


class DropUncounted(Ledger):
    def drop(self, group: int, reason: str) -> list[Ticket]:
        changed = super().drop(group, reason)
        self.drops[reason] -= 1
        return changed


class DropReturnsProblem(Ledger):
    def drop(self, group: int, reason: str) -> list[Ticket]:
        changed = super().drop(group, reason)
        self.next_problem = min(self.next_problem, changed[0].problem_index)
        return changed
