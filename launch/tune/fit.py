"""From what a run recorded to the model: durations as they would be with all the cores they want.

Consumes    `Recorded`
Produces    `Model`
Waits for   simulations of the recorded setting
Invariant   pure: the same records give the same model; simulated at the recorded setting, engines, learner and pauses
            take as long as they were recorded to

What was recorded was measured while stages shared cores, so it is longer than alone. How much longer follows from the
model itself: it is simulated at the recorded setting, and alone durations are corrected by recorded over simulated
until both agree. CPU seconds do not depend on sharing. What an engine's passes held follows from the same simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launch.config import ConfigError
from launch.tune.model import simulate
from launch.tune.shapes import Model, Outcome, PassTime, RatePoint, Recorded, StepTime

ROUNDS, WHOLE = 8, 3
"""the first corrections are made whole"""
CLOSE = 0.01
ROLLOUTS = 2500
"""of one simulation of a fit"""
MIN_STEPS, MAX_STEPS, WARMUP = 6, 60, 3
MIN_SPREAD = 0.05
"""of tokens over steps, below which a step's fixed part can't be told"""
BESIDE = 0.35
"""of a core, that an engine's process keeps busy beside its threads: tokens to text, turns to messages"""
WAITS = 5.0
"""times their CPU seconds, from which the length of calls says that they wait rather than compute"""


def fit(work: Recorded) -> Model:
    """The model of a run.

    Raises:
        ConfigError: engines told no rate, the learner no step, nobody a swap.
    """
    for what, found in (("rates of engines", work.rates), ("learner steps", work.steps), ("swaps", work.swaps)):
        if not found:
            raise ConfigError(f"no {what} are on record in the window: a fit needs 1 or more; let the run go on")
    fixed_s, token_s = step_line(work.steps)
    model = Model(
        work=work,
        pass_time=guess(work),
        engine_cores=1.0,
        beside_cpu_s=0.0,
        pause_share=1.0,
        step_fixed_s=fixed_s,
        step_token_s=token_s,
        learner_share=1.0,
        learner_cores=1.0,
        call_cpu_share=call_cpu_share(work),
        rest_s=work.rollout_rest_s,
    )
    return _calibrated(_with_cores(model, _recorded_engine_s(work.rates), 0.0))


def _calibrated(model: Model) -> Model:
    """Alone durations such that the simulation of the recorded setting takes as long as the record."""
    work, setting = model.work, model.work.setting
    steps = max(MIN_STEPS, min(MAX_STEPS, ROLLOUTS // (setting.groups_per_step * work.groups[0].num_rollouts)))
    for number in range(ROUNDS):
        outcome = simulate(model, setting, steps=steps, warmup=WARMUP + setting.max_staleness)
        before, model = model, _corrected(model, outcome)
        if number >= WHOLE:
            model = _midway(before, model)
        changes = (_alone_step_s(model) / _alone_step_s(before), _taking(outcome, model) / _taking(outcome, before))
        if max(abs(change - 1.0) for change in changes) < CLOSE:
            break
    return model


def _corrected(model: Model, outcome: Outcome) -> Model:
    """By recorded over simulated."""
    work, recorded_s = model.work, _mean_step_s(model.work.steps)
    paused_s = sum(swap.pause_s for swap in work.swaps) / len(work.swaps)
    alone = pass_time(work.rates, outcome, model.pass_time)
    engine_s = outcome.engine_s * _taking(outcome, replace(model, pass_time=alone)) / _taking(outcome, model)
    enough = _cpu_factor(work, engine_s, outcome.loading_s)
    step_s = max(_alone_step_s(model) * recorded_s / outcome.step_wall_s, min(recorded_s, work.step_cpu_s))
    change = step_s / _alone_step_s(model)
    paced = replace(
        model,
        pass_time=PassTime(fixed_s=alone.fixed_s * enough, token_s=alone.token_s * enough),
        rest_s=max(0.0, work.rollout_rest_s - outcome.beside_s),
        pause_share=min(1.0, model.pause_share * paused_s / max(outcome.pause_s, 1e-9)),
        step_fixed_s=model.step_fixed_s * change,
        step_token_s=model.step_token_s * change,
    )
    return _with_cores(paced, engine_s * enough, outcome.loading_s)


def _midway(one: Model, other: Model) -> Model:
    """Half of each correction: one that comes late, as where queues build up, would else swing."""
    names = ("engine_cores", "beside_cpu_s", "rest_s", "pause_share", "step_fixed_s", "step_token_s")
    cores = ("learner_share", "learner_cores")
    passes = _means(one.pass_time, other.pass_time, ("fixed_s", "token_s"))
    return replace(one, pass_time=PassTime(**passes), **_means(one, other, (*names, *cores)))


def _means(one: Any, other: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: (getattr(one, name) + getattr(other, name)) / 2.0 for name in names}


def guess(work: Recorded) -> PassTime:
    """From the curve alone: a token more in a pass costs as much, be it sampled or of a context."""
    fixed_s, each_s = line([(one.concurrency, one.token_s, one.weight_s) for one in work.rates])
    turns = [turn for group in work.groups for one in group.rollouts for turn in one.turns]
    contexts = work.computed_share * sum(turn.given_tokens for turn in turns)
    return PassTime(fixed_s=fixed_s, token_s=each_s / (1.0 + contexts / sum(turn.num_tokens for turn in turns)))


def pass_time(rates: Sequence[RatePoint], outcome: Outcome, before: PassTime) -> PassTime:
    """What passes take alone, such that generations take as long as recorded at each concurrency.

    A generation takes as long as its passes, and of these the simulation says how many they are and what they hold.
    """
    points = []
    for one in rates:
        met = outcome.measured.get(one.concurrency)
        if met is not None:
            longer = one.token_s * met.tokens / met.wall_s
            alone_s = longer * before.of(met.passes, met.pass_tokens)
            points.append((met.pass_tokens / met.passes, alone_s / met.passes, one.weight_s))
    if not points:
        return before
    fixed_s, token_s = line(points)
    return PassTime(fixed_s=fixed_s, token_s=token_s)


def _taking(outcome: Outcome, model: Model) -> float:
    """Alone seconds of all that engines were seen doing."""
    return sum(model.pass_time.of(met.passes, met.pass_tokens) for met in outcome.measured.values())


def _cpu_factor(work: Recorded, engine_s: float, loading_s: float) -> float:
    """Its threads can't spend the CPU seconds faster; but nothing takes longer alone than it took in company."""
    least_s = (work.token_cpu_s - loading_s) / (work.engine_threads + BESIDE)
    return max(1.0, min(least_s, _recorded_engine_s(work.rates)) / engine_s)


def _recorded_engine_s(rates: Sequence[RatePoint]) -> float:
    """Of an engine that generates, per token, in company."""
    return sum(one.weight_s for one in rates) / sum(one.weight_s * one.concurrency / one.token_s for one in rates)


def _alone_step_s(model: Model) -> float:
    """Of a mean step."""
    tokens = sum(step.num_tokens for step in model.work.steps) / len(model.work.steps)
    return model.step_fixed_s + model.step_token_s * tokens


def _with_cores(model: Model, engine_s: float, loading_s: float) -> Model:
    """What an engine and a learner rank keep busy; beyond an engine's threads, what goes on beside them."""
    work = model.work
    wanted = work.step_cpu_s / max(_alone_step_s(model), 1e-9)
    cpu_s = max(0.0, work.token_cpu_s - loading_s)
    return replace(
        model,
        engine_cores=min(cpu_s / engine_s, float(work.engine_threads)),
        beside_cpu_s=max(0.0, cpu_s - work.engine_threads * engine_s),
        learner_share=min(1.0, wanted),
        learner_cores=max(1.0, wanted),
    )


def _mean_step_s(steps: Sequence[StepTime]) -> float:
    return sum(step.wall_s for step in steps) / len(steps)


def step_line(steps: Sequence[StepTime]) -> tuple[float, float]:
    """Seconds of a learner step against its tokens; in proportion, where all steps have about as many."""
    mean = sum(step.num_tokens for step in steps) / len(steps)
    spread = (sum((step.num_tokens - mean) ** 2 for step in steps) / len(steps)) ** 0.5
    if spread < MIN_SPREAD * mean:
        return 0.0, _mean_step_s(steps) / max(1.0, mean)
    return line([(step.num_tokens, step.wall_s, 1.0) for step in steps])


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Weighted least squares through (x, y, weight), x > 0: intercept and slope, neither below 0."""
    total = sum(weight for _, _, weight in points)
    x_mean = sum(x * weight for x, _, weight in points) / total
    y_mean = sum(y * weight for _, y, weight in points) / total
    square = sum(weight * (x - x_mean) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - x_mean) * (y - y_mean) for x, y, weight in points) / square if square > 0 else 0.0
    slope = min(max(slope, 0.0), y_mean / x_mean)
    return y_mean - slope * x_mean, slope


def call_cpu_share(work: Recorded) -> float:
    """Calls compute as long as they take, but for company, unless that is far longer than their CPU seconds: then they
    wait.
    """
    runs = [turn.run_s for group in work.groups for one in group.rollouts for turn in one.turns if turn.called]
    share = work.call_cpu_s * len(runs) / max(sum(runs), 1e-9)
    return share if WAITS * share > 1.0 and sum(runs) > 0 else 0.0
