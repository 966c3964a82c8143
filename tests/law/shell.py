"""The buffer's shell in a random history: what buffer/server.py does with the cores, without its sockets.

Consumes    calls of the engines, the RoC filter and the learner (tests/law/world.py)
Produces    what the cores answer; every step is shown to the judge
Invariant   `start` loses everything but the disk; a change is on it in one transaction before the next call
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from buffer.leases import Leases, worth_closing
from buffer.ledger import Ledger
from buffer.membership import AckDeadlines
from buffer.peers import Peer, Peers
from buffer.tickets import OUTSTANDING, Ticket, check_promise
from buffer.wire import Hello
from tests.law.judge import ACK_S, DEAD_S, GROUP_S, LEASE_S, Disk, Judge, Plan, Violation, reference_batch


class Shell:
    """What buffer/server.py does with the cores, without its sockets."""

    ledger_class: type[Ledger] = Ledger
    leases_class: type[Leases] = Leases
    peers_class: type[Peers] = Peers
    deadlines_class: type[AckDeadlines] = AckDeadlines
    check = staticmethod(check_promise)
    worth = staticmethod(worth_closing)

    def __init__(self, plan: Plan, literal: bool) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.disk = Disk(S=plan.S)
        self.judge = Judge(self.disk, literal)
        self.learner_serving = False
        self.learner_lineage = 0
        self.num_lives = 0
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
        self.restore_peers()
        self.judge.heard_s = dict.fromkeys(disk.members, self.now_s)
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

    def restore_peers(self) -> None:
        """The previous life's peers count as heard now."""
        self.peers = self.peers_class()
        self.peers.by_name = {name: replace(peer, heard_s=self.now_s) for name, peer in self.disk.peers.items()}

    def say_hello(self, role: str, name: str) -> Peer:
        self.num_lives += 1
        peer, _ = self.peers.hello(Hello(role=role, name=name, life=f"{self.num_lives:08}"), self.now_s)
        self.disk.peers[name] = replace(peer)
        return peer

    def hello(self, name: str) -> int:
        peer = self.say_hello("rollout", name)
        self.judge.gone(name)
        self.judge.heard_s[name] = self.now_s
        self.free(self.leases.release_engine(name))
        self.commit(self.ledger.join(name, peer.epoch))
        return peer.epoch

    def heard(self, name: str, epoch: int) -> None:
        self.peers.check(name, epoch).heard_s = self.now_s
        self.judge.heard_s[name] = self.now_s

    def acknowledge(self, name: str, epoch: int, lineage: int, version: int) -> None:
        self.heard(name, epoch)
        released = self.ledger.acknowledge(name, epoch, version)
        self.judge.acknowledged(name, version)
        self.commit(released)

    def gone(self, name: str, epoch: int) -> None:
        self.judge.gone(name)
        if name in self.peers.by_name and self.peers.by_name[name].epoch == epoch:
            self.peers.by_name[name].state = "dead"
            self.disk.peers[name] = replace(self.peers.by_name[name])
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
        self.heard(name, epoch)
        waiting = {g: self.disk.tickets[g] for g in self.leases.groups if self.waits(g)}
        granted = self.leases.grant(name, epoch, loaded, want, self.now_s)
        self.judge_grant(name, loaded, want, waiting, {group for group, _, _ in granted})
        for group, rollout, _ in granted:
            self.judge.first_leased_s.setdefault(group, self.judge.live_s)
            self.save(group, rollout)
            self.commit(self.ledger.lease(group))
        return granted

    def waits(self, group: int) -> bool:
        states = [self.leases.state(group, rollout) for rollout in range(self.plan.num_rollouts)]
        return any(state is not None and state.hold == "waiting" for state in states)

    def judge_grant(self, name: str, loaded: int, want: int, waiting: dict[int, Ticket], got: set[int]) -> None:
        """Nothing with an earlier deadline is passed over; a live engine that wants work gets some if there is any."""
        latest = max((waiting[group].deadline for group in got), default=-1)
        for ticket in waiting.values():
            fits = ticket.group not in got and loaded >= ticket.base
            self.judge.rule(not (fits and ticket.deadline < latest), f"{ticket} was passed over")
        idle = want > 0 and name in self.judge.live and bool(waiting) and not got
        self.judge.rule(not idle, f"{name} is live, has loaded {loaded} and gets none of {len(waiting)} waiting groups")

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
            self.heard(name, epoch)
            self.leases.renew(name, epoch, keys, self.now_s)
        overdue = self.leases.timed_out(self.now_s, bool(self.ledger.live))
        late = self.deadlines.late(self.ledger.live, self.now_s, self.learner_serving)
        for member in late:
            since_s = min(s for v, s in judge.served_at_s.items() if v > member.version)
            judge.rule(judge.served_s - since_s > ACK_S - 2, f"{member} is fenced after {judge.served_s - since_s} s")
            self.gone(member.name, member.epoch)
        for peer in self.peers.silent(DEAD_S, self.now_s):
            if peer.role == "rollout":
                self.gone(peer.name, peer.epoch)
        for name in self.disk.members:
            judge.rule(self.now_s - judge.heard_s[name] <= DEAD_S, f"{name} is silent and still a member")
        self.free(self.leases.expired(self.now_s))
        for group, rollout in self.disk.rollouts:
            state = self.leases.state(group, rollout)
            over = state is not None and state.hold == "leased" and state.expires_s < self.now_s
            judge.rule(not over, f"{state} is over at {self.now_s} s")
        for group in overdue:
            self.judge_stuck(group, judge.leased_s(group) > GROUP_S - 2)
            self.close_stuck(group)
        for group in self.leases.groups:
            self.judge_stuck(group, self.leases.is_complete(group) or judge.leased_s(group) < GROUP_S + 4)

    def judge_stuck(self, group: int, holds: bool) -> None:
        since_s = self.judge.leased_s(group)
        self.judge.rule(holds, f"group {group}, first leased {since_s} s ago: closed too soon or not in time")

    def close_stuck(self, group: int) -> None:
        """With odd rollouts right, even ones wrong."""
        G = (self.plan.num_rollouts + 1) // 2
        done = self.leases.close(group)
        rewards = [float(rollout % 2) for rollout in done]
        kept = self.worth(rewards, G)
        expected = len(done) >= G and 0.0 in rewards and 1.0 in rewards
        self.judge.rule(kept == expected, f"stuck group {group} with rewards {rewards} of at least {G}: kept is {kept}")
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
        self.learner_lineage = self.say_hello("learner", "learner").epoch
        return self.learner_lineage

    def fence_learner(self, lineage: int) -> None:
        self.peers.check("learner", lineage)

    def take(self, lineage: int, step: int) -> tuple[int, ...] | None:
        self.fence_learner(lineage)
        if step in self.disk.batches:
            return self.disk.batches[step]
        pool = [t for t in self.disk.tickets.values() if t.state in OUTSTANDING]
        exhausted = self.source(self.ledger.next_problem) == "end"
        taken = self.ledger.take(step)
        got = sorted(t.group for t in taken or [])
        expected = reference_batch(step, self.plan.P, pool, exhausted)
        self.judge.rule(got == expected, f"step {step}: takes {got}, by the law {expected}")
        if taken is None:
            return None
        if len(got) < self.plan.P and not (exhausted and len(got) == len(pool)):
            raise Violation("promise", f"step {step}: a short batch of {got} with {len(pool)} outstanding")
        if any(t.state != "finished" for t in pool if t.group in got):
            raise Violation("promise", f"step {step}: takes {got}, not all finished")
        self.judge.trained(step, got, self.check)
        self.disk.batches[step] = tuple(got)
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
