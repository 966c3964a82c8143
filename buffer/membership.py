"""Engines: their lives, what they have loaded, their deadlines to acknowledge. Heartbeats: buffer/peers.py.

Consumes    joins, acknowledged versions, removals, publications, the time as an argument
Produces    the live engines and what they have loaded; those that are late with an acknowledgement
Waits for   nothing: pure state machines
Invariant   only the newest epoch (one life) of an engine is heard; a loaded version never falls within a life
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from buffer.tickets import FencedError, LedgerError

NOTHING = -1
"""version of an engine that has loaded none"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One life of an engine, as the shell keeps it on disk."""

    name: str
    epoch: int
    version: int = NOTHING
    """newest version acknowledged in this life, whatever its lineage"""


class Members:
    """The engines' lives. Live are those whose loaded version is >= `acked`: all others are still loading.

    That this is the same as "since its first acknowledgement of a version >= acked" follows from acked being the
    least version of the live engines: it can't pass one of them.
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._by_name = {member.name: member for member in members}

    def all(self) -> list[Member]:
        return list(self._by_name.values())

    def live(self, acked: int) -> list[Member]:
        return [member for member in self._by_name.values() if member.version >= acked]

    def join(self, name: str, epoch: int) -> None:
        """A new life replaces the one before; joining again in the same life changes nothing."""
        before = self._by_name.get(name)
        if before is not None and before.epoch > epoch:
            raise FencedError(f"{name}: epoch {epoch} is over, epoch {before.epoch} has joined; start a new life")
        if before is None or before.epoch < epoch:
            self._by_name[name] = Member(name=name, epoch=epoch)

    def acknowledge(self, name: str, epoch: int, version: int) -> None:
        member = self._by_name.get(name)
        if member is None or member.epoch != epoch:
            known = "it has been removed" if member is None else f"epoch {member.epoch} is the current one"
            raise FencedError(f"{name}: acknowledges version {version} in epoch {epoch}, but {known}; join again")
        if version < member.version:
            raise LedgerError(f"{name}: loaded version {member.version} before, now {version}; engines never go back")
        self._by_name[name] = replace(member, version=version)

    def remove(self, name: str, epoch: int | None = None) -> None:
        """The life is over; `epoch` protects a newer life from news about an older one."""
        member = self._by_name.get(name)
        if member is not None and epoch in (None, member.epoch):
            del self._by_name[name]


@dataclass(slots=True)
class StoppableClock:
    """Seconds during which a condition held; the shell reports the condition at each tick and at each change."""

    total_s: float = 0.0
    _last_s: float | None = field(default=None)

    def advance(self, now_s: float, running: bool) -> float:
        """Count the time since the last call if `running` describes it; returns the total."""
        if self._last_s is not None and running:
            self.total_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self.total_s


class AckDeadlines:
    """How long an engine may take to acknowledge a published version, from its publication or, when that came later,
    from the engine's acknowledgement before.

    The time stops while the learner is down or recomputing: nobody can load what nobody serves.
    """

    def __init__(self, ack_timeout_s: float) -> None:
        self.ack_timeout_s = ack_timeout_s
        self._clock = StoppableClock()
        self._published_s: dict[int, float] = {}
        self._loaded_s: dict[str, tuple[Member, float]] = {}

    def published(self, version: int) -> None:
        """The record of a publication was written (again, under another lineage: the first time counts)."""
        self._published_s.setdefault(version, self._clock.total_s)

    def late(self, live: Sequence[Member], now_s: float, learner_serving: bool) -> list[Member]:
        """The live engines that have had longer than allowed for a version that they have not loaded.

        `learner_serving` describes the time since the last call, as with `StoppableClock`.
        """
        total_s = self._clock.advance(now_s, learner_serving)
        known = self._loaded_s
        same = {m.name: known[m.name] for m in live if m.name in known and known[m.name][0] == m}
        self._loaded_s = {m.name: (m, total_s) for m in live} | same
        least = min((member.version for member in live), default=NOTHING)
        self._published_s = {v: s for v, s in self._published_s.items() if v > least}
        return [member for member in live if total_s - self._since_s(member, total_s) > self.ack_timeout_s]

    def _since_s(self, member: Member, total_s: float) -> float:
        newer_s = min((s for v, s in self._published_s.items() if v > member.version), default=total_s)
        return max(newer_s, self._loaded_s[member.name][1])
