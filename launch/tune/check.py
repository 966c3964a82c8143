"""Whether the simulation contradicts a fix of the advisor.

Consumes    a snapshot, a fix
Produces    "" or what the simulation says against it; a coarse model, made of the snapshot's means
Waits for   two short simulations
Invariant   pure; what the snapshot does not tell, or a simulation does not know, is not judged

A snapshot holds no single rollouts, so they are spread around its means. That is enough for the direction in which a
dial moves the rate, which is all that is asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.roc import RocSettings
from buffer.schema import Finish
from launch.monitor.fixes import Fix
from launch.monitor.snapshot import Snapshot
from launch.tune.fit import guess
from launch.tune.model import simulate
from launch.tune.shapes import (
    GroupWork,
    Machine,
    Model,
    RatePoint,
    Recorded,
    RolloutWork,
    Setting,
    StepTime,
    SwapTime,
    TurnWork,
)

AGAINST = 0.97
"""of the present rate: a fix after which the simulation is slower than that is contradicted"""
GROUPS = 20
SPREAD = (0.4, 0.7, 1.0, 1.4, 1.5)
"""lengths of rollouts about their mean"""
STEPS, MAX_ROLLOUTS = 8, 2500
"""of a simulation; a run whose single step is larger is not judged, it would take too long"""
STARTED = ("staleness.max_staleness", "rollout.concurrency", "rollout.engines", "learner.ranks")


def contradicted(snapshot: Snapshot, fix: Fix) -> str:
    """What speaks against it; "" when nothing does, or nothing can be said."""
    model, change = coarse(snapshot), CHANGES.get(fix.dial)
    if model is None or change is None or not _has_cores(snapshot, fix):
        return ""
    setting = model.work.setting
    per_step = setting.groups_per_step * _generated(setting, model.work.roc)
    if per_step > MAX_ROLLOUTS:
        return ""
    steps = max(4, min(STEPS, MAX_ROLLOUTS // per_step))
    warmup = setting.max_staleness + 2
    changed, other = change(model, fix)
    now = simulate(model, setting, steps=steps, warmup=warmup).groups_per_min
    then = simulate(changed, other, steps=steps, warmup=warmup).groups_per_min
    if then >= AGAINST * now:
        return ""
    return f"simulated, {fix.dial} = {fix.proposed} makes {then:.0f} groups/min of {now:.0f}"


def _has_cores(snapshot: Snapshot, fix: Fix) -> bool:
    """Engines and ranks that are to be put on another host are beyond what is modelled."""
    return not (fix.dial in ("rollout.engines", "learner.ranks") and "host" in fix.reason)


def _generated(setting: Setting, roc: RocSettings) -> int:
    return setting.group_size * (1 if roc.mode == "off" else 2)


def _staleness(model: Model, fix: Fix) -> tuple[Model, Setting]:
    return model, replace(model.work.setting, max_staleness=int(fix.proposed))


def _concurrency(model: Model, fix: Fix) -> tuple[Model, Setting]:
    return model, replace(model.work.setting, concurrency=int(fix.proposed))


def _engines(model: Model, fix: Fix) -> tuple[Model, Setting]:
    return model, replace(model.work.setting, engines=int(fix.proposed))


def _ranks(model: Model, fix: Fix) -> tuple[Model, Setting]:
    return model, replace(model.work.setting, ranks=int(fix.proposed))


def _workers(model: Model, fix: Fix) -> tuple[Model, Setting]:
    return replace(model, work=replace(model.work, workers=int(fix.proposed))), model.work.setting


def _kv(model: Model, fix: Fix) -> tuple[Model, Setting]:
    tokens = int(model.work.kv_tokens * float(fix.proposed) / float(fix.now or 64))
    return replace(model, work=replace(model.work, kv_tokens=tokens)), model.work.setting


CHANGES: dict[str, Callable[[Model, Fix], tuple[Model, Setting]]] = {
    "staleness.max_staleness": _staleness,
    "rollout.concurrency": _concurrency,
    "rollout.engines": _engines,
    "learner.ranks": _ranks,
    "sandbox.workers": _workers,
    "rollout.kv_cache_mib": _kv,
}
"""dial -> how it changes the model or the setting"""


def coarse(snapshot: Snapshot) -> Model | None:
    """A model of the snapshot's means; None where it lacks one."""
    work = _work(snapshot)
    if work is None:
        return None
    step_s, tokens = work.steps[0].wall_s, work.steps[0].num_tokens
    pass_time = guess(work)
    at_once = sum(point.concurrency * point.weight_s for point in work.rates) / sum(p.weight_s for p in work.rates)
    tokens_per_s = at_once / pass_time.of(1.0, at_once)
    return Model(
        work=work,
        pass_time=pass_time,
        engine_cores=work.token_cpu_s * tokens_per_s,
        beside_cpu_s=0.0,
        pause_share=1.0,
        step_fixed_s=0.0,
        step_token_s=step_s / tokens,
        learner_share=min(1.0, work.step_cpu_s / step_s),
        learner_cores=max(1.0, work.step_cpu_s / step_s),
        call_cpu_share=0.0,
        rest_s=work.rollout_rest_s,
    )


def _work(snapshot: Snapshot) -> Recorded | None:
    rates, useful, learner, swap = snapshot.rates, snapshot.useful, snapshot.learner, snapshot.swap
    generated, rollouts, trained = rates.tokens_generated_per_s, rates.rollouts_per_s, rates.groups_trained_per_min
    points = [point for engine in snapshot.engines for point in engine.curve]
    if not (generated and rollouts and trained and points and useful and useful.kept and learner and swap):
        return None
    step_s = sum(learner.parts_s.values()) - learner.parts_s.get("wait", 0.0)
    if step_s <= 0 or not snapshot.engines[0].slots:
        return None
    setting = _setting(snapshot)
    work = _groups(snapshot, setting, generated / rollouts, (rates.calls_per_s or 0.0) / rollouts, useful.kept)
    longest = max(turn.context_tokens for group in work for one in group.rollouts for turn in one.turns)
    per_step_s = 60.0 * setting.groups_per_step / trained
    return Recorded(
        setting=setting,
        roc=RocSettings(mode=snapshot.settings.get("roc.mode", "paper"), min_per_side=1),
        seed=0,
        groups=work,
        steps=(StepTime(num_tokens=max(1, round(setting.groups_per_step * setting.group_size)), wall_s=step_s),),
        swaps=(SwapTime(receive_s=(swap.publish_s or 0.0) + (swap.receive_s or 0.0), pause_s=swap.pause_s or 0.0),),
        rates=tuple(
            RatePoint(concurrency=p.concurrency, token_s=p.concurrency / p.tokens_per_s, weight_s=p.seconds)
            for p in points
        ),
        groups_per_min=trained,
        mean_age=(snapshot.staleness.mean or 0.0) if snapshot.staleness is not None else 0.0,
        token_cpu_s=_cores(snapshot, "rollout") / generated,
        call_cpu_s=_cores(snapshot, "sandbox") / rates.calls_per_s if rates.calls_per_s else 0.0,
        store_token_cpu_s=_cores(snapshot, "buffer", "filter") / generated,
        step_cpu_s=_cores(snapshot, "learner") * per_step_s / setting.ranks,
        engine_threads=1,
        computed_share=0.0,
        recomputes=False,
        rollout_rest_s=0.0,
        decide_s=0.0,
        workers=snapshot.sandbox.workers if snapshot.sandbox is not None else 1,
        kv_tokens=_kv_tokens(snapshot, longest),
        longest_tokens=longest,
        machines=_machines(snapshot),
        places={},
    )


def _cores(snapshot: Snapshot, *kinds: str) -> float:
    return sum(role.cores_used or 0.0 for role in snapshot.roles if role.role in kinds)


def _machines(snapshot: Snapshot) -> tuple[Machine, ...]:
    hosts = (Machine(cores=host.cores, others=max(0.0, host.used - host.run_used)) for host in snapshot.hosts)
    return tuple(hosts) or (Machine(cores=1e6, others=0.0),)


def _kv_tokens(snapshot: Snapshot, longest: int) -> int:
    """Room for as many rollouts as were held when the cache was full; else for all slots."""
    engine = snapshot.engines[0]
    held = engine.held_when_full if engine.held_when_full is not None else engine.slots
    return max(longest, round(longest * (held if held < 0.9 * engine.slots else engine.slots)))


def _setting(snapshot: Snapshot) -> Setting:
    settings = snapshot.settings
    return Setting(
        max_staleness=int(settings.get("staleness.max_staleness", 0)),
        groups_per_step=int(settings.get("groups.groups_per_step", 8)),
        group_size=int(settings.get("groups.group_size", 8)),
        concurrency=snapshot.engines[0].slots,
        engines=len(snapshot.engines),
        ranks=snapshot.learner.ranks if snapshot.learner is not None else 1,
    )


def _groups(snapshot: Snapshot, setting: Setting, tokens: float, calls: float, kept: float) -> tuple[GroupWork, ...]:
    """As many of them kept as the run's were; each rollout calls as often as the mean rollout, rounded."""
    mode = snapshot.settings.get("roc.mode", "paper")
    count = setting.group_size * (1 if mode == "off" else 2)
    run = snapshot.sandbox.run if snapshot.sandbox is not None else None
    num_calls, run_s = round(calls), 0.0 if run is None else run.mean_s
    mixed = max(1, round(kept * GROUPS))
    return tuple(
        GroupWork(
            num_rollouts=count,
            rollouts=tuple(
                _rollout(tokens * SPREAD[(group + at) % len(SPREAD)], num_calls, run_s, group >= mixed or at % 2 == 0)
                for at in range(count)
            ),
        )
        for group in range(GROUPS)
    )


def _rollout(tokens: float, num_calls: int, run_s: float, right: bool) -> RolloutWork:
    each = max(1, round(tokens / (num_calls + 1)))
    turns = tuple(
        TurnWork(
            num_tokens=each,
            given_tokens=each * (turn + 1),
            context_tokens=each * (turn + 2),
            called=turn < num_calls,
            run_s=run_s,
        )
        for turn in range(num_calls + 1)
    )
    finish = Finish(
        group=0,
        rollout=0,
        attempt=1,
        reward=float(right),
        verdict="right" if right else "wrong",
        answer="",
        well_formed=True,
        num_answers=1,
        num_turns=len(turns),
        statuses=("ok",) * num_calls,
        num_output_tokens=each * len(turns),
        num_tokens=turns[-1].context_tokens,
        end="answer",
    )
    return RolloutWork(turns=turns, finish=finish)
