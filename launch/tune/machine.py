"""Cores that activities share, and engines that batch.

Consumes    jobs (CPU seconds), generations (tokens), pauses for versions
Produces    simpy events that fire when they are over; versions that sampled a generation's tokens
Waits for   simulated time
Invariant   while activities want more cores than a machine has, all that need one go slower by the same factor; all
            generations of an engine advance at one pace, which falls with their number

Both are processor sharing: a clock that runs at the common pace, on which an activity that begins at w and needs d is
over at w + d. So an arrival or an end costs one look at each heap's top, however many share.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from functools import cache
from itertools import count

import simpy
from simpy.events import Event

from actors.rollout_figures import near_power
from launch.tune.shapes import Curve, Machine

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


class Engine:
    """Generations that advance together, token by token, and versions loaded between two tokens."""

    def __init__(
        self, env: simpy.Environment, host: Host, name: str, curve: Curve, cores: float, store_cores: float = 0.0
    ) -> None:
        """`cores` that it keeps busy while it generates alone; `store_cores`, those that keep what it makes."""
        self.env, self.host, self.name = env, host, name
        self._cores = cores + store_cores
        self._token_s = cache(curve.token_s)
        self._needs_core = min(1.0, cores)
        self.version = 0
        self.integral_s = 0.0
        """of generations at once over time"""
        self.measured: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._tokens = 0.0
        """that each generation has made which was there from the beginning"""
        self._running: list[tuple[float, int, float, float, float, Event]] = []
        self._numbers = count()
        self._marks: list[tuple[float, int]] = [(0.0, 0)]
        """(tokens, version loaded there)"""
        self._paused = False
        host.engines.append(self)

    @property
    def at_once(self) -> int:
        return len(self._running)

    def generate(self, num_tokens: int) -> Event:
        """Its value: tokens by the version that sampled them."""
        self.host.advance()
        event = self.env.event()
        entry = (self._tokens + num_tokens, next(self._numbers), self._tokens, self.env.now, self.integral_s, event)
        if not self._running and not self._paused:
            self.host.want(self._cores)
        heapq.heappush(self._running, entry)
        self.host.settle()
        return event

    def pause(self) -> None:
        self.host.advance()
        if self._running:
            self.host.want(-self._cores)
        self._paused = True
        self.host.settle()

    def resume(self, version: int) -> None:
        """On new weights."""
        self.host.advance()
        self._paused, self.version = False, version
        self._marks.append((self._tokens, version))
        if self._running:
            self.host.want(self._cores)
        self.host.settle()

    def _pace(self, speed: float) -> float:
        """Tokens of each generation per second."""
        if self._paused or not self._running:
            return 0.0
        slower = self._needs_core / speed + 1.0 - self._needs_core
        return 1.0 / (self._token_s(len(self._running)) * slower)

    def advance(self, passed_s: float) -> None:
        self._tokens += self._pace(self.host.speed) * passed_s
        self.integral_s += len(self._running) * passed_s

    def soonest_s(self, speed: float) -> float:
        pace = self._pace(speed)
        return (self._running[0][0] - self._tokens) / pace if pace > 0 else float("inf")

    def finish(self) -> None:
        """Ends the generations that have all their tokens."""
        if self._paused:
            return
        ended = False
        while self._running and self._running[0][0] <= self._tokens + _EPSILON:
            end, _, start, since_s, integral_s, event = heapq.heappop(self._running)
            self._measure(end - start, self.env.now - since_s, self.integral_s - integral_s)
            event.succeed(self._versions(start, end))
            ended = True
        if ended and not self._running:
            self.host.want(-self._cores)

    def _measure(self, tokens: float, took_s: float, integral_s: float) -> None:
        """As actors/rollout_figures.py does."""
        cell = self.measured[near_power(integral_s / max(took_s, _EPSILON))]
        cell[0] += tokens
        cell[1] += took_s

    def _versions(self, start: float, end: float) -> dict[int, float]:
        out: dict[int, float] = {}
        for at, version in reversed(self._marks):
            if at < end:
                out[version] = end - max(at, start)
                end = max(at, start)
            if at <= start:
                break
        return out
