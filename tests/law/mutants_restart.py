"""Mutants of the staleness law, each without one sentence of it: stuck groups, taking is the record, restart.

Invariant   a mutant differs from the cores or their shell in one rule; everything else is inherited
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from buffer.leases import Leases, RolloutState
from buffer.membership import AckDeadlines, Member
from buffer.peers import Peer, Peers
from tests.law.shell import Shell
from tests.law.world import World

# Stuck group


class TimeoutFromIssue(Leases):
    def open(self, *args: Any, **named: Any) -> None:
        super().open(*args, **named)
        self._groups[args[0]].first_leased_s = self._clock.total_s


class TimeoutFromLastLease(Leases):
    def grant(self, engine: str, epoch: int, loaded: int, want: int, now_s: float) -> list[tuple[int, int, int]]:
        granted = super().grant(engine, epoch, loaded, want, now_s)
        for group, _, _ in granted:
            self._groups[group].first_leased_s = self._clock.total_s
        return granted


class TimeoutRunsWithoutEngine(Leases):
    def timed_out(self, now_s: float, engine_live: bool) -> list[int]:
        return super().timed_out(now_s, True)


class NoTimeout(Leases):
    def timed_out(self, now_s: float, engine_live: bool) -> list[int]:
        return []


class NoExpiry(Leases):
    def release_engine(self, engine: str, epoch: int | None = None) -> list[tuple[int, int]]:
        return []

    def expired(self, now_s: float) -> list[tuple[int, int]]:
        return []


class StuckAlwaysKept(Shell):
    @staticmethod
    def worth(rewards: Sequence[float], group_size: int) -> bool:
        return True


class StuckAlwaysDropped(Shell):
    @staticmethod
    def worth(rewards: Sequence[float], group_size: int) -> bool:
        return False


class LateIsHeard(Leases):
    def _held(self, group: int, rollout: int, attempt: int, engine: str, epoch: int) -> RolloutState:
        return self.state(group, rollout) or RolloutState(group=group, rollout=rollout)


# Taking is the record; restart


class TakenAnew(Shell):
    """The learner's batches are forgotten when it asks again."""

    def learner_hello(self) -> int:
        self.disk.batches = {}
        return super().learner_hello()


class PrunedAtPublication(Shell):
    def record_publication(self, lineage: int, version: int) -> None:
        super().record_publication(lineage, version)
        self.disk.batches = {s: b for s, b in self.disk.batches.items() if s >= version}


class PublishedBeforeRecord(World):
    def publish(self, lineage: int, version: int, content: tuple[Any, ...]) -> Iterator[None]:
        self.serve(lineage, version, content)
        yield
        self.shell.record_publication(lineage, version)
        yield


class PublishesFromCheckpoint(World):
    def restart_version(self, checkpoint: int) -> int:
        return checkpoint


class SameLineage(World):
    def serve(self, lineage: int, version: int, content: tuple[Any, ...]) -> None:
        super().serve(1, version, content)


class OldEpochsHeard(Peers):
    def check(self, name: str, epoch: int) -> Peer:
        return self.by_name[name]


class DeadlinesRunWithoutLearner(AckDeadlines):
    def late(self, live: Sequence[Member], now_s: float, learner_serving: bool) -> list[Member]:
        return super().late(live, now_s, True)


class NoRepublication(World):
    """A restarted learner waits until it has something new, so that joiners wait for it and it for them."""

    def publish(self, lineage: int, version: int, content: tuple[Any, ...]) -> Iterator[None]:
        if version > self.shell.disk.published[1]:
            yield from super().publish(lineage, version, content)


class LateEnginesStay(AckDeadlines):
    def late(self, live: Sequence[Member], now_s: float, learner_serving: bool) -> list[Member]:
        return []
