"""A random history of a whole run: engines, RoC filter, learner and crashes around the pure cores, then a fair end.

Consumes    a seed; the shell with the cores, or a mutant of it (tests/law/shell.py)
Produces    nothing, or a Violation: the promise, growth, weights, a sentence read literally, a deadlock, a leak
Invariant   the first part is chaos; in the second every part does its work slowly and fairly, so whatever does not
            progress there never will
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from buffer.tickets import FencedError, LedgerError
from buffer.wire import Refusal
from tests.law.judge import Plan, Violation, expect_fenced, leaks
from tests.law.learner import Learner
from tests.law.shell import Shell

STUCK_ROUNDS = 90
"""rounds of a second without any progress that count as a deadlock; more than all time-outs together"""

EVENTS: dict[str, float] = {
    "tick": 10,
    "load": 6,
    "acknowledge": 8,
    "lease": 14,
    "work": 26,
    "decide": 8,
    "learner": 22,
    "churn": 3,
}
EVENTS |= {"hang": 1, "outage": 1.5, "learner_crash": 3, "crash": 1, "staleness": 3}
"""what happens in the first part, with its usual weight"""


@dataclass(slots=True)
class Engine:
    """One rollout actor. It stamps tokens with what it has really loaded."""

    name: str
    stuck: bool = False
    """joins and never loads"""
    up: bool = False
    hung: bool = False
    """keeps its process, sends nothing"""
    deaf: bool = False
    """works on, but can't load weights any more in this life"""
    lost: bool = False
    """its node is gone for good"""
    epoch: int = 0
    loaded: tuple[int, int] | None = None
    """(lineage, version)"""
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    unacknowledged: bool = False

    @property
    def version(self) -> int:
        return -1 if self.loaded is None else self.loaded[1]


class World(Learner):
    """One history."""

    shell_class: type[Shell] = Shell

    def __init__(self, plan: Plan, *, literal: bool) -> None:
        self.rng = random.Random(f"world/{plan.seed}")
        self.plan = plan
        self.shell = self.shell_class(plan, literal)
        self.engines = [Engine(f"rollout-{i}") for i in range(plan.num_engines)]
        if plan.stuck_joiner:
            self.engines.append(Engine("stuck", stuck=True))
        super().__init__()

    # Engines

    def join(self, engine: Engine) -> None:
        engine.up, engine.hung, engine.deaf, engine.held, engine.unacknowledged = True, False, False, {}, False
        engine.epoch = self.shell.hello(engine.name)
        stale = [label for label in self.ever_served if not engine.stuck]
        engine.loaded = self.rng.choice([None, *stale])
        engine.unacknowledged = engine.loaded is not None

    def load(self, engine: Engine) -> None:
        if engine.up and not engine.stuck and not engine.deaf and not engine.hung and self.serving is not None:
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

    def work(self, engine: Engine) -> None:
        """A turn of one rollout; perhaps its end, perhaps by exclusion. Some are slow, few never end."""
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
        fate = random.Random(f"{self.plan.seed}/{key}").random()
        if fate > 0.02 and self.rng.random() < (0.1 if fate < 0.2 else 0.7):
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
        beats = [
            (e.name, e.epoch, list(e.held)) for e in alive if e.name in members and members[e.name].epoch == e.epoch
        ]
        self.shell.tick(beats, dt_s)
        for engine in alive:
            self.say(engine, lambda: None)

    def decide(self) -> None:
        for group in self.shell.undecided():
            kept = random.Random(f"{self.plan.seed}/{group}").random() >= self.plan.drop
            self.shell.decide(group, kept, "all_right")

    def draw_weights(self) -> dict[str, float]:
        """Each history has its own mix of events, some of them rare: unusual combinations become likely."""
        weights = {event: weight * self.rng.choice((0.2, 1, 1, 3)) for event, weight in EVENTS.items()}
        return weights | {"staleness": weights["staleness"] * self.plan.moves_S}

    def chaos(self, weights: dict[str, float]) -> None:
        rng, engine = self.rng, self.rng.choice(self.engines)
        match rng.choices(list(weights), list(weights.values()))[0]:
            case "tick":
                self.tick(rng.choice((1.0, 1.0, 3.0)))
            case "load":
                self.load(engine)
            case "acknowledge":
                self.acknowledge(engine)
            case "lease":
                self.lease(engine)
            case "work":
                self.work(engine)
            case "decide":
                self.decide()
            case "learner":
                self.learner_advance()
            case "churn":
                (self.die if engine.up else self.join)(engine)
            case "hang":
                engine.hung = not engine.hung
            case "outage":
                for each in self.engines:
                    self.die(each)
            case "learner_crash":
                self.learner_crash()
            case "crash":
                self.shell.start()
            case "staleness":
                self.shell.set_staleness(rng.choice((0, 1, 2, 3)))

    def fair_round(self, number: int) -> None:
        """A second in which everyone does a little; only one engine takes up work."""
        self.tick()
        self.learner_advance()
        for engine in self.engines:
            engine.hung = engine.hung and number < 15
            if not engine.up and not engine.lost:
                self.join(engine)
            if (number + int(engine.name[-1] == "1")) % 3 == 0:
                self.load(engine)
            self.acknowledge(engine)
            self.lease(engine)
            for _ in range(2):
                self.work(engine)
            self.shell.pump()
        self.decide()
        self.shell.pump()

    def progress(self) -> tuple[Any, ...]:
        disk = self.shell.disk
        ends = sum(r.hold in ("done", "excluded") for r in disk.rollouts.values())
        over = sum(t.state not in ("waiting", "leased") for t in disk.tickets.values())
        return len(disk.tickets), over, disk.next_step, disk.published, disk.acked, ends, self.finished

    def run(self) -> None:
        if self.plan.events:
            self.warm_up()
        weights = self.draw_weights()
        for _ in range(self.plan.events):
            self.chaos(weights)
            self.shell.pump()
        self.lose_some()
        still, before = 0, self.progress()
        number = 0
        while not self.finished or leaks(self.shell.disk):
            number += 1
            self.fair_round(number)
            after = self.progress()
            still, before = (0, after) if after != before else (still + 1, before)
            if still > STUCK_ROUNDS:
                ledger = self.shell.ledger
                raise Violation(
                    "deadlock", f"{ledger.take_waits_for()}; issue: {ledger.issue_waits_for()}; {self.plan}"
                )
        self.account()

    def warm_up(self) -> None:
        for engine in self.engines:
            self.join(engine)
        for _ in range(2):
            self.learner_advance()
        for engine in self.engines:
            self.load(engine)
            self.acknowledge(engine)
        self.shell.pump()

    def lose_some(self) -> None:
        """Some engines never come back, and the buffer may crash at the same time."""
        for engine in self.engines[1:]:
            engine.deaf = self.rng.random() < 0.2
            if not engine.stuck and self.rng.random() < 0.3:
                engine.lost, engine.up = True, False
                if self.rng.random() < 0.3:
                    self.shell.start()

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
    except (FencedError, Refusal) as error:
        raise Violation("rule", f"a living peer was refused: {error}") from error
    except LedgerError as error:
        raise Violation("promise", str(error)) from error
    return history
