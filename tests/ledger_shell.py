"""The buffer's shell in a random history: the pure cores, what lies on its disk, and a judge that knows the law.

Consumes    calls of the engines, the RoC filter and the learner (tests/ledger_world.py)
Produces    Violation as soon as the law is broken; mutants override what they leave out
Invariant   `crash` loses everything but `Disk`; a change is on it in one transaction before the next call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from buffer.leases import Leases, RolloutState, worth_closing
from buffer.ledger import Ledger
from buffer.membership import AckDeadlines, Member, Presence
from buffer.tickets import ACTIVE, OUTSTANDING, FencedError, Ticket, check_promise

LEASE_S, DEAD_S, GROUP_S, ACK_S = 5.0, 8.0, 25.0, 12.0


class Violation(AssertionError):
    """The law is broken. kind: promise | deadlock | growth | weights | rule (a sentence read literally)."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One history's parameters."""

    seed: int
    P: int
    S: int
    steps: int
    drop: float
    problems: int
    epoch_size: int
    num_engines: int
    num_rollouts: int
    events: int
    moves_S: bool
    stuck_joiner: bool


@dataclass(slots=True)
class Disk:
    """What survives a crash of the buffer."""

    S: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    acked: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    next_step: int = 0
    rollouts: dict[tuple[int, int], RolloutState] = field(default_factory=dict)
    tokens: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """versions that sampled the durable tokens of a rollout"""
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    published: tuple[int, int] = (-1, -1)
    checkpoints: dict[int, tuple[Any, ...]] = field(default_factory=lambda: {0: ()})
    epochs: dict[str, int] = field(default_factory=dict)
    goal: bool = False


def reference_batch(step: int, P: int, tickets: list[Ticket], exhausted: bool) -> list[int] | None:
    """The taking rule once more, by scheduling what remains earliest deadline first into places."""
    pool = sorted(tickets, key=lambda t: t.group)
    if exhausted and len(pool) < P:
        return [t.group for t in pool] if pool and all(t.state == "finished" for t in pool) else None
    due = [t for t in pool if t.deadline == step]
    chosen = due if all(t.state == "finished" for t in due) else None
    for ticket in pool if chosen is not None else []:
        left = P - len(chosen) - 1
        if left < 0 or ticket.state != "finished" or ticket in chosen:
            continue
        rest = sorted(t.deadline for t in pool if t not in chosen and t is not ticket)
        if all(step + (0 if i < left else 1 + (i - left) // P) <= d for i, d in enumerate(rest)):
            chosen = [*chosen, ticket]
    return sorted(t.group for t in chosen) if chosen is not None and len(chosen) == P else None


class Judge:
    """Its own account of who is live, of acked, of S at issue; told what happened, not what the ledger thinks."""

    def __init__(self, disk: Disk, literal: bool) -> None:
        self.disk, self.literal = disk, literal
        self.live: dict[str, int] = {}
        self.acked = 0
        self.S_at_issue: dict[int, int] = {}
        self.first_leased_s: dict[int, float] = {}
        self.live_s = self.served_s = 0.0
        self.served_at_s: dict[int, float] = {}

    def rule(self, holds: bool, text: str) -> None:
        if self.literal and not holds:
            raise Violation("rule", text)

    def acknowledged(self, name: str, version: int) -> None:
        if name in self.live or version >= self.acked:
            self.live[name] = version
        self.settle()

    def gone(self, name: str) -> None:
        self.live.pop(name, None)
        self.settle()

    def settle(self) -> None:
        if self.live:
            self.acked = max(self.acked, min(self.live.values()))

    def active(self) -> int:
        """Independent of states: issued, not dropped, not unused, its step not below what all engines have."""
        return sum(
            t.state in OUTSTANDING or (t.step is not None and t.state in ("taken", "released") and t.step >= self.acked)
            for t in self.disk.tickets.values()
        )

    def issued(self, ticket: Ticket, active_before: int, S: int, P: int) -> None:
        if active_before >= (S + 1) * P:
            raise Violation("growth", f"{ticket} issued while {active_before} were active, S = {S}, P = {P}")
        self.rule(bool(self.live), f"{ticket} issued without a live engine")
        self.S_at_issue[ticket.group] = S

    def trained(self, step: int, groups: Iterable[int], check: Callable[[Ticket, int, int], None]) -> None:
        for group in groups:
            versions = {v for (g, _), vs in self.disk.tokens.items() if g == group for v in vs}
            oldest = min(versions)
            if step - oldest > self.S_at_issue[group]:
                raise Violation("promise", f"group {group}: version {oldest} in step {step}, S {self.S_at_issue[group]}")
            check(self.disk.tickets[group], step, oldest)


class Shell:
    """What buffer/server.py does with the cores, without its sockets."""

    ledger_class: type[Ledger] = Ledger
    leases_class: type[Leases] = Leases
    presence_class: type[Presence] = Presence
    deadlines_class: type[AckDeadlines] = AckDeadlines
    check = staticmethod(check_promise)

    def __init__(self, plan: Plan, literal: bool) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.disk = Disk(S=plan.S)
        self.judge = Judge(self.disk, literal)
        self.learner_serving = False
        self.learner_lineage = 0
        self.start()

    def start(self) -> None:
        """Begin, or take up what is on disk."""
        disk, plan = self.disk, self.plan
        self.ledger = self.ledger_class(plan.P, disk.S, plan.steps)
        self.ledger.restore(disk.tickets.values(), disk.acked, disk.members.values(), disk.next_step, disk.S)
        self.ledger.goal = disk.goal
        self.leases = self.leases_class(plan.num_rollouts, LEASE_S, GROUP_S)
        for ticket in self.ledger.outstanding:
            if ticket.state != "finished":
                self.leases.open(ticket.group, ticket.base, ticket.deadline, "train")
                self.judge.first_leased_s.pop(ticket.group, None)
        self.leases.restore((replace(r) for k, r in disk.rollouts.items() if k[0] in self.leases.groups), self.now_s)
        for group in self.leases.groups:
            if any(k[0] == group for k in disk.rollouts):
                self.judge.first_leased_s[group] = self.judge.live_s
        self.presence = self.presence_class(DEAD_S)
        self.presence.restore([(m.name, m.epoch) for m in disk.members.values()], self.now_s)
        self.lineages = self.presence_class(float("inf"))
        self.lineages.restore([("learner", self.learner_lineage)], self.now_s)
        self.deadlines = self.deadlines_class(ACK_S)
        self.judge.served_at_s = {}
        if disk.published[1] >= 0:
            self.published(disk.published[1])

    def commit(self, changed: Iterable[Ticket]) -> None:
        """One transaction."""
        self.disk.tickets |= {t.group: t for t in changed}
        self.disk.acked = self.ledger.acked
        self.disk.members = {m.name: m for m in self.ledger.members}
        self.disk.next_step = self.ledger.next_step
        judge = self.judge
        judge.rule(self.ledger.acked == judge.acked, f"acked is {self.ledger.acked}, the engines say {judge.acked}")

    # Engines

    def hello(self, name: str) -> int:
        epoch = self.disk.epochs[name] = self.disk.epochs.get(name, 0) + 1
        self.judge.gone(name)
        self.presence.heard(name, epoch, self.now_s)
        self.free(self.leases.release_engine(name))
        self.commit(self.ledger.join(name, epoch))
        return epoch

    def acknowledge(self, name: str, epoch: int, lineage: int, version: int) -> None:
        self.presence.heard(name, epoch, self.now_s)
        released = self.ledger.acknowledge(name, epoch, version)
        self.judge.acknowledged(name, version)
        self.commit(released)

    def gone(self, name: str, epoch: int) -> None:
        self.judge.gone(name)
        self.presence.forget(name)
        self.free(self.leases.release_engine(name, epoch))
        self.commit(self.ledger.remove(name, epoch))

    def free(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            self.save(*key)

    def save(self, group: int, rollout: int) -> None:
        state = self.leases.state(group, rollout)
        assert state is not None
        self.disk.rollouts[group, rollout] = replace(state)

    def lease(self, name: str, epoch: int, loaded: int, want: int) -> list[tuple[int, int, int]]:
        self.presence.heard(name, epoch, self.now_s)
        waiting = [
            t
            for t in self.disk.tickets.values()
            if t.group in self.leases.groups
            and any(self.leases.state(t.group, r).hold == "waiting" for r in range(self.plan.num_rollouts))  # type: ignore[union-attr]
        ]
        granted = self.leases.grant(name, epoch, loaded, want, self.now_s)
        got = {g for g, _, _ in granted}
        for ticket in waiting:
            passed_over = ticket.group not in got and loaded >= ticket.base
            late = max((self.disk.tickets[g].deadline for g in got), default=10**9)
            self.judge.rule(not passed_over or ticket.deadline >= late or len(got) == 0, f"{ticket} was passed over")
        idle = want > 0 and name in self.judge.live and bool(waiting) and not granted
        self.judge.rule(not idle, f"{name} is live, has loaded {loaded} and gets none of {len(waiting)} waiting groups")
        for group, rollout, _ in granted:
            self.judge.first_leased_s.setdefault(group, self.judge.live_s)
            self.save(group, rollout)
            self.commit(self.ledger.lease(group))
        return granted

    def push(self, key: tuple[int, int], attempt: int, name: str, epoch: int, version: int) -> None:
        """A durable turn."""
        self.leases.check(*key, attempt, name, epoch)
        self.disk.tokens.setdefault(key, set()).add(version)

    def end(self, key: tuple[int, int], attempt: int, name: str, epoch: int, excluded: bool) -> None:
        (self.leases.excluded if excluded else self.leases.done)(*key, attempt, name, epoch)
        self.save(*key)

    def decide(self, group: int, kept: bool, reason: str) -> None:
        """The word of the RoC filter."""
        done = self.leases.close(group)
        self.commit(self.ledger.finish(group) if kept and done else self.ledger.drop(group, reason))

    def undecided(self) -> list[int]:
        return [group for group in self.leases.groups if self.leases.is_complete(group)]

    # Time, issue

    def tick(self, alive: Iterable[tuple[str, int, list[tuple[int, int]]]], dt_s: float) -> None:
        judge = self.judge
        judge.live_s += dt_s if judge.live else 0.0
        judge.served_s += dt_s if self.learner_serving else 0.0
        self.now_s += dt_s
        for name, epoch, keys in alive:
            self.presence.heard(name, epoch, self.now_s)
            self.leases.renew(name, epoch, keys, self.now_s)
        overdue = self.leases.timed_out(self.now_s, bool(self.ledger.live))
        late = self.deadlines.late(self.ledger.live, self.now_s, self.learner_serving)
        for member in late:
            since_s = min(s for v, s in judge.served_at_s.items() if v > member.version)
            judge.rule(judge.served_s - since_s > ACK_S - 2, f"{member} is fenced after {judge.served_s - since_s} s")
            self.gone(member.name, member.epoch)
        for name, epoch in self.presence.silent(self.now_s):
            self.gone(name, epoch)
        self.free(self.leases.expired(self.now_s))
        for group in overdue:
            since_s = judge.first_leased_s.get(group, judge.live_s)
            judge.rule(judge.live_s - since_s > GROUP_S - 2, f"group {group} is closed after {judge.live_s - since_s} s")
            self.close_stuck(group)

    def close_stuck(self, group: int) -> None:
        rewards = [float(rollout % 2) for rollout in self.leases.close(group)]
        kept = worth_closing(rewards, (self.plan.num_rollouts + 1) // 2)
        self.commit(self.ledger.finish(group) if kept else self.ledger.drop(group, "timed_out"))

    def source(self, index: int) -> str:
        """a problem | wait | end"""
        return "problem" if index < self.plan.problems else "end"

    def pump(self) -> None:
        """Issue what may be issued; called after every event."""
        ledger, judge = self.ledger, self.judge
        while (answer := self.source(ledger.next_problem)) == "problem":
            before = judge.active()
            ticket = ledger.issue(ledger.next_problem)
            if ticket is None:
                break
            used = {t.problem_index for t in self.disk.tickets.values()}
            if ticket.problem_index in used or ticket.problem_index != len(used):
                raise Violation("rule", f"{ticket}: problem {ticket.problem_index} of {len(used)} used")
            judge.issued(ticket, before, self.disk.S, self.plan.P)
            self.commit([ticket])
            self.leases.open(ticket.group, ticket.base, ticket.deadline, "train")
        ledger.exhausted = answer == "end"
        room = judge.active() < (self.disk.S + 1) * self.plan.P and ledger.next_step < self.plan.steps
        may = room and bool(judge.live) and answer != "end" and not self.disk.goal
        judge.rule(not may, f"nothing is issued with {judge.active()} active, S = {self.disk.S}")

    def set_staleness(self, S: int) -> None:
        self.ledger.set_staleness(S)
        self.disk.S = S

    # Learner

    def learner_hello(self) -> int:
        self.learner_lineage += 1
        self.fence_learner(self.learner_lineage)
        return self.learner_lineage

    def fence_learner(self, lineage: int) -> None:
        self.lineages.heard("learner", lineage, self.now_s)

    def take(self, lineage: int, step: int) -> tuple[int, ...] | None:
        self.fence_learner(lineage)
        if step in self.disk.batches:
            return self.disk.batches[step]
        pool = [t for t in self.disk.tickets.values() if t.state in OUTSTANDING]
        exhausted = self.source(self.ledger.next_problem) == "end"
        taken = self.ledger.take(step)
        expected = reference_batch(step, self.plan.P, pool, exhausted)
        got = None if taken is None else sorted(t.group for t in taken)
        self.judge.rule(got == expected, f"step {step}: takes {got}, by the law {expected}")
        if taken is None:
            return None
        if len(taken) < self.plan.P and not (exhausted and len(taken) == len(pool)):
            raise Violation("promise", f"step {step}: a short batch of {got} with {len(pool)} outstanding")
        if any(t.state != "finished" for t in pool if t.group in got):  # type: ignore[operator]
            raise Violation("promise", f"step {step}: takes {got}, not all finished")
        self.judge.trained(step, got, self.check)  # type: ignore[arg-type]
        self.disk.batches[step] = tuple(got)  # type: ignore[arg-type]
        self.commit(taken)
        ahead = self.ledger.next_step - self.judge.acked
        if not self.plan.moves_S and ahead > self.plan.S + 1:
            raise Violation("growth", f"the learner is {ahead} steps ahead of the engines, S = {self.plan.S}")
        return self.disk.batches[step]

    def record_publication(self, lineage: int, version: int) -> None:
        self.fence_learner(lineage)
        self.disk.published = (lineage, version)
        self.published(version)

    def published(self, version: int) -> None:
        self.deadlines.published(version)
        self.judge.served_at_s.setdefault(version, self.judge.served_s)

    def record_checkpoint(self, lineage: int, version: int, content: tuple[Any, ...]) -> None:
        self.fence_learner(lineage)
        kept = sorted({*self.disk.checkpoints, version})[-2:]
        self.disk.checkpoints = {v: c for v, c in {**self.disk.checkpoints, version: content}.items() if v in kept}
        self.prune(kept)

    def prune(self, kept: list[int]) -> None:
        self.disk.batches = {s: b for s, b in self.disk.batches.items() if s >= kept[0]}

    def reach_goal(self, step: int) -> None:
        self.commit(self.ledger.goal_reached(step))
        self.disk.goal = True
        for group in self.leases.groups:
            self.leases.close(group)


def leaks(disk: Disk) -> list[Ticket]:
    """Tickets that are active although the run is over and everything is acknowledged."""
    return [t for t in disk.tickets.values() if t.state in ACTIVE]


def expect_fenced(call: Callable[[], Any], who: str) -> None:
    """A late message must be refused."""
    try:
        call()
    except FencedError:
        return
    raise Violation("rule", f"{who} was heard, although it is over")
