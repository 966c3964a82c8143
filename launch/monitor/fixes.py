"""What to turn when a stage limits a run.

Consumes    a snapshot, the limit and its rival, all capacities
Produces    at most three fixes, the best first
Waits for   nothing: pure
Invariant   a fix changes its dial; what it is expected to give is never less than now and never more than what the next
            stage could do
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch.monitor import capacities as stages
from launch.monitor.capacities import Capacity, mean_of
from launch.monitor.snapshot import Role, Snapshot

MAX_FIXES = 3
EASY_USE = 0.7
"""what a stage's use should come down to"""
MANY_TIMEOUTS = 0.02
MANY_EQUAL = 0.3
LONG_PAUSE = 0.05
CHECKPOINT_SHARE = 0.1
FREE_CORES = 0.85
MANY_OTHERS = 0.2
"""of a host's cores"""
NO_DIAL = {
    "problems": "these",
    "host": "shared",
    "launch/rollout.sh": "this host",
    "launch/sandbox.sh": "this host",
    "launch/learner.sh": "this host",
}
"""what can be changed, but is no setting -> what it is now"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """One change of one dial."""

    dial: str
    """dotted name, or a node script"""
    now: Any
    proposed: Any
    reason: str
    expect: str
    expect_groups_per_min: float | None


@dataclass(frozen=True, slots=True)
class _Case:
    """What the proposals look at."""

    snapshot: Snapshot
    limit: Capacity
    found: dict[str, Capacity]
    then: float | None
    """what the next stage could do, groups/min"""

    def dial(self, name: str, otherwise: Any = None) -> Any:
        return self.snapshot.settings.get(name, otherwise)

    def fix(self, dial: str, proposed: Any, reason: str, factor: float = 1.0) -> Fix:
        """`factor`: by how much the limit's own capacity grows."""
        rate, capacity = self.snapshot.rates.groups_trained_per_min or 0.0, self.limit.groups_per_min
        expected = None if capacity is None else capacity * factor
        if expected is not None and self.then is not None:
            expected = min(expected, self.then)
        expected = None if expected is None else max(expected, rate)
        if expected is None or factor <= 1.0:
            told, expected = "fresher or cheaper, not faster" if factor <= 1.0 else "unknown", rate
        else:
            gain = expected / rate - 1.0 if rate else 0.0
            told = f"{rate:.0f} -> {expected:.0f} groups/min (+{gain:.0%})"
        return Fix(
            dial=dial,
            now=self.dial(dial, NO_DIAL.get(dial)),
            proposed=proposed,
            reason=reason,
            expect=told,
            expect_groups_per_min=expected,
        )


def fixes(
    snapshot: Snapshot, limit: Capacity, found: Sequence[Capacity], rival: Capacity | None = None
) -> tuple[Fix, ...]:
    """For the limit; with a rival for both, since moving one alone gives nothing."""
    working = [one for one in found if one.stage not in (stages.SLOTS, stages.KV, stages.TICKETS)]
    behind = [one.groups_per_min for one in working if one is not limit and one.groups_per_min is not None]
    case = _Case(snapshot, limit, {one.stage: one for one in found}, min(behind, default=None))
    given = list(PROPOSALS[limit.stage](case))
    if rival is not None:
        given = [*given[:1], *list(PROPOSALS[rival.stage](case))[:1]]
    given += _always(case)
    seen: dict[str, Fix] = {}
    for fix in given:
        if fix.proposed != fix.now:
            seen.setdefault(fix.dial, fix)
    return tuple(seen.values())[:MAX_FIXES]


def _cores_left(case: _Case) -> bool:
    cores = case.found[stages.CORES].use
    return cores is None or cores < FREE_CORES


def _sandbox(case: _Case) -> Iterator[Fix]:
    sandbox = case.snapshot.sandbox
    assert sandbox is not None
    use = case.limit.use or 1.0
    more = max(sandbox.workers + 1, math.ceil(sandbox.workers * use / EASY_USE))
    if _cores_left(case):
        each = math.ceil(more / max(1, sandbox.nodes))
        yield case.fix("sandbox.workers", each, f"{case.limit.says}; cores are left", more / sandbox.workers)
    else:
        nodes = int(case.dial("sandbox.nodes", 1))
        yield case.fix(
            "sandbox.nodes", nodes + 1, "its hosts have no core left: add one with launch/sandbox.sh", 1 + 1 / nodes
        )
    if (sandbox.timeouts or 0.0) > MANY_TIMEOUTS:
        wall_s = float(case.dial("sandbox.wall_s", 4.0))
        factor = 1.0 + (sandbox.timeouts or 0.0)
        yield case.fix(
            "sandbox.wall_s", wall_s / 2, f"{sandbox.timeouts:.0%} of the calls run until they time out", factor
        )


def _engines(case: _Case) -> Iterator[Fix]:
    engines = int(case.dial("rollout.engines", 1))
    where = "" if _cores_left(case) else ", on a host of its own (launch/rollout.sh)"
    yield case.fix("rollout.engines", engines + 1, f"{case.limit.says}: another engine{where}", 1 + 1 / engines)
    threads = int(case.dial("rollout.cpu_threads", 1))
    if _cores_left(case) and case.dial("rollout.device", "auto") in ("auto", "cpu"):
        yield case.fix("rollout.cpu_threads", threads + 1, "cores are left for the engine", 1 + 0.5 / threads)
    yield from _cheaper_swap(case)


def _slots(case: _Case) -> Iterator[Fix]:
    slots = int(case.dial("rollout.concurrency", 1))
    factor = _gain(case, slots)
    yield case.fix("rollout.concurrency", 2 * slots, f"{case.limit.says}; the engine's curve goes on above", factor)


def _gain(case: _Case, slots: int) -> float:
    """Of twice the slots: twice, where rollouts wait for tools; for generations what the curve gave last time."""
    gains = []
    for engine in case.snapshot.engines:
        half = [point.tokens_per_s for point in engine.curve if point.concurrency <= slots / 2]
        if half and engine.curve:
            gains.append(min(2.0, max(1.05, engine.curve[-1].tokens_per_s / half[-1])))
    tools = case.snapshot.useful.tool_wait if case.snapshot.useful is not None else None
    computed = sum(gains) / len(gains) if gains else 1.5
    return max(computed, 1.0 + (tools or 0.0))


def _kv(case: _Case) -> Iterator[Fix]:
    held = mean_of(case.snapshot.engines, "held_when_full") or 1.0
    slots = int(case.dial("rollout.concurrency", 1))
    mib = case.dial("rollout.kv_cache_mib") or 64
    factor = min(2.0, slots / max(held, 1.0))
    more = math.ceil(mib * factor)
    yield case.fix("rollout.kv_cache_mib", more, f"{case.limit.says}: the cache is too small for the slots", factor)
    length = int(case.dial("rollout.max_length", 0))
    if length > 64:
        reason = "shorter rollouts need less of the cache; those that reach the limit are scored as they are"
        yield case.fix("rollout.max_length", length * 3 // 4, reason, 4 / 3)


def _learner(case: _Case) -> Iterator[Fix]:
    learner = case.snapshot.learner
    parts = learner.parts_s if learner is not None else {}
    step_s = sum(parts.values()) - parts.get("wait", 0.0)
    saved = parts.get("checkpoint", 0.0)
    if step_s and saved > CHECKPOINT_SHARE * step_s:
        every = int(case.dial("learner.checkpoint_every", 10))
        factor = step_s / (step_s - saved / 2)
        yield case.fix(
            "learner.checkpoint_every", 2 * every, f"checkpoints take {saved / step_s:.0%} of a step", factor
        )
    ranks = int(case.dial("learner.ranks", 1))
    where = "" if _cores_left(case) else ", on a host with free cores"
    yield case.fix("learner.ranks", 2 * ranks, f"{case.limit.says}{where}", 1.8)
    stale = case.snapshot.staleness
    if stale is not None and stale.max_staleness > 1 and (stale.mean or 0.0) > 0.8 * stale.max_staleness:
        lower = stale.max_staleness - 1
        yield case.fix("staleness.max_staleness", lower, "groups wait for the learner: fresher ones train as fast")
    tokens = int(case.dial("learner.micro_batch_tokens", 8192))
    yield case.fix("learner.micro_batch_tokens", 2 * tokens, "larger passes, if memory allows", 1.1)


def _swap(case: _Case) -> Iterator[Fix]:
    yield from _cheaper_swap(case)
    yield from _more_tickets(case, "versions are on their way while engines go on with older ones")


def _cheaper_swap(case: _Case) -> Iterator[Fix]:
    """Less pause, larger buckets."""
    swap = case.snapshot.swap
    if swap is None:
        return
    receive_s, pause_s = swap.receive_s or 0.0, swap.pause_s or 0.0
    if (swap.paused or 0.0) > LONG_PAUSE and case.dial("weights.kv", "recompute") == "recompute":
        reason = f"engines pause {swap.paused:.0%} of the time; log-probs are then those of mixed KV"
        yield case.fix("weights.kv", "keep", reason, 1.0 + (swap.paused or 0.0))
    most = float(case.dial("weights.max_mib_per_s", 0.0))
    if case.limit.stage == stages.SWAP and most > 0 and receive_s > pause_s:
        took_s = (swap.publish_s or 0.0) + receive_s + pause_s
        reason = f"at most {most:g} MiB/s are sent: receiving takes {receive_s:.1f} of {took_s:.1f} s of a version"
        yield case.fix("weights.max_mib_per_s", 2 * most, reason, took_s / (took_s - receive_s / 2))
    elif case.limit.stage == stages.SWAP and receive_s > pause_s:
        mib = int(case.dial("weights.bucket_mib", 64))
        yield case.fix("weights.bucket_mib", min(1024, 2 * mib), f"receiving takes {receive_s:.1f} s of a version", 1.2)


def _tickets(case: _Case) -> Iterator[Fix]:
    yield from _more_tickets(case, case.limit.says)


def _more_tickets(case: _Case, reason: str) -> Iterator[Fix]:
    if case.dial("loss.correction") == "none":
        return
    stale = case.dial("staleness.max_staleness", 0)
    yield case.fix("staleness.max_staleness", stale + 1, f"{reason}; age rises by up to 1", (stale + 2) / (stale + 1))


def _cores(case: _Case) -> Iterator[Fix]:
    by_role: dict[str, float] = {}
    for role in case.snapshot.roles:
        by_role[role.role] = by_role.get(role.role, 0.0) + (role.cores_used or 0.0)
    hungry: Role | None = max(
        (role for role in case.snapshot.roles if role.role in ("rollout", "sandbox", "learner")),
        key=lambda role: by_role[role.role],
        default=None,
    )
    fullest = max(case.snapshot.hosts, key=lambda host: host.used / host.cores)
    others = fullest.used - fullest.run_used
    if others > MANY_OTHERS * fullest.cores:
        factor = min(2.0, fullest.cores / max(fullest.cores - others, fullest.cores / 2))
        yield case.fix("host", "its own", f"others use {others:.1f} of {fullest.cores} cores of {fullest.name}", factor)
    threads = int(case.dial("rollout.cpu_threads", 1))
    if threads > 1 and hungry is not None and hungry.role == "rollout":
        yield case.fix("rollout.cpu_threads", 1, "an engine's threads take cores from the other stages", 1.1)
    if hungry is not None:
        used = by_role[hungry.role]
        total = sum(by_role.values())
        reason = f"{hungry.role} uses {used:.1f} of {total:.1f} cores: give it a host of its own"
        yield case.fix(f"launch/{hungry.role}.sh", "another host", reason, total / max(total - used, total / 2))


def _none(case: _Case) -> Iterator[Fix]:
    yield from ()


def _always(case: _Case) -> Iterator[Fix]:
    """Whatever limits: work that is thrown away."""
    useful = case.snapshot.useful
    if useful is None:
        return
    equal = sum(useful.dropped.get(reason, 0.0) for reason in ("all_right", "all_wrong", "all_equal"))
    if equal > MANY_EQUAL and case.limit.stage not in (stages.LEARNER, stages.TICKETS, stages.SWAP):
        which = "harder" if useful.dropped.get("all_right", 0.0) * 2 > equal else "easier"
        reason = f"{equal:.0%} of the groups have equal rewards and are dropped"
        yield case.fix("problems", f"{which} ones", reason, min(1.5, 1 / (1 - equal / 2)))


PROPOSALS: dict[str, Callable[[_Case], Iterator[Fix]]] = {
    stages.ENGINES: _engines,
    stages.SANDBOX: _sandbox,
    stages.FILTER: _none,
    stages.BUFFER: _none,
    stages.LEARNER: _learner,
    stages.SWAP: _swap,
    stages.CORES: _cores,
    stages.SLOTS: _slots,
    stages.KV: _kv,
    stages.TICKETS: _tickets,
}
