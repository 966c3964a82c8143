"""What each stage of a run could do, in trained groups per minute.

Consumes    a snapshot
Produces    a capacity per stage, and how much of it is in use
Waits for   nothing: pure
Invariant   capacity = the run's rate / the share of the stage's capacity in use; what is not known is None

Roles with one thing to do at a time are in use while they are not waiting. An engine is not: it batches, so its use is
its speed against the best on its own curve, and unknown while that curve still rises. Stages of one host share its
cores: a role's busy time holds the time in which it waited for one, which is taken off here, and the cores are a stage
of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.monitor.snapshot import Role, Snapshot
from launch.monitor.stage_figures import Engine

ENGINES, SANDBOX, FILTER, BUFFER, LEARNER, SWAP = "engines", "sandbox", "filter", "buffer", "learner", "swap"
CORES, SLOTS, KV, TICKETS = "cores", "slots", "kv", "tickets"
MAX_CORE_WAIT = 0.8
"""share of a busy time that waiting for a core may be taken off; threads that are not on the critical path wait too"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Of one stage."""

    stage: str
    use: float | None
    """share of its capacity in use, 0..1"""
    groups_per_min: float | None
    """what it could do, if nothing else held it up; None when that is not known"""
    says: str
    """what the figure rests on"""


def capacities(snapshot: Snapshot) -> tuple[Capacity, ...]:
    """All stages, in the order of the work's way."""
    uses = (
        (ENGINES, *_engines(snapshot)),
        (SANDBOX, *_sandbox(snapshot)),
        (FILTER, *_busy(snapshot, "filter")),
        (BUFFER, *_busy(snapshot, "buffer")),
        (LEARNER, *_learner(snapshot)),
        (SWAP, *_swap(snapshot)),
        (CORES, *_cores(snapshot)),
        (SLOTS, *_slots(snapshot, kv=False)),
        (KV, *_slots(snapshot, kv=True)),
        (TICKETS, *_tickets(snapshot)),
    )
    rate = snapshot.rates.groups_trained_per_min
    return tuple(
        Capacity(stage=stage, use=use, groups_per_min=rate / use if rate and use else None, says=says)
        for stage, use, says in uses
    )


def mean_of(engines: tuple[Engine, ...], name: str) -> float | None:
    """Of the engines that tell it."""
    known = [getattr(engine, name) for engine in engines if getattr(engine, name) is not None]
    return sum(known) / len(known) if known else None


def _engines(snapshot: Snapshot) -> tuple[float | None, str]:
    """Together: their speed against the sum of what each could do."""
    engines = [
        engine for engine in snapshot.engines if engine.capacity_tokens_per_s and engine.tokens_per_s is not None
    ]
    if not engines:
        return None, "no curve is measured yet"
    best = sum((engine.capacity_tokens_per_s or 0.0) * (1.0 - (engine.paused or 0.0)) for engine in engines)
    speed = sum(engine.tokens_per_s or 0.0 for engine in engines)
    told = f"{speed:.0f} of {best:.0f} tokens/s"
    if all(engine.rising for engine in engines):
        top = max((engine.curve[-1].concurrency for engine in engines if engine.curve), default=0)
        return None, f"{speed:.0f} tokens/s, still rising at {top} at once"
    return min(1.0, speed / best) if best else None, told


def _sandbox(snapshot: Snapshot) -> tuple[float | None, str]:
    """By its queue: while calls wait for each worker, all workers are in use. Calls that sleep use none."""
    sandbox = snapshot.sandbox
    if sandbox is None or sandbox.run is None:
        return None, "no call was run"
    queue_s, run_s = (sandbox.queue.mean_s if sandbox.queue else 0.0), sandbox.run.mean_s
    use = min(1.0, max(sandbox.cpu_use or 0.0, sandbox.backlog or 0.0))
    told = (
        f"queue {queue_s:.2f} s, run {run_s:.2f} s, {sandbox.waiting or 0.0:.1f} waiting for {sandbox.workers} workers"
    )
    return use, told


def _of(snapshot: Snapshot, kind: str) -> list[Role]:
    return [role for role in snapshot.roles if role.role == kind and role.shares]


def _busy(snapshot: Snapshot, kind: str) -> tuple[float | None, str]:
    """Of a role with one thing to do at a time; for the buffer, waiting for its disk is work."""
    roles = _of(snapshot, kind)
    if not roles:
        return None, "no figures"
    states = ("busy", "blocked") if kind == "buffer" else ("busy",)
    uses = [_alone(role, sum(role.shares.get(state, 0.0) for state in states)) for role in roles]
    return sum(uses) / len(uses), f"busy {sum(uses) / len(uses):.0%}"


def _alone(role: Role, busy: float) -> float:
    """Without the time in which it had no core."""
    return busy - min(role.core_wait or 0.0, MAX_CORE_WAIT * busy)


def _learner(snapshot: Snapshot) -> tuple[float | None, str]:
    """Its slowest rank; publishing is work too."""
    ranks = _of(snapshot, "learner")
    if not ranks:
        return None, "no figures"
    use, share = 0.0, 0.0
    for role in ranks:
        going = 1.0 - role.shares.get("down", 0.0)
        busy = role.shares.get("busy", 0.0) + role.shares.get("sync", 0.0)
        if going > 0:
            use, share = max((use, share), (_alone(role, busy / going), busy / going))
    return use, f"busy {share:.0%}" + (f", {share - use:.0%} of it without a core" if share - use > 0.02 else "")


def _swap(snapshot: Snapshot) -> tuple[float | None, str]:
    """One version after the other: publishing, receiving, pausing."""
    swap, step_s = snapshot.swap, snapshot.run.step_s
    if swap is None or not swap.swaps or not step_s:
        return None, "no version was loaded"
    took_s = (swap.publish_s or 0.0) + (swap.receive_s or 0.0) + (swap.pause_s or 0.0)
    return min(1.0, took_s / step_s), f"{took_s:.2f} s per version, a step takes {step_s:.2f} s"


def _cores(snapshot: Snapshot) -> tuple[float | None, str]:
    """Of the fullest host that has a stage of the run."""
    if not snapshot.hosts:
        return None, "no figures"
    fullest = max(snapshot.hosts, key=lambda host: host.used / host.cores)
    others = fullest.used - fullest.run_used
    told = f"{fullest.used:.1f} of {fullest.cores} cores of {fullest.name}"
    return fullest.used / fullest.cores, told + (f", {others:.1f} of them by others" if others > 0.2 else "")


def _slots(snapshot: Snapshot, *, kv: bool) -> tuple[float | None, str]:
    """Share of the time in which engines took no rollout more: all slots in use, or the KV cache too small for them."""
    full = mean_of(snapshot.engines, "full")
    if full is None:
        return None, "no figures"
    held = mean_of(snapshot.engines, "held_when_full") or 0.0
    slots = max(1, snapshot.engines[0].slots)
    by_kv = held < 0.9 * slots
    told = f"full {full:.0%} of the time, with {held:.0f} of {slots} slots in use"
    return (full if by_kv == kv else 0.0), told


def _tickets(snapshot: Snapshot) -> tuple[float | None, str]:
    """Share of the time in which engines had room and nothing was left to lease."""
    tickets, full = snapshot.tickets, mean_of(snapshot.engines, "full")
    if tickets is None or full is None:
        return None, "no figures"
    active, waiting = tickets.active_mean or 0.0, tickets.waiting_mean or 0.0
    used_up = active >= 0.95 * tickets.bound and waiting < max(1.0, 0.1 * tickets.bound)
    return (1.0 - full if used_up else 0.0), f"{active:.0f} of {tickets.bound} active, {waiting:.1f} not leased yet"
