"""Resample on correct: which rollouts of a finished group are trained.

Consumes    the headers of a group's scored rollouts: rewards, typed statuses, counts; never payload
Produces    a Decision: the rollouts to keep, or a drop with its reason
Waits for   nothing: a pure function of headers, settings and run seed
Invariant   the same choice on any host and Python version, after any restart, in whatever order the headers arrived;
            a kept group holds both kinds of reward, with min_per_side of each where there are so many

A worked example. G = 4; rollouts 0-2 of 8 are right with p_err + p_format = 0.0, 0.5, 1.0, the other five wrong;
min_per_side = 2, epsilon = 0.05:

    n_neg = clamp(5 // 2, max(min(2, 5), 4 - 3), min(5, 4 - min(2, 3))) = clamp(2, 2, 2) = 2, drawn uniformly
    n_pos = 4 - 2 = 2, drawn one after the other with weights 1/0.05 : 1/0.55 : 1/1.05 = 20 : 1.82 : 0.95

A right rollout is one with a reward above 0; the reward is 0 or 1 and judges the answer alone.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from buffer.schema import Decision, Finish, GroupHeaders
from sandbox.api import Status, is_failure, is_infra

RocMode: TypeAlias = Literal["paper", "released", "off"]

ALL_RIGHT: Final = "all_right"
"""every reward is above 0 and they are equal: nothing to tell the rollouts apart"""
ALL_WRONG: Final = "all_wrong"
"""every reward is 0"""
TOO_FEW: Final = "too_few"
"""what is left of the group can't hold a right and a wrong rollout"""

NO_CALL_P_ERR: Final = 0.5
"""p_err of a rollout that never called the tool: between flawless and all calls failed"""


class RocSettings(BaseModel):
    """[roc]: how G rollouts are chosen out of 2G."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mode: RocMode = "paper"
    """paper: weighted draw of the right, uniform draw of the wrong; released: the published code's sort and cut, with
    our penalties; off: plain GRPO, every rollout is kept and only G are generated"""
    min_per_side: int = Field(default=2, ge=1)
    """kept right and kept wrong rollouts are at least so many each, where there are so many; at most G / 2"""
    epsilon: float = Field(default=0.05, ge=1e-9, le=1e9)
    """weight of a right rollout is 1 / (epsilon + p_err + p_format); towards 0 the draw becomes a sort"""

    def require(self, group_size: int) -> None:
        """Refuse a group size that can't hold min_per_side of both kinds.

        Raises:
            ValueError: group_size < 2 * min_per_side.
        """
        if self.mode != "off" and group_size < 2 * self.min_per_side:
            raise ValueError(
                f"groups.group_size = {group_size} is below 2 * roc.min_per_side = {2 * self.min_per_side}: "
                f"raise the group size or set roc.min_per_side = {max(1, group_size // 2)}"
            )


def penalties(finish: Finish) -> tuple[float, float]:
    """(p_err, p_format) of a rollout, each in [0, 1]; decided by typed statuses and counts, never by text."""
    calls = [status for status in map(Status, finish.statuses) if not is_infra(status)]
    p_err = sum(map(is_failure, calls)) / len(calls) if calls else NO_CALL_P_ERR
    if not finish.well_formed:
        return p_err, 1.0
    return p_err, min(1.0, max(0, finish.num_answers - 1) / max(1, finish.num_turns))


def select(headers: GroupHeaders, settings: RocSettings, run_seed: int) -> Decision:
    """The rollouts of a group to keep, or a drop with its reason."""
    marks = [penalties(finish) for finish in headers.rollouts]
    penalty = [p_err + p_format for p_err, p_format in marks]
    order = sorted(range(len(marks)), key=lambda at: headers.rollouts[at].rollout)
    right = [at for at in order if headers.rollouts[at].reward > 0]
    wrong = [at for at in order if headers.rollouts[at].reward <= 0]
    num_kept = _num_kept(headers, settings.mode)
    reason, kept = "", order
    if num_kept < 2:
        reason, kept = TOO_FEW, []
    elif len({finish.reward for finish in headers.rollouts}) == 1:
        reason, kept = ALL_RIGHT if right else ALL_WRONG, []
    elif settings.mode != "off":
        num_wrong = num_wrong_kept(len(right), len(wrong), num_kept, settings)
        num_right = num_kept - num_wrong
        if settings.mode == "released":
            kept = wrong[:num_wrong] + sorted(right, key=penalty.__getitem__)[:num_right]
        else:
            rng = _rng(run_seed, headers.group)
            weights = [1.0 / (settings.epsilon + penalty[at]) for at in right]
            kept = [wrong[at] for at in _draw(rng, [1.0] * len(wrong), num_wrong)]
            kept += [right[at] for at in _draw(rng, weights, num_right)]
    return Decision(
        group=headers.group,
        keep=tuple(sorted(headers.rollouts[at].rollout for at in kept)),
        drop_reason=reason,
        p_err=tuple(p_err for p_err, _ in marks),
        p_format=tuple(p_format for _, p_format in marks),
    )


def num_wrong_kept(num_right: int, num_wrong: int, num_kept: int, settings: RocSettings) -> int:
    """How many of the `num_kept` places go to wrong rollouts; the right ones take the others.

    `paper` aims at half of the wrong, rounded down; `released` at an equal share of both, halves rounded to even.
    Both give way to `min_per_side`, and to what there is. A group too short for min_per_side of both takes half each.
    """
    minimum = min(settings.min_per_side, num_kept // 2)
    if settings.mode == "released":
        aim = num_kept - round(num_right * num_kept / (num_right + num_wrong))
    else:
        aim = num_wrong // 2
    least = max(min(minimum, num_wrong), num_kept - num_right)
    most = min(num_wrong, num_kept - min(minimum, num_right))
    return max(least, min(aim, most))


def _num_kept(headers: GroupHeaders, mode: RocMode) -> int:
    """Places for what is left of a group: G of a whole one, in `paper` half of a short one."""
    present = len(headers.rollouts)
    if mode == "off":
        return present
    if mode == "released":  # the published code keeps G or nothing
        return headers.group_size if present >= headers.group_size else 0
    return min(headers.group_size, present * headers.group_size // max(1, headers.num_rollouts))


def _rng(run_seed: int, group: int) -> random.Random:
    """A generator for one group. Only its `random()` may be used: Python promises that sequence across versions."""
    digest = blake2b(f"roc:{run_seed}:{group}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def _draw(rng: random.Random, weights: Sequence[float], count: int) -> list[int]:
    """`count` positions drawn one after the other, without replacement, each time in proportion to the weights left.

    Running sums are made by plain additions from left to right: `sum` rounds differently from Python 3.12 on.
    """
    left = list(range(len(weights)))
    drawn = []
    for _ in range(count):
        bounds = list(accumulate(weights[at] for at in left))
        place = bisect_right(bounds, rng.random() * bounds[-1])
        drawn.append(left.pop(min(place, len(left) - 1)))
    return drawn
