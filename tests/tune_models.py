"""Models made by hand for the tests of the tuner: every figure is a round number.

Produces    work whose throughput can be told without a simulation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.roc import RocSettings
from buffer.schema import Finish
from launch.tune.shapes import (
    Curve,
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

SETTING = Setting(max_staleness=1, groups_per_step=2, group_size=2, concurrency=64)
PLENTY = Machine(cores=1e6, others=0.0)


def flat(token_s: float) -> Curve:
    """As long, whatever runs at once."""
    return Curve(points=((1.0, token_s),), beyond_s=0.0)


def shared_curve(each_s: float, fixed_s: float = 0.0) -> Curve:
    """Seconds that grow with what runs at once: alone `fixed_s` + `each_s`."""
    return Curve(points=((1.0, fixed_s + each_s),), beyond_s=each_s)


def rollout(turns: tuple[int, ...], right: bool, run_s: float = 0.0) -> RolloutWork:
    """`turns` are their tokens; all but the last call."""
    works, context = [], 10
    for at, tokens in enumerate(turns):
        context += tokens
        works.append(TurnWork(num_tokens=tokens, context_tokens=context, called=at + 1 < len(turns), run_s=run_s))
    finish = Finish(
        group=0,
        rollout=0,
        attempt=1,
        reward=float(right),
        verdict="right" if right else "wrong",
        answer="1",
        well_formed=True,
        num_answers=1,
        num_turns=len(turns),
        statuses=("ok",) * (len(turns) - 1),
        num_output_tokens=sum(turns),
        num_tokens=context,
        end="answer",
    )
    return RolloutWork(turns=tuple(works), finish=finish)


def group(*turns: tuple[int, ...], kept: bool = True, run_s: float = 0.0) -> GroupWork:
    """One rollout per entry, right and wrong in turns; all right when it is to be dropped."""
    rollouts = (rollout(one, not kept or at % 2 == 0, run_s) for at, one in enumerate(turns))
    return GroupWork(num_rollouts=len(turns), rollouts=tuple(rollouts))


def recorded(**parts: Any) -> Recorded:
    """Groups of four rollouts of ten tokens; nothing but generating and training takes time."""
    fields: dict[str, Any] = {
        "setting": SETTING,
        "roc": RocSettings(min_per_side=1),
        "seed": 1,
        "groups": (group((10,), (10,), (10,), (10,)),),
        "steps": (StepTime(num_tokens=80, wall_s=1.0),),
        "swaps": (SwapTime(receive_s=0.0, pause_s=0.0),),
        "rates": (RatePoint(concurrency=8, token_s=0.1, weight_s=10.0),),
        "groups_per_min": 1.0,
        "mean_age": 0.0,
        "token_cpu_s": 0.0,
        "call_cpu_s": 0.0,
        "store_token_cpu_s": 0.0,
        "step_cpu_s": 0.0,
        "engine_threads": 1,
        "prefill_per_token": 1.0,
        "recomputes": False,
        "rollout_rest_s": 0.0,
        "decide_s": 0.0,
        "workers": 1,
        "kv_tokens": 1 << 20,
        "longest_tokens": 100,
        "machines": (PLENTY,),
        "places": {},
    }
    return Recorded(**(fields | parts))


def model(work: Recorded | None = None, **parts: Any) -> Model:
    """An engine whose every token takes 0.1 s, a learner whose every step takes 1 s."""
    fields: dict[str, Any] = {
        "work": work or recorded(),
        "curve": flat(0.1),
        "engine_cores": 0.0,
        "store_cores": 0.0,
        "prefill_s": 0.0,
        "step_fixed_s": 1.0,
        "step_token_s": 0.0,
        "learner_share": 0.0,
        "learner_cores": 1.0,
        "call_wait_s": 0.0,
    }
    return Model(**(fields | parts))


def setting(**parts: Any) -> Setting:
    return replace(SETTING, **parts)
