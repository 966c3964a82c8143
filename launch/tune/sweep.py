"""Settings to try, what they come to, and the one to take.

Consumes    a model, a bound on the mean age
Produces    rows (setting, outcome), the frontier of throughput and age, a recommendation
Waits for   simulations, one a setting
Invariant   all settings meet the same groups; what is recommended keeps P and G, whose change would make "a group" or
            "a step" something else, and has no more engines and ranks together than the run had
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launch.config import ConfigError
from launch.tune.model import simulate
from launch.tune.shapes import GroupWork, Model, Outcome, Setting

STALENESS = (0, 1, 2, 4, 8)
BUDGET_ROLLOUTS = 8000
"""of one simulation: so many that a mean moves by a percent or two"""
MIN_STEPS, MAX_STEPS = 8, 60
AS_GOOD = 0.98
"""of the best throughput: among settings from here on the freshest is taken"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting and what it would do."""

    setting: Setting
    outcome: Outcome

    @property
    def rate(self) -> float:
        return self.outcome.groups_per_min


def predict(model: Model, setting: Setting, seed: int = 0) -> Outcome:
    """Over as many steps as the budget of rollouts allows, after the pipeline has filled."""
    kept = sum(_mixed(group) for group in model.work.groups) / len(model.work.groups)
    generated = setting.groups_per_step * setting.group_size * (1 if model.work.roc.mode == "off" else 2)
    steps = int(BUDGET_ROLLOUTS * max(kept, 0.05) / generated)
    steps = min(MAX_STEPS, max(MIN_STEPS, steps, 2 * setting.max_staleness))
    return simulate(model, setting, steps=steps, warmup=setting.max_staleness + 3, seed=seed)


def _mixed(group: GroupWork) -> bool:
    return len({one.finish.reward for one in group.rollouts}) > 1


def candidates(model: Model) -> list[Setting]:
    """S against concurrency; then P, G and the split between engines and learner, one at a time."""
    now = model.work.setting
    out = [
        replace(now, max_staleness=staleness, concurrency=concurrency)
        for staleness in sorted({*STALENESS, now.max_staleness})
        for concurrency in sorted({max(1, now.concurrency // 2), now.concurrency, 2 * now.concurrency})
    ]
    out += [replace(now, groups_per_step=size) for size in (now.groups_per_step // 2, 2 * now.groups_per_step) if size]
    least = 2 if model.work.roc.mode == "off" else max(2, 2 * model.work.roc.min_per_side)
    out += [replace(now, group_size=size) for size in (now.group_size // 2, 2 * now.group_size) if size >= least]
    return list(dict.fromkeys([*out, *_splits(now)]))


def _splits(now: Setting) -> Iterator[Setting]:
    """As many processes otherwise shared out, and one engine more."""
    for engines in range(1, now.engines + now.ranks):
        yield replace(now, engines=engines, ranks=now.engines + now.ranks - engines)
    yield replace(now, engines=now.engines + 1)


def sweep(model: Model, seed: int = 0) -> list[Row]:
    """All of them."""
    return [Row(setting=setting, outcome=predict(model, setting, seed)) for setting in candidates(model)]


def alike(rows: Sequence[Row], now: Setting) -> list[Row]:
    """Those that may be recommended."""
    return [
        row
        for row in rows
        if (row.setting.groups_per_step, row.setting.group_size) == (now.groups_per_step, now.group_size)
        and row.setting.engines + row.setting.ranks <= now.engines + now.ranks
    ]


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Those that no other beats in one of throughput and age without losing in the other; the freshest first."""
    best, out = 0.0, []
    for row in sorted(rows, key=lambda one: (one.outcome.mean_age, -one.rate)):
        if row.rate > best:
            best = row.rate
            out.append(row)
    return out


def recommend(rows: Sequence[Row], now: Setting, max_age: float | None = None) -> Row:
    """The freshest of those that are as good as the best whose mean age is allowed.

    Raises:
        ConfigError: none is that fresh.
    """
    allowed = [row for row in alike(rows, now) if max_age is None or row.outcome.mean_age <= max_age]
    if not allowed:
        least = min(alike(rows, now), key=lambda row: row.outcome.mean_age)
        raise ConfigError(
            f"--max-age {max_age:g}: no setting is that fresh, the least mean age is {least.outcome.mean_age:.2f}; "
            f"ask for at least that"
        )
    best = max(row.rate for row in allowed)
    good = [row for row in allowed if row.rate >= AS_GOOD * best]
    return min(good, key=lambda row: (round(row.outcome.mean_age, 2), _changes(row.setting, now), -row.rate))


def _changes(setting: Setting, now: Setting) -> int:
    names = ("max_staleness", "concurrency", "engines", "ranks")
    return sum(getattr(setting, name) != getattr(now, name) for name in names)
