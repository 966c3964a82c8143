"""What limits a run, and what to turn.

Consumes    a snapshot
Produces    `Advice`: a verdict that names the limit, capacities, at most three fixes
Waits for   nothing: pure
Invariant   a limit is named only when what comes before it is held up and what comes after it waits; two stages whose
            capacities are within a tenth are balanced; otherwise the verdict is "unclear" and says why. No fix is given
            without a limit

The stage with the least capacity limits. Engine slots, KV cache and tickets have no work of their own to be busy with:
they limit when they are used up while no stage is used to the full; also while only the cores are, if engines use most
of them and would make more tokens of them with more to do at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launch.monitor import capacities as stages
from launch.monitor.capacities import Capacity, capacities, mean_of
from launch.monitor.fixes import Fix, fixes
from launch.monitor.snapshot import Snapshot, read_record

BALANCED, UNCLEAR = "balanced", "unclear"
FULL = 0.85
"""use of a stage from which it may be the limit"""
USED_UP = 0.5
"""of the time, from which slots, KV cache or tickets may be"""
SWAP_LEADS = 0.4
"""use of the swap from which it, not the tickets, is named while engines and learner take turns"""
NEAR = 1.1
MOST = 0.5
"""of the cores that the run uses"""
WAITS = 0.05
"""share of the time from which a role counts as waiting"""
MIN_STEPS = 2
WORK = (stages.ENGINES, stages.SANDBOX, stages.FILTER, stages.BUFFER, stages.LEARNER, stages.SWAP, stages.CORES)
NAMES = {
    stages.ENGINES: "the engines limit",
    stages.SANDBOX: "the sandbox limits",
    stages.FILTER: "the RoC filter limits",
    stages.BUFFER: "the buffer limits",
    stages.LEARNER: "the learner limits",
    stages.SWAP: "the swap of weights limits",
    stages.CORES: "the cores limit",
    stages.SLOTS: "engine slots limit",
    stages.KV: "the KV cache limits",
    stages.TICKETS: "tickets limit",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to know in five seconds."""

    limit: str
    """a stage of capacities.py | balanced | unclear"""
    verdict: str
    """one line for people"""
    reasons: tuple[str, ...]
    """what the verdict rests on, or why it is unclear"""
    capacities: tuple[Capacity, ...]
    fixes: tuple[Fix, ...]
    """at most three, the best first"""


def advise(snapshot: Snapshot, against: Callable[[Snapshot, Fix], str] = lambda snapshot, fix: "") -> Advice:
    """The run's limit and what to do about it. `against` says what speaks against a fix: it is not given then."""
    found = capacities(snapshot)
    missing = _missing(snapshot)
    if missing:
        return _unclear(found, (missing,))
    known = {one.stage: one for one in found if one.use is not None}
    ranked = sorted((known[stage] for stage in WORK if stage in known), key=lambda one: -(one.use or 0.0))
    limit = _limit(snapshot, known, ranked)
    if limit is None:
        top = ", ".join(f"{one.stage} {one.use:.0%} in use" for one in ranked[:3])
        return _unclear(found, (f"nothing is used to the full: {top}",))
    doubts = _doubts(snapshot, limit.stage)
    if doubts:
        return _unclear(found, (f"{limit.stage} is {limit.use:.0%} in use ({limit.says})", *doubts))
    rival = _rival(limit, ranked)
    given = tuple(fix for fix in fixes(snapshot, limit, found, rival) if not against(snapshot, fix))
    if rival is not None:
        return Advice(
            limit=BALANCED,
            verdict=f"balanced: {limit.stage} and {rival.stage} could do {_cap(limit)} and {_cap(rival)} groups/min",
            reasons=(f"{limit.stage}: {limit.says}", f"{rival.stage}: {rival.says}"),
            capacities=found,
            fixes=given,
        )
    return Advice(
        limit=limit.stage,
        verdict=_verdict(snapshot, limit, ranked),
        reasons=(limit.says,),
        capacities=found,
        fixes=given,
    )


def to_json(advice: Advice) -> Mapping[str, Any]:
    """Plain types."""
    return asdict(advice)


def _unclear(found: tuple[Capacity, ...], reasons: tuple[str, ...]) -> Advice:
    return Advice(limit=UNCLEAR, verdict=f"unclear: {reasons[0]}", reasons=reasons, capacities=found, fixes=())


def _cap(one: Capacity) -> str:
    return "?" if one.groups_per_min is None else f"{one.groups_per_min:.0f}"


def _missing(snapshot: Snapshot) -> str:
    """What keeps the evidence from being any."""
    if snapshot.run.state == "evaluating" and snapshot.run.phase != "train":
        return "an evaluation goes on, nothing is trained meanwhile"
    if not snapshot.roles:
        return "there are no figures"
    absent = [role for role in snapshot.roles if role.shares.get("down", 0.0) > 0.5 or role.state in ("dead", "failed")]
    if absent and snapshot.run.state == "running":
        told = f", it waits for {absent[0].waits_for}" if absent[0].waits_for else ""
        return f"{absent[0].name} was not there most of the time{told}"
    steps = snapshot.learner.steps if snapshot.learner is not None else 0
    if not snapshot.rates.groups_trained_per_min or steps < MIN_STEPS:
        return f"{steps} learner steps in the window ({snapshot.window.what}), {MIN_STEPS} are needed"
    return ""


def _limit(snapshot: Snapshot, known: Mapping[str, Capacity], ranked: list[Capacity]) -> Capacity | None:
    """The candidate; `ranked` are the stages that work, the most used first."""
    first = ranked[0] if ranked else None
    if first is not None and (first.use or 0.0) >= FULL:
        room = _used_up(known, FULL) if first.stage == stages.CORES and _rises(snapshot) else None
        return room or first
    room = _used_up(known, USED_UP)
    leads = first is not None and first.stage == stages.SWAP and (first.use or 0.0) >= SWAP_LEADS
    return first if leads and room is not None and room.stage == stages.TICKETS else room


def _used_up(known: Mapping[str, Capacity], share: float) -> Capacity | None:
    """What has no more to give for so much of the time: slots, KV cache or tickets."""
    some = (known[stage] for stage in (stages.SLOTS, stages.KV, stages.TICKETS) if stage in known)
    return next((one for one in some if (one.use or 0.0) >= share), None)


def _rises(snapshot: Snapshot) -> bool:
    """Engines, which use most of the cores, would make more tokens of them, had they more to do at once."""
    used = sum(role.cores_used or 0.0 for role in snapshot.roles)
    theirs = sum(role.cores_used or 0.0 for role in snapshot.roles if role.role == "rollout")
    return bool(snapshot.engines) and all(engine.rising for engine in snapshot.engines) and theirs >= MOST * used


def _rival(limit: Capacity, ranked: list[Capacity]) -> Capacity | None:
    """A second stage that could do hardly more."""
    if limit not in ranked:
        return None
    others = [one for one in ranked if one is not limit and one.groups_per_min is not None]
    least = min(others, key=lambda one: one.groups_per_min or 0.0, default=None)
    if least is None or limit.groups_per_min is None or least.groups_per_min is None:
        return None
    return least if least.groups_per_min <= NEAR * limit.groups_per_min else None


def _doubts(snapshot: Snapshot, stage: str) -> tuple[str, ...]:
    """What a limit there would show, and does not."""
    starved = _learner_waits(snapshot)
    tickets, full = snapshot.tickets, mean_of(snapshot.engines, "full") or 0.0
    held_up = tickets is not None and (tickets.finished_mean or 0.0) + (tickets.active_mean or 0.0) >= tickets.bound - 1
    out = []
    if stage in (stages.LEARNER, stages.BUFFER):
        if not held_up:
            out.append("tickets are left, so that nothing before it is held up")
    elif stage != stages.CORES and starved < WAITS:
        out.append(f"the learner waits only {starved:.0%} of its time")
    if stage == stages.ENGINES and full < WAITS and (tickets is None or (tickets.waiting_mean or 0.0) < 1):
        out.append("engines have room, and no group waits for it")
    return tuple(out)


def _learner_waits(snapshot: Snapshot) -> float:
    """Share of rank 0's time."""
    return next((role.shares.get("starved", 0.0) for role in snapshot.roles if role.name == "learner-0"), 0.0)


def _verdict(snapshot: Snapshot, limit: Capacity, ranked: list[Capacity]) -> str:
    rate = snapshot.rates.groups_trained_per_min or 0.0
    words = f"{NAMES[limit.stage]} at {rate:.0f} groups/min ({limit.says})"
    if limit.stage != stages.LEARNER:
        words += f"; learner starved {_learner_waits(snapshot):.0%}"
    later = [one for one in ranked if one.stage != limit.stage and one.groups_per_min is not None]
    if later:
        following = min(later, key=lambda one: one.groups_per_min or 0.0)
        words += f"; next: {following.stage} at {_cap(following)}"
    return words


def from_json(plain: Mapping[str, Any]) -> Advice:
    """The advice that was written."""
    return read_record(Advice, plain)
