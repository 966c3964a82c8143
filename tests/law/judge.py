"""What the law demands of a history, reckoned apart from the cores: who is live, acked, S at issue, times.

Consumes    what happened, and what lies on the buffer's disk; never what the ledger thinks
Produces    a Violation as soon as the law is broken
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from buffer.leases import RolloutState
from buffer.membership import Member
from buffer.peers import Peer
from buffer.tickets import ACTIVE, OUTSTANDING, FencedError, Ticket
from buffer.wire import Refusal

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


def plan_of(seed: int, **fixed: Any) -> Plan:
    """The history's parameters, drawn from its seed."""
    rng = random.Random(f"plan/{seed}")
    P = rng.choice((1, 2, 2, 3, 4))
    steps = rng.choice((3, 6, 9))
    plenty = rng.random() < 0.7
    drawn: dict[str, Any] = {
        "P": P,
        "S": rng.choice((0, 1, 1, 2, 3)),
        "steps": steps,
        "drop": rng.choice((0.0, 0.3, 0.3, 0.7)),
        "problems": steps * P * 6 if plenty else rng.randrange(1, steps * P * 2),
        "epoch_size": rng.choice((3, 5, 7)),
        "num_engines": rng.choice((1, 2, 3)),
        "num_rollouts": rng.choice((1, 2)),
        "events": rng.choice((0, 100, 250)),
        "moves_S": rng.random() < 0.4,
        "stuck_joiner": rng.random() < 0.3,
    }
    return Plan(seed=seed, **(drawn | fixed))


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
    peers: dict[str, Peer] = field(default_factory=dict)
    goal: bool = False


def reference_batch(step: int, P: int, tickets: list[Ticket], exhausted: bool) -> list[int]:
    """The taking rule once more, by putting what remains into places, earliest deadline first; [] while it waits."""
    pool = sorted(tickets, key=lambda t: t.group)
    if exhausted and len(pool) < P:
        return [t.group for t in pool] if all(t.state == "finished" for t in pool) else []
    chosen = [t for t in pool if t.deadline == step]
    if any(t.state != "finished" for t in chosen):
        return []
    for ticket in pool:
        left = P - len(chosen) - 1
        if left < 0 or ticket.state != "finished" or ticket in chosen:
            continue
        rest = sorted(t.deadline for t in pool if t not in chosen and t is not ticket)
        if all(step + (0 if i < left else 1 + (i - left) // P) <= d for i, d in enumerate(rest)):
            chosen.append(ticket)
    return sorted(t.group for t in chosen) if len(chosen) == P else []


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
        self.heard_s: dict[str, float] = {}

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

    def leased_s(self, group: int) -> float:
        """How long ago the group was leased first, without the time in which no engine was live."""
        return self.live_s - self.first_leased_s.get(group, self.live_s)

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
                raise Violation(
                    "promise", f"group {group}: version {oldest} in step {step}, S {self.S_at_issue[group]}"
                )
            check(self.disk.tickets[group], step, oldest)


def leaks(disk: Disk) -> list[Ticket]:
    """Tickets that are active although the run is over and everything is acknowledged."""
    return [t for t in disk.tickets.values() if t.state in ACTIVE]


def expect_fenced(call: Callable[[], Any], who: str) -> None:
    """A late message must be refused."""
    try:
        call()
    except (FencedError, Refusal):
        return
    raise Violation("rule", f"{who} was heard, although it is over")
