"""What a node has taken on: waiting, placed and finished work, and which shard gets what next.

Consumes    requests, credit of shards, results, losses of shards
Produces    placements; results and verdicts for the clients that asked
Waits for   nothing: a state machine without sockets; time is an argument
Invariant   an id is run once however often it is sent; work lost with a process is placed once more, then given up
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from buffer.meters import Histogram
from sandbox import messages
from sandbox.api import Call, Check, Result, Status
from sandbox.queue import FairQueue

RESULT_TTL_S = 120.0
"""Seconds that a result is kept for a client that has not acknowledged it."""
GRADE_BATCH = 32
RETRY_AFTER_S = 0.5
_MAX_LOSSES = 2
_MAX_HOMES = 100_000


class Place(Protocol):
    """Where work is placed: a shard."""

    credit: int
    held: set[int]

    def send(self, *message: Any) -> None:
        """Hand over a message."""


@dataclass(slots=True, eq=False)
class Entry:
    """One call or answer."""

    number: int
    key: tuple[str, str]
    """(tenant, id)."""
    client: bytes
    """Who gets the result."""
    work: Call | Check
    priority: int
    arrived_s: float
    losses: int = 0
    place: Place | None = None
    outcome: Any = None
    """Result fields or a verdict, once known."""
    finished_s: float = 0.0
    cancelled: bool = False


def _session_key(tenant: str, session: str) -> str:
    return f"{tenant}/{session}"


@dataclass(slots=True)
class Counts:
    """Cumulative counters of a node."""

    calls: int = 0
    checks: int = 0
    refused: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    lost_placements: int = 0
    zygote_restarts: int = 0
    sessions_evicted: int = 0
    shard_restarts: int = 0


class Dispatch:
    """The work of a node."""

    def __init__(self, queue_bound: int, deliver: Callable[[Entry], None]) -> None:
        self._bound = queue_bound
        self._deliver = deliver
        self._entries: dict[tuple[str, str], Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._finished: OrderedDict[int, Entry] = OrderedDict()
        self._programs: FairQueue[Entry] = FairQueue()
        self._answers: FairQueue[Entry] = FairQueue()
        self._sequence = 0
        self._answers_turn = False
        self._sessions: OrderedDict[str, Place] = OrderedDict()
        self.counts = Counts()
        self.histograms: dict[str, Histogram] = {}
        """Seconds that calls waited (queue_s) and ran (run_s/STATUS), and that answers took from arrival (check_s)."""

    @property
    def num_waiting(self) -> int:
        """Work that no shard has yet."""
        return len(self._programs) + len(self._answers)

    @property
    def num_placed(self) -> int:
        """Work that shards have."""
        return len(self._by_number) - len(self._finished) - self.num_waiting

    @property
    def num_suspect(self) -> int:
        """Unfinished work that a process was lost with once: with a second loss it is given up."""
        return sum(entry.losses > 0 and entry.outcome is None for entry in self._by_number.values())

    def add(self, tenant: str, client: bytes, work: Call | Check, priority: int, now_s: float) -> None:
        """Take on a request; one that is known already goes to `client` when, or as, it is done."""
        key = (tenant, work.id)
        known = self._entries.get(key)
        if known is not None:
            known.client = client
            if known.outcome is not None:
                self._deliver(known)
            return
        self._sequence += 1
        entry = Entry(self._sequence, key, client, work, priority, now_s)
        if self.num_waiting >= self._bound:
            self.counts.refused += 1
            entry.outcome = Result(id=work.id, status=Status.OVERLOADED, retry_after_s=RETRY_AFTER_S)
            self._deliver(entry)
            return
        self._entries[key] = self._by_number[entry.number] = entry
        if isinstance(work, Call) and work.session:
            home = self._sessions.get(_session_key(tenant, work.session))
            if home is not None:  # it can go nowhere else, so it does not wait for credit
                self._place_program(entry, work, home)
                return
            if not work.first:
                self.finish(entry.number, Result(id=work.id, status=Status.SESSION_LOST), now_s)
                return
        self._wait(entry)

    def _wait(self, entry: Entry, *, again: bool = False) -> None:
        queue = self._programs if isinstance(entry.work, Call) else self._answers
        queue.push(entry.key[0], entry.priority, entry, again=again)

    def place(self, places: list[Place]) -> None:
        """Give waiting work to the places that have credit, the freest first."""
        while self.num_waiting:
            place = max(places, key=lambda place: place.credit, default=None)
            if place is None or place.credit < 1:
                return
            take_answers = len(self._answers) and (self._answers_turn or not len(self._programs))
            self._answers_turn = not take_answers
            if take_answers:
                self._place_answers(place)
            elif (entry := self._programs.pop()) is not None and not entry.cancelled:
                assert isinstance(entry.work, Call)
                self._place_program(entry, entry.work, place)

    def _place_program(self, entry: Entry, call: Call, place: Place) -> None:
        assert call.limits is not None
        limits = call.limits
        bounds = (limits.wall_s, limits.cpu_s, limits.memory_mib, limits.output_kib)
        session = _session_key(entry.key[0], call.session) if call.session else ""
        if session:
            self._sessions[session] = place
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_HOMES:
                self._sessions.popitem(last=False)
        self._hand_over(entry, place)
        place.credit -= 1
        place.send(messages.RUN, entry.number, entry.arrived_s, call.code, call.input, *bounds, session, call.first)

    def end_session(self, tenant: str, session: str) -> None:
        """The client is through with a session."""
        key = _session_key(tenant, session)
        home = self._sessions.pop(key, None)
        if home is not None:
            home.send(messages.END, key)

    def drop_place(self, place: Place, now_s: float) -> None:
        """A place is gone with what it had."""
        for key in [key for key, home in self._sessions.items() if home is place]:
            del self._sessions[key]
        self.lose(sorted(place.held), now_s)

    def _place_answers(self, place: Place) -> None:
        batch: list[list[Any]] = []
        while len(batch) < GRADE_BATCH and (entry := self._answers.pop()) is not None:
            if entry.cancelled:
                continue
            assert isinstance(entry.work, Check)
            self._hand_over(entry, place)
            batch.append([entry.number, entry.work.answer, entry.work.gold])
            if entry.losses:  # it may be what killed a zygote: alone, so that it takes no other along
                break
        if batch:
            place.credit -= 1
            place.send(messages.GRADE, batch)

    @staticmethod
    def _hand_over(entry: Entry, place: Place) -> None:
        entry.place = place
        place.held.add(entry.number)

    def finish(self, number: int, outcome: Any, now_s: float) -> None:
        """An outcome is known; late ones (of work that was given up) are ignored."""
        entry = self._by_number.get(number)
        if entry is None or entry.outcome is not None:
            return
        if entry.place is not None:
            entry.place.held.discard(number)
            entry.place = None
        entry.outcome, entry.finished_s = outcome, now_s
        self._finished[number] = entry
        self._count(entry)
        self._deliver(entry)

    def _count(self, entry: Entry) -> None:
        counts, outcome = self.counts, entry.outcome
        if isinstance(outcome, Result):
            counts.calls += 1
            status = outcome.status.value
            counts.statuses[status] = counts.statuses.get(status, 0) + 1
            counts.cpu_s += outcome.cpu_s
            self._observe("queue_s", outcome.queue_s)
            self._observe(f"run_s/{status}", outcome.run_s)
        else:
            counts.checks += 1
            self._observe("check_s", entry.finished_s - entry.arrived_s)

    def _observe(self, name: str, seconds: float) -> None:
        if name not in self.histograms:
            self.histograms[name] = Histogram()
        self.histograms[name].observe(seconds)

    def return_unstarted(self, numbers: list[int]) -> None:
        """A shard gives back work that it did not start."""
        for number in reversed(numbers):
            entry = self._by_number.get(number)
            if entry is not None and entry.outcome is None and entry.place is not None:
                entry.place.held.discard(number)
                entry.place = None
                self._wait(entry, again=True)

    def lose(self, numbers: list[int], now_s: float) -> None:
        """Work was lost with the process that had it: place it once more, then give it up."""
        again: list[int] = []
        for number in numbers:
            entry = self._by_number.get(number)
            if entry is None or entry.outcome is not None:
                continue
            self.counts.lost_placements += 1
            if isinstance(entry.work, Call) and entry.work.session and not entry.work.first:
                self.finish(number, Result(id=entry.work.id, status=Status.SESSION_LOST), now_s)
                continue
            entry.losses += 1
            if entry.losses < _MAX_LOSSES:
                again.append(number)
            else:
                cause = f"the process that ran it was lost {entry.losses} times"
                self.finish(number, Result(id=entry.work.id, status=Status.WORKER_LOST, exception=cause), now_s)
        self.return_unstarted(again)

    def cancel(self, tenant: str, name: str, now_s: float) -> None:
        """The client does not want it any more."""
        entry = self._entries.get((tenant, name))
        if entry is None or entry.outcome is not None:
            return
        if entry.place is not None:
            entry.place.send(messages.CANCEL, entry.number)
            return
        entry.cancelled = True
        self.finish(entry.number, Result(id=name, status=Status.CANCELLED), now_s)

    def acknowledge(self, tenant: str, name: str) -> None:
        """The client has the outcome."""
        entry = self._entries.get((tenant, name))
        if entry is not None and entry.outcome is not None:
            self._forget(entry)

    def expire(self, now_s: float) -> None:
        """Drop outcomes that nobody acknowledged in time."""
        while self._finished:
            entry = next(iter(self._finished.values()))
            if entry.finished_s > now_s - RESULT_TTL_S:
                return
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._finished.pop(entry.number, None)
        self._by_number.pop(entry.number, None)
        self._entries.pop(entry.key, None)
