"""From moments of a run to its snapshot.

Consumes    a history (launch/monitor/readings.py), the run's settings, how wide the window is
Produces    `Snapshot`
Waits for   nothing: pure; the newest reading's time is the only "now"
Invariant   the same history gives the same snapshot, whether it came from files or from statuses of a live buffer

The window: of a live run its last `window_s` seconds; of one that is over, all of its training. Training begins with
the first engine's first version: what a run does before, and after, is starting and evaluating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launch.monitor import parts, stages
from launch.monitor.alerts import alerts
from launch.monitor.moments import Moments
from launch.monitor.readings import History, Reading
from launch.monitor.snapshot import SCHEMA, Dial, Rates, Run, Snapshot, Window
from launch.monitor.spans import over
from launch.monitor.trend import trend

WINDOW_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the figures do not tell."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """of the recipe, by dotted name"""


def measure(history: History, facts: Facts, window_s: float | None = None) -> Snapshot:
    """The run as it is, or was when it ended."""
    if not history.readings:
        return _empty(history, facts)
    moments = _window(history, window_s)
    standing = moments.now.standing
    dials = tuple(Dial(**dial) for dial in standing.get("dials", ()))
    settings = {**facts.settings, **{dial.name: _as(facts.settings.get(dial.name), dial.value) for dial in dials}}
    settings |= {"staleness.max_staleness": standing.get("max_staleness", 0)}
    snapshot = Snapshot(
        schema=SCHEMA,
        run=_run(history, facts, moments),
        window=_told(history, moments, window_s),
        rates=_rates(moments),
        roles=parts.roles(moments),
        hosts=parts.hosts(moments),
        tickets=parts.tickets(moments),
        staleness=parts.staleness(moments),
        useful=parts.useful(moments),
        engines=stages.engines(moments, settings),
        sandbox=stages.sandbox(moments),
        learner=stages.learner(moments, history.steps),
        swap=stages.swap(moments),
        store=stages.store(moments),
        trend=trend(history.steps),
        alerts=(),
        dials=dials,
        settings=settings,
    )
    return replace(snapshot, alerts=alerts(snapshot))


def _as(known: Any, value: float) -> float | int:
    return int(value) if isinstance(known, int) and not isinstance(known, bool) else value


def _empty(history: History, facts: Facts) -> Snapshot:
    ended = history.summary
    run = Run(
        name=facts.name,
        state="running" if history.live else ended.get("outcome", "empty"),
        reason=ended.get("reason", ""),
        phase="",
        step=0,
        steps=int(facts.settings.get("run.steps", 0)),
        acked=0,
        published=-1,
        wall_s=None,
        step_s=None,
        eta_s=None,
    )
    return Snapshot(
        schema=SCHEMA,
        run=run,
        window=Window(span_s=0.0, ends_unix_s=None, what="nothing"),
        rates=Rates(**dict.fromkeys(Rates.__dataclass_fields__)),
        roles=(),
        hosts=(),
        tickets=None,
        staleness=None,
        useful=None,
        engines=(),
        sandbox=None,
        learner=None,
        swap=None,
        store=None,
        trend=trend(history.steps),
        alerts=(),
        dials=(),
        settings=dict(facts.settings),
    )


def _window(history: History, window_s: float | None) -> Moments:
    readings = history.readings
    trained = [index for index, reading in enumerate(readings) if _trains(reading)]
    if trained and (not history.live or _trains(readings[-1])):  # what came before and after would only dilute it
        readings = readings[trained[0] : trained[-1] + 1]
    if window_s is None and not history.live:
        return Moments(readings[0] if len(readings) > 1 else None, readings[min(1, len(readings) - 1) :])
    from_s = readings[-1].unix_s - (window_s or WINDOW_S)
    inside = [reading for reading in readings if reading.unix_s > from_s]
    before = [reading for reading in readings if reading.unix_s <= from_s]
    if before:
        return Moments(before[-1], inside)
    return Moments(inside[0] if len(inside) > 1 else None, inside[min(1, len(inside) - 1) :])


def _trains(reading: Reading) -> bool:
    """Training has begun, i.e. an engine has a version, and is not over."""
    peers = reading.standing.get("peers") or {}
    loaded = [peer.get("loaded_version") for peer in peers.values() if peer.get("role") == "rollout"]
    return reading.standing.get("phase") == "train" and any(version is not None and version >= 0 for version in loaded)


def _told(history: History, moments: Moments, window_s: float | None) -> Window:
    what = f"last {moments.span_s:.0f} s" if history.live or window_s else "all of training"
    return Window(span_s=moments.span_s, ends_unix_s=moments.now.unix_s, what=what)


def _run(history: History, facts: Facts, moments: Moments) -> Run:
    newest = history.readings[-1].standing
    state, ended = newest.get("state", "running"), history.summary
    if not history.live:
        state = ended.get("outcome") or ("done" if newest.get("phase") == "done" else "stopped")
    step, steps = newest.get("next_step", 0), newest.get("steps", 0)
    taken = moments.buffer.count("groups_taken") / max(1, facts.settings.get("groups.groups_per_step", 1))
    step_s = over(moments.span_s, taken)
    going = history.live and newest.get("phase") == "train"
    return Run(
        name=facts.name,
        state=state,
        reason=ended.get("reason", "") if not history.live else "",
        phase=newest.get("phase", ""),
        step=step,
        steps=steps,
        acked=newest.get("acked", 0),
        published=(newest.get("published") or {}).get("version", -1),
        wall_s=history.readings[-1].roles.get("buffer-0", {}).get("wall_s"),
        step_s=step_s,
        eta_s=step_s * (steps - step) if going and step_s is not None else None,
    )


def _rates(moments: Moments) -> Rates:
    buffer, span_s = moments.buffer, moments.buffer.seconds
    decided = buffer.count("groups_kept") + buffer.total("groups_dropped/")
    return Rates(
        groups_decided_per_min=over(60 * decided, span_s),
        groups_trained_per_min=over(60 * buffer.count("groups_taken"), span_s),
        rollouts_per_s=over(buffer.count("rollouts_finished/train"), span_s),
        calls_per_s=over(buffer.total("calls/train/"), span_s),
        tokens_generated_per_s=buffer.rate("tokens_generated"),
        tokens_trained_per_s=buffer.rate("tokens_taken"),
    )
