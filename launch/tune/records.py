"""What a run recorded, as the tuner needs it.

Consumes    RUN/recipe.toml, buffer/index.sqlite, the segments that are still there, metrics/*.jsonl
Produces    `Recorded`, over a window of steps: the newest ones, since the last dial was turned, without the first,
            in which the pipeline fills
Waits for   nothing but the disk; the index is only read, also while the run goes on
Invariant   rates, counts and CPU seconds are of one window; a run that is too short is refused with what it lacks
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config import ConfigError, read_toml, validate
from launch.monitor import parts
from launch.monitor.moments import Moments
from launch.monitor.readings import read_directory, tail
from launch.monitor.records import opened
from launch.monitor.spans import Span
from launch.tree import Recipe
from launch.tune.rows import decide_s, groups, rollout_rest_s, steps, swaps
from launch.tune.shapes import Machine, RatePoint, Recorded, Setting

MIN_STEPS = 6
"""in the window"""
MAX_STEPS = 60
BEFORE_S = 10.0
"""of metrics read before the window, so that each role has told something by its beginning"""
MAX_GROUPS = 600
"""whose work is drawn from: the newest"""
STAGES = ("rollout", "sandbox", "buffer", "filter", "learner")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """From the batch of step `first` to that of step `last`."""

    first: int
    last: int
    from_s: float
    to_s: float


def read(directory: Path) -> Recorded:
    """The run's newest steps.

    Raises:
        ConfigError: there is no run, or it has too few steps, or it kept none of its groups.
    """
    recipe_path = directory / "recipe.toml"
    if not recipe_path.is_file():
        raise ConfigError(f"{directory}: holds no run (no recipe.toml)")
    recipe = validate(Recipe, read_toml(recipe_path), str(recipe_path))
    with opened(directory) as db:
        dials = dict(db.execute("SELECT name, value FROM dials ORDER BY id").fetchall())
        setting = _setting(recipe, dials)
        window = _window(db, directory, setting.max_staleness)
        moments = _moments(directory, window)
        work = groups(db, directory, window.from_s, window.to_s, MAX_GROUPS)
        trained, mean_age = _trained(db, window)
        if not work or not trained:
            raise ConfigError(
                f"{directory}: steps {window.first} to {window.last} kept no group: there is nothing to fit"
            )
        figures = _figures(moments, window, setting)
        return Recorded(
            setting=setting,
            roc=recipe.roc,
            seed=recipe.run.seed,
            groups=work,
            steps=steps(db, window.first, window.last),
            swaps=swaps(db, window.first, window.last),
            groups_per_min=60.0 * trained / (window.to_s - window.from_s),
            mean_age=mean_age,
            rollout_rest_s=rollout_rest_s(db, window.from_s, window.to_s),
            decide_s=decide_s(db, window.from_s, window.to_s),
            engine_threads=recipe.rollout.cpu_threads,
            recomputes=recipe.weights.kv == "recompute",
            longest_tokens=max(turn.context_tokens for group in work for one in group.rollouts for turn in one.turns),
            **figures,
        )


def _setting(recipe: Recipe, dials: Mapping[str, float]) -> Setting:
    """As it is now, with turned dials put over the recipe."""
    return Setting(
        max_staleness=int(dials.get("staleness.max_staleness", recipe.staleness.max_staleness)),
        groups_per_step=recipe.groups.groups_per_step,
        group_size=recipe.groups.group_size,
        concurrency=int(dials.get("rollout.concurrency", recipe.rollout.concurrency)),
        engines=recipe.rollout.engines,
        ranks=recipe.learner.ranks,
    )


def _window(db: sqlite3.Connection, directory: Path, staleness: int) -> Window:
    """The newest steps that ran under the present dials, the pipeline being full."""
    taken = dict(db.execute("SELECT step, taken_unix_s FROM batches ORDER BY step"))
    turned = db.execute("SELECT coalesce(max(step), 0) FROM dials").fetchone()[0]
    last = max(taken, default=-1)
    first = max(turned + staleness + 1, last - MAX_STEPS)
    if last - first < MIN_STEPS:
        needed = turned + staleness + 1 + MIN_STEPS + 1
        raise ConfigError(
            f"{directory}: {last + 1} steps are on record, a fit needs {needed}: {MIN_STEPS} after the first "
            f"{turned + staleness + 1}, in which the pipeline fills; let the run go on to step {needed}"
        )
    return Window(first=first, last=last, from_s=taken[first], to_s=taken[last])


def _trained(db: sqlite3.Connection, window: Window) -> tuple[int, float]:
    """Groups of the window's steps, and the mean age of their tokens."""
    bounds = (window.first, window.last)
    rows = db.execute(
        "SELECT g.step, g.kept, t.rollout, t.version_runs FROM groups g JOIN turns t USING (group_id) "
        "WHERE g.kind = 'train' AND g.step >= ? AND g.step < ?",
        bounds,
    )
    tokens = aged = 0
    for step, kept, rollout, runs in rows:
        if rollout in json.loads(kept):
            for _, version, count in json.loads(runs):
                tokens += count
                aged += count * (step - version)
    found = db.execute(
        "SELECT count(*) FROM groups WHERE kind = 'train' AND step >= ? AND step < ?", bounds
    ).fetchone()[0]
    return int(found), aged / tokens if tokens else 0.0


def _moments(directory: Path, window: Window) -> Moments:
    """The readings inside."""
    newest_s = max((line["unix_s"] for line in tail(directory / "metrics" / "run.jsonl", 0.0)), default=window.to_s)
    history = read_directory(directory, newest_s - window.from_s + BEFORE_S)
    readings = [one for one in history.readings if window.from_s <= one.unix_s <= window.to_s]
    if len(readings) < 3:
        raise ConfigError(
            f"{directory}/metrics: {len(readings)} readings between steps {window.first} and {window.last}, a fit "
            "needs 3 (one is made each second): let the run go on"
        )
    return Moments(readings[0], readings[1:])


def _figures(moments: Moments, window: Window, setting: Setting) -> dict[str, Any]:
    """What metrics tell: CPU seconds by unit of work, engines' curves, machines."""
    engines = list(moments.of("rollout").values())
    span_s = moments.span_s
    tokens = sum(span.count("tokens_generated") for span in engines) or 1.0
    contexts, cached = (sum(span.count(key) for span in engines) for key in ("context_tokens", "context_tokens_cached"))
    calls = sum(span.count("calls") for span in moments.of("sandbox").values())
    per_step_s = (window.to_s - window.from_s) / (window.last - window.first)
    cpu = {kind: sum(span.usage("cpu_s") or 0.0 for span in moments.of(kind).values()) for kind in STAGES}
    return {
        "rates": _rates(engines),
        "computed_share": 1.0 - cached / contexts if contexts else 1.0,
        "token_cpu_s": cpu["rollout"] * span_s / tokens,
        "call_cpu_s": cpu["sandbox"] * span_s / calls if calls else 0.0,
        "store_token_cpu_s": (cpu["buffer"] + cpu["filter"]) * span_s / tokens,
        "step_cpu_s": cpu["learner"] * per_step_s / max(1, setting.ranks),
        "workers": int(sum(span.gauge("shards") or 0 for span in moments.of("sandbox").values())),
        "kv_tokens": int(min((span.gauge("kv_capacity_tokens") or 0 for span in engines), default=0)),
        **_machines(moments),
    }


def _rates(engines: list[Span]) -> tuple[RatePoint, ...]:
    """Of all engines together."""
    tokens: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for span in engines:
        for key, value in span.tails("rate_tokens@").items():
            tokens[int(key)] = tokens.get(int(key), 0.0) + value
        for key, value in span.tails("rate_s@").items():
            seconds[int(key)] = seconds.get(int(key), 0.0) + value
    return tuple(
        RatePoint(concurrency=at, token_s=seconds[at] / tokens[at], weight_s=seconds[at] / at)
        for at in sorted(tokens)
        if seconds.get(at)
    )


def _machines(moments: Moments) -> dict[str, Any]:
    """Hosts by name, and where each kind of role is; without figures of cores, as many as anybody wants."""
    hosts = parts.hosts(moments)
    names = [host.name for host in hosts]
    places = {}
    for kind in STAGES:
        for span in moments.of(kind).values():
            name = (span.now.get("usage") or {}).get("host")
            if name in names:
                places[kind] = names.index(name)
    machines = tuple(Machine(cores=host.cores, others=max(0.0, host.used - host.run_used)) for host in hosts)
    return {"machines": machines or (Machine(cores=1e6, others=0.0),), "places": places}
