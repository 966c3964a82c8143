"""A random history of a whole run: engines, RoC filter, learner and crashes around the pure cores, then a fair end.

Consumes    a seed; the shell with the cores, or a mutant of it (tests/ledger_shell.py)
Produces    nothing, or a Violation: the promise, growth, weights, a sentence read literally, a deadlock, a leak
Invariant   the first part is chaos; in the second every part does its work slowly and fairly, so whatever does not
            progress there never will
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from buffer.tickets import FencedError, LedgerError
from tests.ledger_shell import Plan, Shell, Violation, expect_fenced, leaks

STUCK_ROUNDS = 90
"""rounds of a second without any progress that count as a deadlock; more than all time-outs together"""


def plan_of(seed: int, **fixed: Any) -> Plan:
    """The history's parameters, drawn from its seed."""
    rng = random.Random(f"plan/{seed}")
    P = rng.choice((1, 2, 2, 3, 4))
    steps = rng.choice((3, 6, 9))
    plenty = rng.random() < 0.7
    drawn: dict[str, Any] = dict(
        P=P,
        S=rng.choice((0, 1, 1, 2, 3)),
        steps=steps,
        drop=rng.choice((0.0, 0.3, 0.3, 0.7)),
        problems=steps * P * 6 if plenty else rng.randrange(1, steps * P * 2),
        epoch_size=rng.choice((3, 5, 7)),
        num_engines=rng.choice((1, 2, 3)),
        num_rollouts=rng.choice((1, 2)),
        events=rng.choice((0, 60, 150)),
        moves_S=rng.random() < 0.3,
        stuck_joiner=rng.random() < 0.3,
    )
    return Plan(seed=seed, **(drawn | fixed))


@dataclass(slots=True)
class Engine:
    """One rollout actor. It stamps tokens with what it has really loaded."""

    name: str
    stuck: bool = False
    """joins and never loads"""
    up: bool = False
    hung: bool = False
    """keeps its process, sends nothing"""
    epoch: int = 0
    loaded: tuple[int, int] | None = None
    """(lineage, version)"""
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    unacknowledged: bool = False

    @property
    def version(self) -> int:
        return -1 if self.loaded is None else self.loaded[1]


class World:
    """One history."""

    shell_class: type[Shell] = Shell

    def __init__(self, plan: Plan, *, literal: bool) -> None:
        self.rng = random.Random(f"world/{plan.seed}")
        self.plan = plan
        self.shell = self.shell_class(plan, literal)
        self.engines = [Engine(f"rollout-{i}") for i in range(plan.num_engines)]
        if plan.stuck_joiner:
            self.engines.append(Engine("stuck", stuck=True))
        self.serving: tuple[int, int] | None = None
        self.ever_served: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.life: Iterator[None] | None = None
        self.finished = False
        self.pause = 0

    # Learner: each `yield` is a place where it may crash

    def learner_life(self, checkpoint: int) -> Iterator[None]:
        shell = self.shell
        lineage = self.new_lineage()
        version, content = checkpoint, shell.disk.checkpoints[checkpoint]
        for step in range(version, self.restart_version(checkpoint)):
            if step not in shell.disk.batches:
                raise Violation("weights", f"the batch of step {step} is gone, checkpoint {checkpoint} needs it")
            content = (*content, shell.disk.batches[step])
            version += 1
            yield
        yield from self.publish(lineage, version, content)
        while version < self.plan.steps:
            while (batch := shell.take(lineage, version)) is None:
                if shell.ledger.spent:
                    break
                yield
            if batch is None:
                break
            yield
            content = (*content, batch)
            version += 1
            yield
            if version % 2 == 0:
                shell.record_checkpoint(lineage, version, content)
                yield
            yield from self.publish(lineage, version, content)
        shell.reach_goal(version)
        self.finished = True

    def new_lineage(self) -> int:
        return self.shell.learner_hello()

    def restart_version(self, checkpoint: int) -> int:
        return max(checkpoint, self.shell.disk.published[1])

    def publish(self, lineage: int, version: int, content: tuple[Any, ...]) -> Iterator[None]:
        self.shell.record_publication(lineage, version)
        yield
        self.serve(lineage, version, content)
        yield

    def serve(self, lineage: int, version: int, content: tuple[Any, ...]) -> None:
        """The first byte is sent."""
        groups = [g for batch in content for g in batch]
        if len(content) != version or len(groups) != len(set(groups)):
            raise Violation("weights", f"version {version} was trained on {content}")
        newest = max((v for _, v in self.ever_served), default=0)
        if version < newest:
            raise Violation("weights", f"version {version} is published after {newest}")
        trace = (*content, ("computed in life", self.shell.learner_lineage))
        if self.ever_served.setdefault((lineage, version), trace) != trace:
            raise Violation("weights", f"two different weights are called lineage {lineage}, version {version}")
        self.serving = (lineage, version)
        self.shell.learner_serving = True

    def learner_advance(self) -> None:
        if self.finished:
            return
        if self.life is None:
            self.life = self.learner_life(self.rng.choice(sorted(self.shell.disk.checkpoints)))
        next(self.life, None)

    def learner_crash(self) -> None:
        if self.finished:
            return
        lineage = self.shell.learner_lineage
        self.life, self.serving, self.shell.learner_serving = None, None, False
        if lineage > 0 and self.rng.random() < 0.5:
            self.life = self.learner_life(self.rng.choice(sorted(self.shell.disk.checkpoints)))
            next(self.life, None)
            expect_fenced(lambda: self.shell.record_publication(lineage, 10**6), f"the learner of lineage {lineage}")

    # Engines

    def join(self, engine: Engine) -> None:
        engine.up, engine.hung, engine.held, engine.unacknowledged = True, False, {}, False
        engine.epoch = self.shell.hello(engine.name)
        stale = [label for label in self.ever_served if not engine.stuck]
        engine.loaded = self.rng.choice([None, *stale])
        engine.unacknowledged = engine.loaded is not None

    def load(self, engine: Engine) -> None:
        if engine.up and not engine.stuck and not engine.hung and self.serving is not None:
            lineage, version = self.serving
            if engine.loaded is None or (version, lineage) > (engine.loaded[1], engine.loaded[0]):
                engine.loaded, engine.unacknowledged = self.serving, True

    def say(self, engine: Engine, call: Any, *args: Any) -> Any:
        """A message of the engine; one that was fenced starts a new life later."""
        known = self.shell.disk.members.get(engine.name)
        current = known is not None and known.epoch == engine.epoch
        if not current:
            expect_fenced(lambda: self.shell.ledger.acknowledge(engine.name, engine.epoch, 0), engine.name)
            engine.up = False
            return None
        return call(*args)

    def acknowledge(self, engine: Engine) -> None:
        if engine.up and not engine.hung and engine.unacknowledged and engine.loaded is not None:
            engine.unacknowledged = False
            self.say(engine, self.shell.acknowledge, engine.name, engine.epoch, *engine.loaded)

    def lease(self, engine: Engine) -> None:
        if engine.up and not engine.hung and engine.loaded is not None:
            want = 3 - len(engine.held)
            got = self.say(engine, self.shell.lease, engine.name, engine.epoch, engine.version, want)
            engine.held |= {(group, rollout): attempt for group, rollout, attempt in got or []}

    def work(self, engine: Engine, ends: bool) -> None:
        """A turn of one rollout; perhaps its end, perhaps by exclusion."""
        if not engine.up or not engine.held or engine.hung:
            return
        key = self.rng.choice(sorted(engine.held))
        attempt = engine.held[key]
        ours = self.shell.leases.state(*key)
        mine = ours is not None and (ours.engine, ours.epoch, ours.attempt) == (engine.name, engine.epoch, attempt)
        args = (key, attempt, engine.name, engine.epoch)
        if not mine:
            expect_fenced(lambda: self.shell.push(*args, engine.version), f"{engine.name} on {key}")
            del engine.held[key]
            return
        self.shell.push(*args, engine.version)
        if ends:
            self.shell.end(*args, self.rng.random() < 0.05)
            del engine.held[key]

    def die(self, engine: Engine) -> None:
        """The process ends; the buffer learns it from the driver or from the missing heartbeat."""
        if engine.up:
            engine.up = False
            if self.rng.random() < 0.5:
                self.shell.gone(engine.name, engine.epoch)

    # The rest

    def tick(self, dt_s: float = 1.0) -> None:
        alive = [e for e in self.engines if e.up and not e.hung]
        members = self.shell.disk.members
        beats = [(e.name, e.epoch, list(e.held)) for e in alive if e.name in members and members[e.name].epoch == e.epoch]
        self.shell.tick(beats, dt_s)
        for engine in alive:
            self.say(engine, lambda: None)

    def decide(self) -> None:
        for group in self.shell.undecided():
            kept = random.Random(f"{self.plan.seed}/{group}").random() >= self.plan.drop
            self.shell.decide(group, kept, "all_right")

    def chaos(self) -> None:
        rng, engine = self.rng, self.rng.choice(self.engines)
        draw = rng.random()
        if draw < 0.08:
            self.tick()
        elif draw < 0.12:
            self.load(engine)
        elif draw < 0.20:
            self.acknowledge(engine)
        elif draw < 0.34:
            self.lease(engine)
        elif draw < 0.64:
            self.work(engine, rng.random() < 0.6)
        elif draw < 0.72:
            self.decide()
        elif draw < 0.90:
            self.learner_advance()
        elif draw < 0.94 or not engine.up:
            (self.die if engine.up else self.join)(engine)
        elif draw < 0.955:
            engine.hung = not engine.hung
        elif draw < 0.965:
            for each in self.engines:
                self.die(each)
        elif draw < 0.98:
            self.learner_crash()
        elif draw < 0.99:
            self.shell.start()
        elif self.plan.moves_S:
            self.shell.set_staleness(rng.choice((0, 1, 2, 3)))

    def fair_round(self, number: int) -> None:
        """A second in which everyone does a little; only one engine takes up work."""
        self.tick()
        self.learner_advance()
        for engine in self.engines:
            engine.hung = engine.hung and number < 15
            if not engine.up:
                self.join(engine)
            if (number + int(engine.name[-1] == "1")) % 3 == 0:
                self.load(engine)
            self.acknowledge(engine)
            self.lease(engine)
            for _ in range(2):
                self.work(engine, ends=True)
            self.shell.pump()
        self.decide()
        self.shell.pump()

    def progress(self) -> tuple[Any, ...]:
        disk = self.shell.disk
        ends = sum(r.hold in ("done", "excluded") for r in disk.rollouts.values())
        over = sum(t.state not in ("waiting", "leased") for t in disk.tickets.values())
        return len(disk.tickets), over, disk.next_step, disk.published, disk.acked, ends, self.finished

    def run(self) -> None:
        for _ in range(self.plan.events):
            self.chaos()
            self.shell.pump()
        still, before = 0, self.progress()
        number = 0
        while not self.finished or leaks(self.shell.disk):
            number += 1
            self.fair_round(number)
            after = self.progress()
            still, before = (0, after) if after != before else (still + 1, before)
            if still > STUCK_ROUNDS:
                ledger = self.shell.ledger
                raise Violation("deadlock", f"{ledger.take_waits_for()}; issue: {ledger.issue_waits_for()}; {self.plan}")
        self.account()

    def account(self) -> None:
        """Nothing leaked, nothing counted twice."""
        disk, ledger = self.shell.disk, self.shell.ledger
        states = [t.state for t in disk.tickets.values()]
        dropped = sum(ledger.drops.values())
        trained = [t for t in disk.tickets.values() if t.state == "released"]
        whole = len(trained) + dropped + ledger.unused == len(states) and dropped == states.count("dropped")
        self.shell.judge.rule(whole, f"{len(states)} issued, {len(trained)} trained, {ledger.drops}, {ledger.unused}")
        self.shell.judge.rule(all(t.state != "dropped" or t.drop_reason for t in disk.tickets.values()), "no reason")
        if ledger.active or self.shell.leases.groups:
            raise Violation("deadlock", f"{ledger.active} tickets, {self.shell.leases.groups} groups leaked")


def run_history(plan: Plan, world: type[World] = World, *, literal: bool = True) -> World:
    """Run one history.

    Raises:
        Violation: the law is broken, or a part refused what the law allows.
    """
    history = world(plan, literal=literal)
    try:
        history.run()
    except FencedError as error:
        raise Violation("rule", f"a living peer was refused: {error}") from error
    except LedgerError as error:
        raise Violation("promise", str(error)) from error
    return history
