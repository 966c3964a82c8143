"""Cores that activities share, and engines that batch.

Consumes    jobs (CPU seconds), generations (tokens), pauses for versions
Produces    simpy events that fire when they are over; versions that sampled a generation's tokens
Waits for   simulated time
Invariant   while activities want more cores than a machine has, all that need one go slower by the same factor; all
            generations of an engine advance at one pace, a token a pass; a pass takes longer the more there are, and
            for the contexts of those that join in it

Both are a clock that runs at the common pace, on which an activity that begins at w and needs d is over at w + d. So an
arrival or an end costs one look at each heap's top, however many share.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from math import floor

import simpy
from simpy.events import Event

from actors.rollout_figures import near_power
from launch.tune.shapes import Generated, Machine, PassTime

_EPSILON = 1e-9


class Host:
    """A machine."""

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self.env, self._cores = env, machine.cores
        self._others = min(machine.others, machine.cores)
        self._wanted = self._others
        self.engines: list[Engine] = []
        self.used_s = 0.0
        """core seconds so far"""
        self.speed = 1.0
        """of whatever needs a core"""
        self._work = 0.0
        self._since_s = 0.0
        self._jobs: list[tuple[float, int, float, Event]] = []
        self._numbers = count()
        self._due_s = float("inf")

    def job(self, cpu_s: float, cores: float = 1.0) -> Event:
        """Fires when the activity, which takes `cpu_s` with the `cores` it wants, is over."""
        event = self.env.event()
        if cpu_s <= 0:
            return event.succeed()
        self.advance()
        heapq.heappush(self._jobs, (self._work + cpu_s, next(self._numbers), cores, event))
        self._wanted += cores
        self.settle()
        return event

    def want(self, cores: float) -> None:
        """An engine begins (negative: ceases) to want cores; the caller has called `advance`, and calls `settle`."""
        self._wanted += cores

    def advance(self) -> None:
        """Everything has gone on at its pace since the last change."""
        now_s = self.env.now
        passed_s = now_s - self._since_s
        if passed_s > 0:
            self._work += self.speed * passed_s
            self.used_s += min(self._cores, self._wanted) * passed_s
            for engine in self.engines:
                engine.advance(passed_s)
            self._since_s = now_s

    def settle(self) -> None:
        """After a change: the new speed, and when the next activity will be over at it."""
        self.speed = min(1.0, self._cores / self._wanted) if self._wanted > 0 else 1.0
        soonest_s = (self._jobs[0][0] - self._work) / self.speed if self._jobs else float("inf")
        for engine in self.engines:
            soonest_s = min(soonest_s, engine.soonest_s(self.speed))
        due_s = self.env.now + max(0.0, soonest_s)
        if due_s < self._due_s:  # one that comes too early only looks again
            self._due_s = due_s
            alarm = self.env.timeout(due_s - self.env.now)
            assert alarm.callbacks is not None
            alarm.callbacks.append(lambda _: self._look(due_s))

    def _look(self, due_s: float) -> None:
        if due_s != self._due_s:
            return
        self._due_s = float("inf")
        self.advance()
        while self._jobs and self._jobs[0][0] <= self._work + _EPSILON:
            _, _, cores, event = heapq.heappop(self._jobs)
            self._wanted -= cores
            event.succeed()
        for engine in self.engines:
            engine.finish()
        self.settle()


class Thread:
    """Of a role that does one thing at a time: what comes meanwhile waits."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._queue: deque[tuple[float, Event]] = deque()

    def work(self, cpu_s: float) -> Event:
        """Fires when it is done."""
        over = self._host.env.event()
        self._queue.append((cpu_s, over))
        if len(self._queue) == 1:
            self._begin()
        return over

    def _begin(self) -> None:
        job = self._host.job(self._queue[0][0])
        assert job.callbacks is not None
        job.callbacks.append(self._end)

    def _end(self, _: Event) -> None:
        self._queue.popleft()[1].succeed()
        if self._queue:
            self._begin()


@dataclass(slots=True)
class Generation:
    """One that waits for a pass, or runs."""

    num_tokens: int
    context_tokens: int
    """that it was given"""
    since_s: float
    at_once_s: float
    passes: float
    pass_tokens: float
    """of its engine, when it came"""
    over: Event
    first: float = 0.0
    """passes before its own first"""


class Engine:
    """Generations that advance together, a token in each pass, and versions loaded between two passes.

    A generation joins at the end of the pass under way, and its context is computed in its first pass: so rollouts
    that begin together share passes, and those that come one by one make each other's passes longer.
    """

    def __init__(
        self, env: simpy.Environment, host: Host, name: str, pass_time: PassTime, cores: float, computes: float = 1.0
    ) -> None:
        """`cores` that it keeps busy while it generates alone; `computes`, the share of contexts not in its cache."""
        self.env, self.host, self.name = env, host, name
        self._pass_time, self._cores, self._computes = pass_time, cores, computes
        self._needs_core = min(1.0, cores)
        self.version = 0
        self.at_once_s = 0.0
        """generations at once, over time"""
        self.alone_s = 0.0
        """that its passes would have taken alone"""
        self.passes = 0.0
        """so far"""
        self.pass_tokens = 0.0
        """in them"""
        self.measured: dict[int, Generated] = defaultdict(Generated)
        self._contexts_s = 0.0
        """alone, of contexts to be computed before the passes go on"""
        self._running: list[tuple[float, int, Generation]] = []
        """by the pass that is its last"""
        self._waiting: list[Generation] = []
        """for the pass under way to end"""
        self._numbers = count()
        self._marks: list[tuple[float, int]] = [(0.0, 0)]
        """(passes, version loaded there)"""
        self._paused = False
        host.engines.append(self)

    def generate(self, num_tokens: int, context_tokens: int = 0) -> Event:
        """Its value: tokens by the version that sampled them."""
        self.host.advance()
        over = self.env.event()
        met = (self.env.now, self.at_once_s, self.passes, self.pass_tokens)
        one = Generation(num_tokens, context_tokens, *met, over)
        if self.passes.is_integer():
            self._join(one)
        else:
            self._waiting.append(one)
        self.host.settle()
        return over

    def _join(self, one: Generation) -> None:
        if not self._running and not self._paused:
            self.host.want(self._cores)
        one.first = self.passes
        heapq.heappush(self._running, (one.first + one.num_tokens, next(self._numbers), one))
        self._compute(one.context_tokens * self._computes)

    def _compute(self, context_tokens: float) -> None:
        """In the pass under way."""
        self.pass_tokens += context_tokens
        self._contexts_s += self._pass_time.of(0.0, context_tokens)

    def pause(self) -> None:
        self.host.advance()
        if self._running:
            self.host.want(-self._cores)
        self._paused = True
        self.host.settle()

    def resume(self, version: int, recomputes: bool = False) -> None:
        """On new weights; it may have to compute anew the contexts of what it generates."""
        self.host.advance()
        self._paused, self.version = False, version
        self._marks.append((self.passes, version))
        if self._running:
            self.host.want(self._cores)
        if recomputes:
            self._compute(sum(one.context_tokens + self.passes - one.first for _, _, one in self._running))
        self.host.settle()

    def _slower(self, speed: float) -> float:
        return self._needs_core / speed + 1.0 - self._needs_core

    def advance(self, passed_s: float) -> None:
        at_once = len(self._running)
        self.at_once_s += (at_once + len(self._waiting)) * passed_s
        if self._paused or not at_once:
            return
        alone_s = passed_s / self._slower(self.host.speed)
        contexts_s = min(self._contexts_s, alone_s)
        self._contexts_s -= contexts_s
        made = (alone_s - contexts_s) / self._pass_time.of(1.0, at_once)
        self.alone_s += alone_s
        self.passes += made
        self.pass_tokens += made * at_once
        if abs(self.passes - round(self.passes)) < _EPSILON:
            self.passes = float(round(self.passes))

    def soonest_s(self, speed: float) -> float:
        if self._paused or not self._running:
            return float("inf")
        until = floor(self.passes) + 1.0 if self._waiting else self._running[0][0]
        alone_s = self._contexts_s + (until - self.passes) * self._pass_time.of(1.0, len(self._running))
        return alone_s * self._slower(speed)

    def finish(self) -> None:
        """Ends the generations that have all their tokens; others join at the end of a pass."""
        if self._paused or not self.passes.is_integer():
            return
        some = bool(self._running)
        while self._running and self._running[0][0] <= self.passes:
            end, _, one = heapq.heappop(self._running)
            self._measure(one)
            one.over.succeed(self._versions(one.first, end))
        if some and not self._running:
            self.host.want(-self._cores)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._join(one)

    def _measure(self, one: Generation) -> None:
        """As actors/rollout_figures.py does, and what it went through."""
        took_s = self.env.now - one.since_s
        found = self.measured[near_power((self.at_once_s - one.at_once_s) / max(took_s, _EPSILON))]
        found.tokens += one.num_tokens
        found.wall_s += took_s
        found.passes += self.passes - one.passes
        found.pass_tokens += self.pass_tokens - one.pass_tokens

    def _versions(self, start: float, end: float) -> dict[int, float]:
        out: dict[int, float] = {}
        for at, version in reversed(self._marks):
            if at < end:
                out[version] = end - max(at, start)
                end = max(at, start)
            if at <= start:
                break
        return out


def measured(engines: Iterable[Engine]) -> dict[int, Generated]:
    """By all of them, by concurrency."""
    found: dict[int, Generated] = {}
    for engine in engines:
        for at_once, generated in engine.measured.items():
            found.setdefault(at_once, Generated()).add(generated)
    return dict(sorted(found.items()))
