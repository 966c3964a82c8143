"""From what a run recorded to the model: durations as they would be with all the cores they want.

Consumes    `Recorded`
Produces    `Model`
Waits for   simulations of the recorded setting
Invariant   pure: the same records give the same model; simulated at the recorded setting, engines and learner take as
            long as they were recorded to

What was recorded was measured while stages shared cores, so it is longer than alone. How much longer follows from the
model itself: it is simulated at the recorded setting, and alone durations are corrected by recorded over simulated
until both agree. CPU seconds do not depend on sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launch.config import ConfigError
from launch.tune.model import simulate
from launch.tune.shapes import Curve, Model, Outcome, RatePoint, Recorded, StepTime

ROUNDS = 5
CLOSE = 0.01
STEPS, WARMUP = 8, 3
MIN_SHARE = 0.02
"""of the measured time, from which a point of the curve counts"""
MIN_SPREAD = 0.05
"""of tokens over steps, below which a step's fixed part can't be told"""
WAITS = 5.0
"""times its CPU seconds, from which a call's median says that calls wait rather than compute"""


def fit(work: Recorded) -> Model:
    """The model of a run.

    Raises:
        ConfigError: engines told no rate, the learner no step, nobody a swap.
    """
    for what, found in (("rates of engines", work.rates), ("learner steps", work.steps), ("swaps", work.swaps)):
        if not found:
            raise ConfigError(f"no {what} are on record in the window: a fit needs 1 or more; let the run go on")
    fixed_s, token_s = step_line(work.steps)
    step_s = _mean_step_s(work.steps)
    curve = curve_line(work.rates)
    model = Model(
        work=work,
        curve=curve,
        engine_cores=1.0,
        store_cores=0.0,
        step_fixed_s=fixed_s,
        step_token_s=token_s,
        learner_share=min(1.0, work.step_cpu_s / step_s),
        learner_cores=1.0,
        call_wait_s=_computing_s(work),
    )
    return _calibrated(_with_cores(model))


def _calibrated(model: Model) -> Model:
    """Alone durations such that the simulation of the recorded setting takes as long as the record."""
    recorded_s = _mean_step_s(model.work.steps)
    for _ in range(ROUNDS):
        outcome = simulate(model, model.work.setting, steps=STEPS, warmup=WARMUP)
        engines, learner = _slower(model.work.rates, outcome), recorded_s / outcome.step_wall_s
        model = _with_cores(
            replace(
                model,
                curve=model.curve.scaled(engines),
                step_fixed_s=model.step_fixed_s * learner,
                step_token_s=model.step_token_s * learner,
            )
        )
        if max(abs(engines - 1.0), abs(learner - 1.0)) < CLOSE:
            break
    return model


def _with_cores(model: Model) -> Model:
    """CPU seconds over alone seconds: what an engine and a learner rank keep busy."""
    work = model.work
    weight_s = sum(point.weight_s for point in work.rates)
    at_once = sum(point.concurrency * point.weight_s for point in work.rates) / weight_s
    tokens = sum(step.num_tokens for step in work.steps) / len(work.steps)
    alone_s = model.step_fixed_s + model.step_token_s * tokens
    wanted = work.step_cpu_s / max(alone_s, 1e-9)
    tokens_per_s = at_once / max(model.curve.token_s(at_once), 1e-9)
    return replace(
        model,
        engine_cores=work.token_cpu_s * tokens_per_s,
        store_cores=work.store_token_cpu_s * tokens_per_s,
        learner_share=min(1.0, wanted),
        learner_cores=max(1.0, wanted),
    )


def _slower(rates: Sequence[RatePoint], outcome: Outcome) -> float:
    """Recorded over simulated seconds per token, over the concurrencies that both met."""
    pairs = [
        (point.weight_s, point.token_s, outcome.measured[point.concurrency][1] / outcome.measured[point.concurrency][0])
        for point in rates
        if outcome.measured.get(point.concurrency, (0.0, 0.0))[0] > 0
    ]
    if not pairs:
        return 1.0
    total = sum(weight for weight, _, _ in pairs)
    return sum(weight * recorded / simulated for weight, recorded, simulated in pairs) / total


def _mean_step_s(steps: Sequence[StepTime]) -> float:
    return sum(step.wall_s for step in steps) / len(steps)


def curve_line(rates: Sequence[RatePoint]) -> Curve:
    """Seconds per token against generations at once: a line, neither part below 0."""
    total = sum(point.weight_s for point in rates)
    points = [point for point in rates if point.weight_s >= MIN_SHARE * total]
    fixed_s, each_s = line([(point.concurrency, point.token_s, point.weight_s) for point in points])
    return Curve(fixed_s=fixed_s, each_s=each_s)


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


def _computing_s(work: Recorded) -> float:
    """What of a call's recorded seconds is computing, or waiting for a core: nearly all of it, unless calls sleep."""
    runs = sorted(turn.run_s for group in work.groups for one in group.rollouts for turn in one.turns if turn.called)
    if not runs or runs[len(runs) // 2] > WAITS * work.call_cpu_s:
        return work.call_cpu_s
    return runs[min(len(runs) - 1, len(runs) * 95 // 100)]
