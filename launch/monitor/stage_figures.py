"""The snapshot's records of one stage each: engines, sandbox, learner, swap, store.

Produces    frozen records, parts of `Snapshot`; their units are in their names
Imports     the standard library only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """An engine's measured speed while about so many generations ran."""

    concurrency: int
    tokens_per_s: float
    seconds: float
    """of generation it was measured over, divided by the concurrency"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One rollout actor."""

    name: str
    version: int | None
    slots: int
    """rollout.concurrency"""
    held: float | None
    """rollouts in hand, mean"""
    generating: float | None
    """generations at once, mean"""
    full: float | None
    """share of the time in which no rollout more had room"""
    held_when_full: float | None
    """rollouts in hand at those times, mean: fewer than `slots` where the KV cache is what is full"""
    waiting: float | None
    """requests that the engine itself queues, mean"""
    kv_use: float | None
    """share of the KV cache in use, mean"""
    tokens_per_s: float | None
    starved: float | None
    """share of the time without any rollout"""
    paused: float | None
    """share of the time in which it loads weights"""
    curve: tuple[CurvePoint, ...]
    """over this life, by concurrency"""
    capacity_tokens_per_s: float | None
    """best on its curve"""
    capacity_now_tokens_per_s: float | None
    """on its curve at the present concurrency"""
    rising: bool
    """the curve still rises by a tenth or more from its middle to its highest concurrency"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """A distribution of seconds."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """All sandbox nodes together."""

    nodes: int
    workers: int
    waiting: float | None
    """calls queued, mean"""
    backlog: float | None
    """share of the time in which at least as many calls waited as there are workers"""
    calls_per_s: float | None
    queue: Times | None
    """wait of a call before it ran, as rollouts saw it"""
    run: Times | None
    cpu_use: float | None
    """CPU seconds of guests per second and worker"""
    timeouts: float | None
    """share of calls"""
    refused: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """Rank 0; the others are alike."""

    ranks: int
    steps: int
    """in the window"""
    parts_s: Mapping[str, float]
    """seconds per step: wait (for a batch), fetch, train, checkpoint, publish, other"""
    train: Times | None
    tokens_per_s: float | None
    """while it trains"""
    figures: Mapping[str, float]
    """of the newest step: loss, ratio_mean, clipped_share, entropy, lr, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """From a trained version to engines that use it."""

    swaps: int
    publish_s: float | None
    """per step, at the learner"""
    receive_s: float | None
    """per swap, at an engine, while it generates"""
    pause_s: float | None
    """per swap, of an engine that does not generate for it"""
    paused: float | None
    """share of the engines' time"""
    lag_steps: float | None
    """published minus acknowledged version, mean"""
    lag: Times | None
    """from a publication until all live engines had it"""
    slowest: str
    """engine with the oldest version, when it is behind"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The buffer's disk and the RoC filter."""

    commit: Times | None
    disk_wait: float | None
    """share of the buffer's time"""
    mib_per_s: float | None
    refused: Mapping[str, int]
    """requests by reason"""
