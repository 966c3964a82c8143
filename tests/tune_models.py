"""Models made by hand for the tests of the tuner: every figure is a round number.

Produces    work whose throughput can be told without a simulation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.roc import RocSettings
from buffer.schema import Finish
from launch.tune.shapes import (
    GroupWork,
    Machine,
    Model,
    PassTime,
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


def flat(pass_s: float) -> PassTime:
    """As long, whatever is in it."""
    return PassTime(fixed_s=pass_s, token_s=0.0)


def rollout(turns: tuple[int, ...], right: bool, run_s: float = 0.0) -> RolloutWork:
    """`turns` are their tokens; all but the last call."""
    works, given = [], 10
    for at, tokens in enumerate(turns):
        context, called = given + tokens, at + 1 < len(turns)
        works.append(
            TurnWork(num_tokens=tokens, given_tokens=given, context_tokens=context, called=called, run_s=run_s)
        )
        given = context
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
        "computed_share": 0.0,
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
    work = work or recorded()
    fields: dict[str, Any] = {
        "work": work,
        "pass_time": flat(0.1),
        "engine_cores": 0.0,
        "beside_cpu_s": 0.0,
        "pause_share": 1.0,
        "step_fixed_s": 1.0,
        "step_token_s": 0.0,
        "learner_share": 0.0,
        "learner_cores": 1.0,
        "call_cpu_share": 0.0,
        "rest_s": work.rollout_rest_s,
    }
    return Model(**(fields | parts))


def setting(**parts: Any) -> Setting:
    return replace(SETTING, **parts)
