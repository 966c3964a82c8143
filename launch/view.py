"""What a glance at a run should tell, out of two of the buffer's statuses.

Consumes    a status now and one of a little earlier, with their times
Produces    `View`: rates, shares, and a line per role
Waits for   nothing: pure functions
Invariant   a rate is a difference of cumulative counters over the time between, never negative; what is not known is
            None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.monitor.spans import Span
from sandbox.api import Status, is_failure, is_infra


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLine:
    """One role."""

    name: str
    state: str
    does: str
    """what it waits for, or how its time went lately"""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The screen's content."""

    phase: str
    step: int
    """steps whose batch is on record"""
    steps: int
    version: int
    """least version that live engines have loaded"""
    groups_per_min: float | None
    """decided by RoC: kept or dropped"""
    rollouts_per_s: float | None
    tokens_per_s: float | None
    reward: float | None
    """mean over the rollouts finished lately"""
    tool_error: float | None
    """failed calls / calls, lately"""
    dropped: float | None
    """share of lately decided groups"""
    age_mean: float | None
    """over all tokens taken"""
    age_max: float
    max_staleness: int
    tickets: str
    evaluated: str
    roles: tuple[RoleLine, ...]


def view(now: Mapping[str, Any], before: Mapping[str, Any], span_s: float, states: Mapping[str, str]) -> View:
    """`states` are the roles' as the driver knows them; `now` is {} before the buffer has answered."""
    counters = Span(before.get("buffer", {}), now.get("buffer", {}))
    finished, reward = counters.count("rollouts_finished/train"), counters.count("reward/train")
    kept, dropped = counters.count("groups_kept"), counters.total("groups_dropped/")
    calls = {Status(status): number for status, number in counters.tails("calls/train/").items()}
    counted = sum(number for status, number in calls.items() if not is_infra(status))
    failed = sum(number for status, number in calls.items() if is_failure(status))
    age = now.get("ages", {}).get("total", {})
    return View(
        phase=now.get("phase", "starting"),
        step=now.get("next_step", 0),
        steps=now.get("steps", 0),
        version=now.get("acked", 0),
        groups_per_min=_over((kept + dropped) * 60, span_s),
        rollouts_per_s=_over(counters.total("rollouts_finished/"), span_s),
        tokens_per_s=_over(counters.count("tokens_generated"), span_s),
        reward=_over(reward, finished),
        tool_error=_over(failed, counted),
        dropped=_over(dropped, kept + dropped),
        age_mean=age.get("mean") if age.get("num_tokens") else None,
        age_max=now.get("ages", {}).get("max", 0),
        max_staleness=now.get("max_staleness", 0),
        tickets=_tickets(now),
        evaluated=_evaluated(now),
        roles=tuple(_role(name, state, now, before) for name, state in states.items()),
    )


def _over(amount: float, by: float) -> float | None:
    return amount / by if by else None


def _tickets(now: Mapping[str, Any]) -> str:
    tickets = now.get("tickets")
    if not tickets:
        return ""
    waits = f", waits for {tickets['waits_for']}" if tickets["waits_for"] else ""
    return f"{tickets['active']} of {tickets['bound']} active{waits}"


def _evaluated(now: Mapping[str, Any]) -> str:
    """While an evaluation goes on: how many of its rollouts have ended."""
    if now.get("state") != "evaluating":
        return ""
    done = now["buffer"]["counters"].get(f"rollouts_finished/eval_{now['phase']}", 0)
    return f"{done:.0f} held-out rollouts evaluated"


def _role(name: str, state: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> RoleLine:
    snapshot = snapshot_of(now, name)
    if state != "running" or not snapshot:
        return RoleLine(name=name, state=state, does="")
    clock, earlier = snapshot.get("clock", {}), snapshot_of(before, name).get("clock", {})
    if sum(clock.values()) < sum(earlier.values()):  # another life
        earlier = {}
    spent = {key: seconds - earlier.get(key, 0.0) for key, seconds in clock.items()}
    total = sum(spent.values())
    shares = " ".join(
        f"{key} {100 * value / total:.0f}%" for key, value in spent.items() if total and value > 0.005 * total
    )
    waits = f"waits for {snapshot['waits_for']}" if snapshot.get("waits_for") else ""
    return RoleLine(name=name, state=state, does=", ".join(part for part in (shares, waits) if part))


def snapshot_of(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The role's own figures, {} when there are none yet."""
    if name == "buffer-0":
        return status.get("buffer", {})
    return status.get("peers", {}).get(name, {}).get("snapshot") or {}


def snapshots(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of all roles that have any."""
    names = ["buffer-0", *status.get("peers", {})]
    return {name: dict(snapshot) for name in names if (snapshot := snapshot_of(status, name))}
