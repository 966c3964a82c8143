"""Everything the buffer decides with: one object that the service's parts share.

Consumes    the settings of the run
Produces    the ledger, the leases, the peers, the groups, and the unit that the next commit makes durable
Waits for   nothing: no sockets, no disk, no clocks; the time is an argument (`Now`)
Invariant   every change to what must survive puts its rows into `unit` in the same call
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from buffer.codec import encode
from buffer.groups import GroupWork, RolloutWork
from buffer.index import put_meta
from buffer.journal import Statement
from buffer.leases import Leases, worth_closing
from buffer.ledger import Ledger
from buffer.membership import AckDeadlines
from buffer.meters import Meters
from buffer.peers import Peers
from buffer.schema import Problem, RolloutKey
from buffer.settings import BufferSettings
from buffer.storage import Unit
from buffer.tickets import Ticket
from buffer.usage import Usage
from buffer.wire import Turned

Source: TypeAlias = Callable[[int], Problem | None]
AGE_EDGES = tuple(float(age) for age in range(17))
ALL_RIGHT_STEPS = 5
"""the goal is reached early when so many steps' worth of groups were dropped as all right, one after the other"""


@dataclass(frozen=True, slots=True)
class Now:
    """The time, twice."""

    s: float
    """monotonic: for deadlines"""
    unix_s: float
    """of day: for records"""


class RunState:
    """The run as the buffer holds it in memory."""

    def __init__(self, settings: BufferSettings, problems: Source, heldout: Sequence[Problem], now: Now) -> None:
        self.settings = settings
        self.problems = problems
        self.heldout = list(heldout)[: settings.evaluation_problems]
        self.ledger = Ledger(settings.groups_per_step, settings.max_staleness, settings.steps)
        self.leases = Leases(settings.num_rollouts, settings.lease_s, settings.group_timeout_s)
        self.peers = Peers()
        self.deadlines = AckDeadlines(settings.ack_timeout_s)
        self.groups: dict[int, GroupWork] = {}
        self.offers = 0
        """grows when a rollout may have become available: parked lease requests are tried again only then"""
        self.outlooks = 0
        """grows when a batch may have become possible: a parked take is tried again only then"""
        self.outlook_seen = -1
        self.batches: dict[int, bytes] = {}
        """encoded records of recent steps"""
        self.phase = "start"
        """start | train | last_version | end | done"""
        self.goal = ""
        """why training is over: steps (all are trained) | all_right (RoC finds nothing more) | exhausted (no problem is
        left); "" while it goes on"""
        self.next_evaluation = -1 - len(self.heldout)
        """highest group number that the next evaluation at an end may use"""
        self.evaluated_start = False
        """the evaluation at the start was begun"""
        self.published = (-1, -1)
        """lineage and version of the newest publication on record"""
        self.published_unix_s: dict[int, float] = {}
        """when versions that not all live engines have loaded were put on record, the last time counting"""
        self.checksums: dict[tuple[int, int], int] = {}
        """(lineage, version) -> what an acknowledgement of it must say"""
        self.outcomes: deque[str] = deque(maxlen=ALL_RIGHT_STEPS * settings.groups_per_step)
        """of the groups that RoC decided last: kept, or why dropped"""
        self.turned: list[Turned] = []
        """records of live dials (buffer/dials.py), oldest first"""
        self.checkpoints: list[int] = []
        """versions on disk, ascending"""
        self.life = 1
        self.unit = Unit()
        self.meters = Meters("buffer", "buffer-0", now.s, Usage().read)

    @property
    def state(self) -> str:
        """What heartbeats tell: running | evaluating | done."""
        evaluating = self.phase in ("start", "end") and any(g.kind == "eval" for g in self.groups.values())
        return "done" if self.phase == "done" else "evaluating" if evaluating else "running"

    def put(self, *statements: Statement) -> None:
        self.unit.statements += statements

    def put_phase(self, phase: str) -> None:
        self.phase = phase
        self.put(put_meta("phase", phase))

    def put_meters(self, now: Now) -> None:
        """The cumulative figures, so that a restart goes on counting."""
        self.put(put_meta("meters", as_json(self.meters.snapshot(now.s))))

    # Groups

    def open_group(self, group: GroupWork, index: int, state: str, now: Now) -> None:
        """Offer a group's rollouts to the engines."""
        self.offers += 1
        self.groups[group.group] = group
        self.leases.open(group.group, group.base, group.deadline, group.kind, len(group.rollouts))
        staleness = max(0, group.deadline - group.base)
        self.put(
            (
                "INSERT INTO groups (group_id, kind, phase, problem_index, problem_id, problem, num_rollouts, "
                "base_version, deadline_step, max_staleness, issued_unix_s, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    group.group,
                    group.kind,
                    group.phase,
                    index,
                    group.problem.id,
                    encode(Problem, group.problem)[0],
                    len(group.rollouts),
                    group.base,
                    group.deadline,
                    staleness,
                    now.unix_s,
                    state,
                ),
            )
        )

    def issue(self, now: Now) -> None:
        """Give out every ticket that the law allows."""
        while self.phase == "train" and self.ledger.can_issue():
            index = self.ledger.next_problem
            problem = self.problems(index)
            if problem is None:
                self.ledger.exhausted = True
                self.outlooks += 1
                break
            ticket = self.ledger.issue(index)
            assert ticket is not None
            works = [RolloutWork() for _ in range(self.settings.num_rollouts)]
            group = GroupWork(
                group=ticket.group,
                kind="train",
                phase="",
                problem=problem,
                base=ticket.base,
                deadline=ticket.deadline,
                rollouts=works,
            )
            self.open_group(group, index, "waiting", now)
            self.put(put_meta("next_problem", index + 1))

    def write_tickets(self, changed: Iterable[Ticket]) -> None:
        """The rows of tickets whose state changed."""
        for ticket in changed:
            self.put(
                (
                    "UPDATE groups SET state = ?, drop_reason = ?, step = ? WHERE group_id = ?",
                    (ticket.state, ticket.drop_reason, ticket.step, ticket.group),
                )
            )

    def write_released(self, released: Iterable[Ticket]) -> None:
        """`acked` and the tickets released with it: one transaction."""
        self.write_tickets(released)
        self.put(put_meta("acked", self.ledger.acked))

    def drop(self, group: GroupWork, reason: str, now: Now) -> None:
        """The group will not be trained; its ticket is free at once."""
        self.leases.close(group.group)
        self.outlooks += 1
        self.write_tickets(self.ledger.drop(group.group, reason))
        self.put(
            (
                "UPDATE groups SET decided_unix_s = ?, decided_step = ? WHERE group_id = ?",
                (now.unix_s, self.ledger.next_step, group.group),
            )
        )
        self.meters.count(f"groups_dropped/{reason}")
        del self.groups[group.group]

    def score(self, group: GroupWork, now: Now, *, timed_out: bool = False) -> None:
        """The group is over for the engines: RoC decides on what is there."""
        self.leases.close(group.group)
        rewards = [finish.reward for finish in group.finishes()]
        self.put(
            (
                "UPDATE groups SET scored_unix_s = ?, timed_out = ? WHERE group_id = ?",
                (now.unix_s, int(timed_out), group.group),
            )
        )
        if group.kind == "eval":
            self.put(("UPDATE groups SET state = 'finished' WHERE group_id = ?", (group.group,)))
            del self.groups[group.group]
        elif timed_out and not worth_closing(rewards, self.settings.group_size):
            self.drop(group, "timed_out", now)
        elif not rewards:
            self.drop(group, "failed", now)
        else:
            group.scored = True

    def free(self, keys: Iterable[RolloutKey]) -> None:
        """Rows of rollouts that wait again."""
        for key in keys:
            self.offers += 1
            self.put(("UPDATE rollouts SET state = 'waiting' WHERE group_id = ? AND rollout = ?", key))

    def finish_run(self, why: str) -> None:
        """The goal is reached: nothing is issued or taken any more, what is outstanding goes unused."""
        self.goal = why
        self.put(put_meta("goal", why))
        unused = self.ledger.goal_reached(self.ledger.next_step)
        for ticket in unused:
            self.leases.close(ticket.group)
            self.groups.pop(ticket.group, None)
        self.write_tickets(unused)
        self.put_phase("last_version")

    def seed_of(self, group: int, rollout: int) -> int:
        """Seed of a rollout: its own, the same after any restart."""
        text = f"{self.settings.seed} {group} {rollout}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
