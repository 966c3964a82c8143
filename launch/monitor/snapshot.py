"""The one snapshot of a run that every reader shares: screen, page, JSON, advisor, tuner.

Produces    `Snapshot`, a frozen tree of plain values; `to_json` and `from_json`
Waits for   nothing
Invariant   a figure that is not known is None, never 0; shares of a clock sum to 1; rates are differences of cumulative
            counters over the window; a field that changes its meaning raises SCHEMA

All rates and shares are over `window`; `trend` is over the run's last half hour. Units are in the names.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from launch.monitor.stage_figures import Engine, Learner, Sandbox, Store, Swap

SCHEMA = 1
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Where the run stands."""

    name: str
    state: str
    """empty (no figures yet) | running | evaluating | done | reached | failed | interrupted | stopped (nobody drives it
    and it left no summary)"""
    reason: str
    """how it ended, in the driver's words"""
    phase: str
    step: int
    """steps whose batch is on record"""
    steps: int
    """the goal"""
    acked: int
    """least version that live engines have loaded"""
    published: int
    wall_s: float | None
    """since the first figure of the life at hand"""
    step_s: float | None
    """of wall time per learner step"""
    eta_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What the rates are over."""

    span_s: float
    ends_unix_s: float | None
    what: str
    """last SECONDS s | all of training | the given seconds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One role's process tree."""

    name: str
    role: str
    state: str
    """alive | dead | gone | failed, as the buffer last saw it"""
    error: str
    waits_for: str
    lives: int
    """starts so far"""
    heartbeat_age_s: float | None
    shares: Mapping[str, float]
    """of its clock {busy, starved, blocked, sync, down}; {} for a sandbox node, which serves many at once"""
    cores_used: float | None
    """CPU seconds of its processes per second"""
    core_wait: float | None
    """seconds per second in which its threads could have run but had no core, summed over threads"""
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine that roles share."""

    name: str
    cores: int
    run_used: float
    """cores that this run's roles use"""
    used: float
    """cores in use by anybody, at most `cores`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tickets:
    """Permissions for groups: at most bound = (S + 1) P are active."""

    bound: int
    active: int
    active_mean: float | None
    by_state: Mapping[str, int]
    """waiting | leased | finished | taken, now"""
    waiting_mean: float | None
    finished_mean: float | None
    waits_for: str
    """why no ticket can be issued; "" when one can"""
    batch_waits_for: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """Ages of tokens when they are trained, in learner steps."""

    max_staleness: int
    mean: float | None
    in_flight: float | None
    in_queue: float | None
    max: int
    """over the whole run"""
    histogram: Mapping[str, int]
    """age -> tokens taken; ages of 16 and more are one"""
    mixed_turns: float | None
    """share of turns that more than one version sampled"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Useful:
    """What of the work is trained."""

    groups: int
    """decided by RoC or closed without it"""
    kept: float | None
    """share of them"""
    dropped: Mapping[str, float]
    """share of them by reason"""
    tokens_generated: int
    tokens_trained: int
    tokens_per_trained_group: float | None
    """generated, everything that was dropped included"""
    tool_wait: float | None
    """share of its life that a rollout waits for the sandbox"""
    tool_error: float | None
    """failed calls / calls, infrastructure apart"""
    reward: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Per unit of time, over the window."""

    groups_decided_per_min: float | None
    groups_trained_per_min: float | None
    """taken for a step: the run's throughput"""
    rollouts_per_s: float | None
    calls_per_s: float | None
    tokens_generated_per_s: float | None
    tokens_trained_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A figure over time."""

    name: str
    unit: str
    values: tuple[float, ...]
    """oldest first, evenly spaced by step; at most 60"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """Something to look at."""

    level: str
    """info | warn | error"""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """A setting turned while the run goes on."""

    name: str
    value: float
    step: int
    """first step it holds for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Everything."""

    schema: int
    run: Run
    window: Window
    rates: Rates
    roles: tuple[Role, ...]
    hosts: tuple[Host, ...]
    tickets: Tickets | None
    staleness: Staleness | None
    useful: Useful | None
    engines: tuple[Engine, ...]
    sandbox: Sandbox | None
    learner: Learner | None
    swap: Swap | None
    store: Store | None
    trend: tuple[Series, ...]
    alerts: tuple[Alert, ...]
    dials: tuple[Dial, ...]
    settings: Mapping[str, Any]
    """the recipe's, with turned dials put over it, by dotted name"""


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Plain types."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(snapshot)))
    return plain


def from_json(plain: Mapping[str, Any]) -> Snapshot:
    """The snapshot that was written.

    Raises:
        ValueError: another schema.
    """
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"schema {plain.get('schema')} of the snapshot is not {SCHEMA}: use the release that wrote it")
    return read_record(Snapshot, plain)


def read_record(kind: type[_T], plain: Mapping[str, Any]) -> _T:
    """A frozen dataclass from its plain fields; what else there is, is passed over."""
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{field.name: _value(hints[field.name], plain[field.name]) for field in fields(kind)})  # type: ignore[arg-type]


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, plain: Any) -> Any:
    if get_origin(kind) is types.UnionType:
        return None if plain is None else _value(get_args(kind)[0], plain)
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], item) for item in plain)
    if isinstance(kind, type) and is_dataclass(kind):
        return read_record(kind, plain)
    return plain
