"""A run under a setting, simulated: tickets, leases, deadlines and RoC are the run's own code; only time is made up.

Consumes    a model, a setting, a seed, how many steps
Produces    an `Outcome`
Waits for   simulated time
Invariant   no token older than S is trained: the ledger's law decides, and each token is checked when it is taken;
            group n is drawn by (seed, n) alone, so that all settings meet the same work
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import simpy
from simpy.events import Event

from actors.roc import select
from actors.scheduler import KvScheduler
from buffer.leases import Leases
from buffer.ledger import Ledger
from buffer.schema import GroupHeaders
from buffer.tickets import Ticket, check_promise
from launch.tune.machine import Engine, Host, Thread, measured
from launch.tune.shapes import GroupWork, Model, Outcome, RolloutWork, Setting

FOREVER_S = 1e12
"""of leases and groups: nobody dies here"""
BLOCK_TOKENS = 16
Steps: TypeAlias = Generator[Event, Any, None]


@dataclass(slots=True)
class _Group:
    """One that is worked on, kept or in a batch."""

    rollouts: tuple[RolloutWork, ...]
    kept: tuple[int, ...] = ()
    drop_reason: str = ""
    versions: dict[int, dict[int, float]] = field(default_factory=dict)
    """rollout -> tokens by version"""

    def num_tokens(self) -> int:
        return sum(self.rollouts[at].turns[-1].context_tokens for at in self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """A batch."""

    at_s: float
    num_groups: int
    tokens_by_age: dict[int, float]
    used_s: tuple[float, ...]
    """core seconds of each machine by then"""


class World:
    """One simulation."""

    def __init__(self, model: Model, setting: Setting, steps: int, seed: int) -> None:
        self.env = simpy.Environment()
        self.model, self.setting, self.steps, self.seed = model, setting, steps, seed
        self.ledger = Ledger(setting.groups_per_step, setting.max_staleness, steps)
        self.leases = Leases(self._num_rollouts(), FOREVER_S, FOREVER_S)
        self.hosts = [Host(self.env, machine) for machine in model.work.machines]
        self.engines = [self._engine(number) for number in range(setting.engines)]
        self.besides = {engine.name: Thread(engine.host) for engine in self.engines}
        self.store = Thread(self._host("buffer"))
        self.schedulers = {engine.name: self._scheduler() for engine in self.engines}
        self.workers = simpy.Resource(self.env, capacity=max(1, model.work.workers))
        self.groups: dict[int, _Group] = {}
        self.taken: list[_Taken] = []
        self.step_s: list[float] = []
        self.beside_s, self.num_finished = 0.0, 0
        """of rollouts with engines' processes; how many have ended"""
        self.pauses_s: list[float] = []
        self.loading_s = 0.0
        """of them, alone"""
        self.published = 0
        self._outlook = self.env.event()
        self._news = self.env.event()
        self._random = random.Random(f"{seed}/swaps")

    def run(self) -> None:
        """Until the last batch is trained."""
        for engine in self.engines:
            self.ledger.join(engine.name, 1)
            self.ledger.acknowledge(engine.name, 1, 0)
            self.env.process(self._follow(engine))
        self._issue()
        self.env.run(until=self.env.process(self._learn()))

    # Who is where

    def _num_rollouts(self) -> int:
        return self.setting.group_size * (1 if self.model.work.roc.mode == "off" else 2)

    def _host(self, kind: str) -> Host:
        return self.hosts[self.model.work.places.get(kind, 0)]

    def _engine(self, number: int) -> Engine:
        model, host, name = self.model, self._host("rollout"), f"rollout-{number}"
        return Engine(self.env, host, name, model.pass_time, model.engine_cores, model.work.computed_share)

    def _scheduler(self) -> KvScheduler:
        longest = self.model.work.longest_tokens
        return KvScheduler(
            capacity_tokens=max(longest, self.model.work.kv_tokens),
            max_length=longest,
            concurrency=self.setting.concurrency,
            block_tokens=BLOCK_TOKENS,
        )

    # Tickets and leases

    def _issue(self) -> None:
        while (ticket := self.ledger.issue(self.ledger.next_problem)) is not None:
            self.groups[ticket.group] = self._draw(ticket.group)
            self.leases.open(ticket.group, ticket.base, ticket.deadline, "train", self._rollouts_of(ticket.group))
        for engine in self.engines:
            self._lease(engine)

    def _rollouts_of(self, group: int) -> int:
        return len(self.groups[group].rollouts)

    def _draw(self, number: int) -> _Group:
        """A recorded group; where groups are of another size, its rollouts are drawn anew, with replacement."""
        groups = self.model.work.groups
        rng = random.Random(f"{self.seed}/{number}")
        recorded: GroupWork = groups[_order(self.seed, number // len(groups), len(groups))[number % len(groups)]]
        rollouts, wanted = recorded.rollouts, self._num_rollouts()
        if recorded.num_rollouts != wanted:
            rollouts = tuple(rng.choice(rollouts) for _ in range(wanted))
        finishes = tuple(replace(one.finish, group=number, rollout=at) for at, one in enumerate(rollouts))
        headers = GroupHeaders(group=number, group_size=self.setting.group_size, num_rollouts=wanted, rollouts=finishes)
        decision = select(headers, self.model.work.roc, self.seed)
        return _Group(rollouts=rollouts, kept=decision.keep, drop_reason=decision.drop_reason)

    def _lease(self, engine: Engine) -> None:
        if not self.leases.num_waiting(engine.version):
            return
        room = self.schedulers[engine.name].room()
        if room == 0:
            return
        for group, rollout, _ in self.leases.grant(engine.name, 1, engine.version, room, self.env.now):
            self.ledger.lease(group)
            work = self.groups[group].rollouts[rollout]
            self.schedulers[engine.name].admit((group, rollout), max(1, work.turns[0].given_tokens))
            self.env.process(self._rollout(engine, group, rollout, work))

    # Work

    def _rollout(self, engine: Engine, group: int, rollout: int, work: RolloutWork) -> Steps:
        versions: dict[int, float] = {}
        scheduler = self.schedulers[engine.name]
        for turn in work.turns:
            since_s = self.env.now
            yield self.besides[engine.name].work(self.model.beside_cpu_s * turn.num_tokens)
            self.beside_s += self.env.now - since_s
            sampled: dict[int, float] = yield engine.generate(turn.num_tokens, turn.given_tokens)
            self.store.work(self.model.work.store_token_cpu_s * turn.num_tokens)
            for version, tokens in sampled.items():
                versions[version] = versions.get(version, 0.0) + tokens
            if turn.called:
                yield from self._call(turn.run_s)
            scheduler.grow((group, rollout), turn.context_tokens)
        yield self.env.timeout(self.model.rest_s)
        self.num_finished += 1
        self.groups[group].versions[rollout] = versions
        scheduler.release((group, rollout), completed=True)
        if self.leases.done(group, rollout, 1, engine.name, 1):
            self.leases.close(group)
            self.env.process(self._decide(group))
        self._lease(engine)

    def _call(self, run_s: float) -> Steps:
        """Computes on a worker; what a call sleeps holds none."""
        share, cpu_s = self.model.call_cpu_share, self.model.work.call_cpu_s
        with self.workers.request() as worker:
            yield worker
            yield self._host("sandbox").job(share * run_s if share else cpu_s)
        if not share and run_s > cpu_s:
            yield self.env.timeout(run_s - cpu_s)

    def _decide(self, number: int) -> Steps:
        yield self.env.timeout(self.model.work.decide_s)
        group = self.groups[number]
        if group.drop_reason:
            del self.groups[number]
            self.ledger.drop(number, group.drop_reason)
            self._issue()
        else:
            self.ledger.finish(number)
        outlook, self._outlook = self._outlook, self.env.event()
        outlook.succeed()

    def _learn(self) -> Steps:
        for step in range(self.steps):
            while (batch := self.ledger.take(step)) is None:
                yield self._outlook
            started_s, tokens = self.env.now, self._note(step, batch)
            yield from self._train(tokens)
            self.step_s.append(self.env.now - started_s)
            self.published = step + 1
            news, self._news = self._news, self.env.event()
            news.succeed()

    def _note(self, step: int, batch: list[Ticket]) -> int:
        """Tokens of its trajectories; those sampled are kept by age, each within the promise."""
        ages: dict[int, float] = {}
        total = 0
        for ticket in batch:
            group = self.groups.pop(ticket.group)
            total += group.num_tokens()
            for rollout in group.kept:
                for version, tokens in group.versions[rollout].items():
                    check_promise(ticket, step, version)
                    ages[step - version] = ages.get(step - version, 0.0) + tokens
        used_s = tuple(host.used_s for host in self.hosts)
        self.taken.append(_Taken(at_s=self.env.now, num_groups=len(batch), tokens_by_age=ages, used_s=used_s))
        return total

    def _train(self, tokens: int) -> Steps:
        model = self.model
        alone_s = (model.step_fixed_s + model.step_token_s * tokens) / self.setting.ranks
        share = model.learner_share
        yield self._host("learner").job(alone_s * share, model.learner_cores * self.setting.ranks)
        yield self.env.timeout(alone_s * (1.0 - share))

    def _follow(self, engine: Engine) -> Steps:
        """Keeps an engine at the newest version."""
        swaps = self.model.work.swaps
        while True:
            while engine.version == self.published:
                yield self._news
            version, swap = self.published, self._random.choice(swaps)
            yield self.env.timeout(swap.receive_s)
            engine.pause()
            yield from self._load(swap.pause_s * self.model.pause_share)
            engine.resume(version, self.model.work.recomputes)
            self.ledger.acknowledge(engine.name, 1, version)
            self._issue()

    def _load(self, alone_s: float) -> Steps:
        """A version: an engine that computes on cores needs one for this too."""
        since_s, share = self.env.now, min(1.0, self.model.engine_cores)
        yield self._host("rollout").job(alone_s * share)
        yield self.env.timeout(alone_s * (1.0 - share))
        self.pauses_s.append(self.env.now - since_s)
        self.loading_s += alone_s


def simulate(model: Model, setting: Setting, *, steps: int, warmup: int, seed: int = 0) -> Outcome:
    """`steps` measured steps after `warmup`, in which the pipeline fills."""
    world = World(model, setting, warmup + steps + 1, seed)
    world.run()
    first, last = world.taken[warmup], world.taken[warmup + steps]
    batches = world.taken[warmup : warmup + steps]
    span_s = last.at_s - first.at_s
    ages = _summed(batch.tokens_by_age for batch in batches)
    trained_s = sum(world.step_s[warmup : warmup + steps])
    curve = measured(world.engines)
    tokens = sum(generated.tokens for generated in curve.values())
    used = zip(model.work.machines, first.used_s, last.used_s, strict=True)
    return Outcome(
        groups_per_min=60.0 * sum(batch.num_groups for batch in batches) / span_s,
        mean_age=sum(age * tokens for age, tokens in ages.items()) / sum(ages.values()),
        max_age=max(ages),
        step_wall_s=trained_s / steps,
        learner_waits=max(0.0, 1.0 - trained_s / span_s),
        generating=sum(engine.at_once_s for engine in world.engines) / world.env.now,
        cores_used=max((end - start) / (span_s * machine.cores) for machine, start, end in used),
        engine_s=sum(engine.alone_s for engine in world.engines) / tokens,
        beside_s=world.beside_s / world.num_finished,
        pause_s=sum(world.pauses_s) / max(1, len(world.pauses_s)),
        loading_s=world.loading_s / tokens,
        measured=curve,
    )


@cache
def _order(seed: int, round_: int, count: int) -> Sequence[int]:
    """In which recorded groups are drawn: each once in a round."""
    return random.Random(f"{seed}/order/{round_}").sample(range(count), count)


def _summed(parts: Iterable[Mapping[int, float]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total
