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

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launch.config import ConfigError
from launch.tune.model import simulate
from launch.tune.shapes import Curve, Model, Outcome, RatePoint, Recorded, StepTime

ROUNDS = 5
CLOSE = 0.01
ROLLOUTS = 2500
"""of one simulation of a fit"""
MIN_STEPS, MAX_STEPS, WARMUP = 6, 60, 3
MIN_SHARE = 0.005
"""of the measured time, from which a point of the curve counts"""
UPPER = 0.2
"""of the greatest concurrency, from which points say how the curve goes on"""
MIN_SPREAD = 0.05
"""of tokens over steps, below which a step's fixed part can't be told"""
MIN_CPU = 0.3
"""of an engine's CPU seconds, that are spent on generations whatever else it does"""
BESIDE = 0.35
"""of a core, that an engine's process keeps busy beside its threads: tokens to text, turns to messages"""
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
    curve = curve_of(work.rates)
    model = Model(
        work=work,
        curve=curve,
        engine_cores=1.0,
        store_cores=0.0,
        prefill_s=0.0,
        step_fixed_s=fixed_s,
        step_token_s=token_s,
        learner_share=min(1.0, work.step_cpu_s / step_s),
        learner_cores=1.0,
        call_wait_s=_computing_s(work),
    )
    return _calibrated(_with_cores(model, work.rates, work.token_cpu_s))


def _calibrated(model: Model) -> Model:
    """Alone durations such that the simulation of the recorded setting takes as long as the record."""
    work, setting = model.work, model.work.setting
    steps = max(MIN_STEPS, min(MAX_STEPS, ROLLOUTS // (setting.groups_per_step * work.groups[0].num_rollouts)))
    recorded_s, alone = _mean_step_s(work.steps), work.rates
    for _ in range(ROUNDS):
        outcome = simulate(model, setting, steps=steps, warmup=WARMUP + setting.max_staleness)
        slower = _slower(work.rates, outcome)
        mean = _mean_of(slower, work.rates)
        cpu_s = max(MIN_CPU * work.token_cpu_s, work.token_cpu_s - outcome.anew_s * work.engine_threads)
        alone = _not_below_cpu([_times(one, slower.get(one.concurrency, mean)) for one in alone], work, cpu_s)
        step_s = max(_alone_step_s(model) * recorded_s / outcome.step_wall_s, min(recorded_s, work.step_cpu_s))
        change = step_s / _alone_step_s(model)
        before, model = model.curve, _with_cores(_paced(model, alone, change), alone, cpu_s)
        at = work.rates[-1].concurrency
        if max(abs(model.curve.token_s(at) / before.token_s(at) - 1.0), abs(change - 1.0)) < CLOSE:
            break
    return model


def _times(point: RatePoint, factor: float) -> RatePoint:
    return replace(point, token_s=point.token_s * factor)


def _paced(model: Model, alone: Sequence[RatePoint], change: float) -> Model:
    return replace(
        model,
        curve=curve_of(alone),
        prefill_s=_prefill_s(alone, model.work),
        step_fixed_s=model.step_fixed_s * change,
        step_token_s=model.step_token_s * change,
    )


def _prefill_s(alone: Sequence[RatePoint], work: Recorded) -> float:
    """A token more in a pass costs as much, be it sampled or of a context: what one generation more adds to the curve,
    over the tokens that it brings. Contexts computed anew are not among those on record, so this is on the high side.
    """
    each_s = line([(one.concurrency, one.token_s, one.weight_s) for one in alone])[1]
    return each_s / (1.0 + work.prefill_per_token) if work.recomputes else 0.0


def _not_below_cpu(alone: Sequence[RatePoint], work: Recorded, token_cpu_s: float) -> tuple[RatePoint, ...]:
    """Its threads can't spend the CPU seconds faster; but nothing takes longer alone than it took in company."""
    factor = max(1.0, _cores(alone, token_cpu_s) / (work.engine_threads + BESIDE))
    return tuple(
        replace(one, token_s=min(max(one.token_s, recorded.token_s), one.token_s * factor))
        for one, recorded in zip(alone, work.rates, strict=True)
    )


def _cores(alone: Sequence[RatePoint], token_cpu_s: float) -> float:
    """CPU seconds over alone seconds of what was generated; the weights are those of the record."""
    tokens = sum(one.weight_s * one.concurrency / one.token_s for one in alone)
    return token_cpu_s * tokens / sum(one.weight_s for one in alone)


def _alone_step_s(model: Model) -> float:
    """Of a mean step."""
    tokens = sum(step.num_tokens for step in model.work.steps) / len(model.work.steps)
    return model.step_fixed_s + model.step_token_s * tokens


def _with_cores(model: Model, alone: Sequence[RatePoint], token_cpu_s: float) -> Model:
    """What an engine and a learner rank keep busy; beyond an engine's threads, what goes on beside them."""
    work = model.work
    wanted, engine = work.step_cpu_s / max(_alone_step_s(model), 1e-9), _cores(alone, token_cpu_s)
    beside = max(0.0, engine - work.engine_threads)
    return replace(
        model,
        engine_cores=engine - beside,
        store_cores=_cores(alone, work.store_token_cpu_s) + beside,
        learner_share=min(1.0, wanted),
        learner_cores=max(1.0, wanted),
    )


def _slower(rates: Sequence[RatePoint], outcome: Outcome) -> dict[int, float]:
    """Recorded over simulated seconds per token, at the concurrencies that both met."""
    found = {at: seconds / tokens for at, (tokens, seconds) in outcome.measured.items() if tokens > 0}
    return {one.concurrency: one.token_s / found[one.concurrency] for one in rates if one.concurrency in found}


def _mean_of(slower: Mapping[int, float], rates: Sequence[RatePoint]) -> float:
    """Weighted by the time that was spent there; 1 where nothing was met."""
    pairs = [(one.weight_s, slower[one.concurrency]) for one in rates if one.concurrency in slower]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total > 0 else 1.0


def _mean_step_s(steps: Sequence[StepTime]) -> float:
    return sum(step.wall_s for step in steps) / len(steps)


def curve_of(rates: Sequence[RatePoint]) -> Curve:
    """Through the points that were measured long enough, made rising; beyond them on the line of the upper ones."""
    total = sum(point.weight_s for point in rates)
    points = [point for point in rates if point.weight_s >= MIN_SHARE * total]
    rising: list[tuple[float, float, float]] = []  # (n, seconds, weight)
    for point in points:
        rising.append((point.concurrency, point.token_s, point.weight_s))
        while len(rising) > 1 and rising[-1][1] < rising[-2][1]:
            rising[-2:] = [_pooled(*rising[-2:])]
    top = points[-1].concurrency
    upper = [(one.concurrency, one.token_s, one.weight_s) for one in points if one.concurrency >= UPPER * top]
    return Curve(points=tuple((at, token_s) for at, token_s, _ in rising), beyond_s=line(upper)[1])


def _pooled(one: tuple[float, float, float], two: tuple[float, float, float]) -> tuple[float, float, float]:
    weight = one[2] + two[2]
    at, token_s = ((one[part] * one[2] + two[part] * two[2]) / weight for part in (0, 1))
    return at, token_s, weight


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
