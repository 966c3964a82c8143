"""The snapshot's parts that tell of one stage each: engines, sandbox, learner, the swap of weights, the store.

Consumes    the window's moments; settings; the learner's steps
Produces    parts of the snapshot
Waits for   nothing: pure
Invariant   an engine's capacity is read from its own curve, never from busy time: an engine batches
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from launch.monitor.moments import Moments
from launch.monitor.spans import Span, mean, merged, over
from launch.monitor.stage_figures import CurvePoint, Engine, Learner, Sandbox, Store, Swap

MIN_CURVE_S = 0.5
"""a point measured over less says nothing"""
RISING = 1.1
NO_FIGURES = ("step", "time_s", "step_s", "train_s", "recomputed", "ages")
"""of a line of metrics/steps.jsonl: shown elsewhere, or no figure of the loss"""


def engines(moments: Moments, settings: Mapping[str, Any]) -> tuple[Engine, ...]:
    """By name."""
    slots = int(settings.get("rollout.concurrency", 0))
    return tuple(_engine(name, span, moments, slots) for name, span in sorted(moments.of("rollout").items()))


def _engine(name: str, span: Span, moments: Moments, slots: int) -> Engine:
    points = curve(span.now)
    generating = over(span.total("rate_s@"), span.seconds)
    best = max((point.tokens_per_s for point in points), default=None)
    capacity, used = span.gauge("kv_capacity_tokens"), moments.gauges(name, "kv_tokens")
    shares = span.shares()
    version = (moments.now.standing.get("peers") or {}).get(name, {}).get("loaded_version")
    return Engine(
        name=name,
        version=version if version is not None and version >= 0 else None,
        slots=slots,
        held=moments.gauges(name, "rollouts"),
        generating=generating,
        full=moments.share(name, "room", 0),
        held_when_full=moments.gauges_while(name, "rollouts", "room", 0),
        waiting=moments.gauges(name, "requests_waiting"),
        kv_use=over(used, capacity),
        tokens_per_s=span.rate("tokens_generated"),
        starved=shares.get("starved"),
        paused=shares.get("sync"),
        curve=points,
        capacity_tokens_per_s=best,
        capacity_now_tokens_per_s=interpolate(points, generating) if generating else None,
        rising=_rising(points),
    )


def curve(snapshot: Mapping[str, Any]) -> tuple[CurvePoint, ...]:
    """Tokens per second against generations at once, as measured over this life (actors/rollout_figures.py)."""
    counters = snapshot.get("counters", {})
    points = []
    for key, tokens in counters.items():
        if key.startswith("rate_tokens@"):
            concurrency = int(key.partition("@")[2])
            generated_s = counters.get(f"rate_s@{concurrency}", 0.0)
            if generated_s / concurrency >= MIN_CURVE_S:
                points.append(
                    CurvePoint(
                        concurrency=concurrency,
                        tokens_per_s=concurrency * tokens / generated_s,
                        seconds=generated_s / concurrency,
                    )
                )
    return tuple(sorted(points, key=lambda point: point.concurrency))


def interpolate(points: Sequence[CurvePoint], concurrency: float) -> float | None:
    """The curve's value there; beyond its ends, what it has at them (below: in proportion)."""
    if not points:
        return None
    if concurrency <= points[0].concurrency:
        return points[0].tokens_per_s * concurrency / points[0].concurrency
    for low, high in pairwise(points):
        if concurrency <= high.concurrency:
            share = (concurrency - low.concurrency) / (high.concurrency - low.concurrency)
            return low.tokens_per_s + share * (high.tokens_per_s - low.tokens_per_s)
    return points[-1].tokens_per_s


def _rising(points: Sequence[CurvePoint]) -> bool:
    """Whether twice as many generations at once still made more tokens, at the curve's upper end."""
    if not points:
        return True
    top = points[-1]
    half = interpolate(points, top.concurrency / 2)
    return len(points) < 2 or half is None or top.tokens_per_s > RISING * half


def sandbox(moments: Moments) -> Sandbox | None:
    """All nodes; None before one has told figures."""
    nodes = moments.of("sandbox")
    if not nodes:
        return None
    rollouts = moments.of("rollout").values()
    queue = merged([span.spread("tool_queue_s") for span in rollouts])
    running = merged([span.spread("tool_run_s") for span in rollouts])
    workers = int(sum(span.gauge("shards") or 0 for span in nodes.values()))
    seconds = max((span.seconds for span in nodes.values()), default=0.0)
    calls = sum(span.count("calls") for span in nodes.values())
    timeouts = sum(span.count("status/timeout") for span in nodes.values())
    return Sandbox(
        nodes=len(nodes),
        workers=workers,
        waiting=_sum([moments.gauges(name, "waiting") for name in nodes]),
        backlog=mean([moments.share_at_least(name, "waiting", "shards") for name in nodes]),
        calls_per_s=over(calls, seconds),
        queue=queue.times(),
        run=running.times(),
        cpu_use=over(over(sum(span.count("cpu_s") for span in nodes.values()), seconds), workers),
        timeouts=over(timeouts, calls),
        refused=int(sum(span.count("refused") for span in nodes.values())),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def learner(moments: Moments, steps: Sequence[Mapping[str, Any]]) -> Learner | None:
    """Rank 0; None before it has told figures."""
    ranks = moments.of("learner")
    span = ranks.get("learner-0")
    if span is None:
        return None
    train, fetch = span.spread("train_s"), span.spread("fetch_s")
    last = steps[-1] if steps else {}
    figures = {key: float(value) for key, value in last.items() if key not in NO_FIGURES and value is not None}
    return Learner(
        ranks=len(ranks),
        steps=int(train.count),
        parts_s=_step_parts(span, train.count),
        train=train.times(),
        tokens_per_s=over(span.count("tokens_trained"), train.total + fetch.total),
        figures=figures,
    )


def _step_parts(span: Span, num_steps: float) -> dict[str, float]:
    """Where the time of a step goes; the clock's starved time holds the fetching too."""
    if not num_steps:
        return {}
    seconds = {state: share * span.seconds for state, share in span.shares().items()}
    fetch_s, train_s = span.spread("fetch_s").total, span.spread("train_s").total
    checkpoint_s, publish_s = span.spread("checkpoint_s").total, span.spread("publish_s").total
    wait_s = max(0.0, seconds.get("starved", 0.0) - fetch_s)
    known_s = fetch_s + train_s + checkpoint_s + publish_s + wait_s
    parts = {"wait": wait_s, "fetch": fetch_s, "train": train_s, "checkpoint": checkpoint_s, "publish": publish_s}
    parts["other"] = max(0.0, sum(seconds.values()) - known_s)
    return {name: value / num_steps for name, value in parts.items()}


def swap(moments: Moments) -> Swap | None:
    """None before a version was loaded."""
    rollouts = moments.of("rollout")
    if not rollouts:
        return None
    pauses = merged([span.spread("pause_s") for span in rollouts.values()])
    receives = merged([span.spread("receive_s") for span in rollouts.values()])
    published = moments.standing("published", "version")
    acked = moments.standing("acked")
    lags = [new - old for new, old in zip(published, acked, strict=True) if new is not None and old is not None]
    learner_span = moments.spans.get("learner-0", Span({}, {}))
    return Swap(
        swaps=int(pauses.count),
        publish_s=learner_span.spread("publish_s").mean,
        receive_s=receives.mean,
        pause_s=pauses.mean,
        paused=mean([span.shares().get("sync") for span in rollouts.values()]),
        lag_steps=mean([max(0, lag) for lag in lags]),
        lag=moments.buffer.spread("publish_lag_s").times(),
        slowest=_slowest(moments),
    )


def _slowest(moments: Moments) -> str:
    peers = moments.now.standing.get("peers") or {}
    newest = (moments.now.standing.get("published") or {}).get("version", -1)
    loaded = {name: peer.get("loaded_version") for name, peer in peers.items() if peer.get("role") == "rollout"}
    behind = {name: version for name, version in loaded.items() if version is not None and version < newest}
    return min(behind, key=lambda name: (behind[name], name)) if behind else ""


def store(moments: Moments) -> Store:
    """The buffer's own figures."""
    span = moments.buffer
    payload = span.rate("payload_bytes")
    return Store(
        commit=span.spread("commit_s").times(),
        disk_wait=span.shares().get("blocked"),
        mib_per_s=None if payload is None else payload / (1 << 20),
        refused={reason: int(number) for reason, number in span.tails("refused/").items()},
    )
