"""Builders of rollout headers and groups for the tests of RoC.

Consumes    rewards, statuses, sizes
Produces    Finish and GroupHeaders records with nothing else in them that matters
"""

from __future__ import annotations

from actors.roc import RocSettings
from buffer.schema import Finish, GroupHeaders

PAPER, RELEASED, OFF = RocSettings(), RocSettings(mode="released"), RocSettings(mode="off")
FAILED = ("error", "exit", "signal", "timeout", "cpu_timeout", "memory", "output_limit", "bad_request", "malformed")
INFRA = ("overloaded", "cancelled", "worker_lost", "internal")


def finish(rollout: int, reward: float, statuses: tuple[str, ...] = (), **fields: object) -> Finish:
    """A rollout with one clean answer, unless told otherwise."""
    values: dict[str, object] = {
        "group": 1,
        "rollout": rollout,
        "attempt": 1,
        "reward": reward,
        "verdict": "right" if reward else "wrong",
        "answer": "70",
        "well_formed": True,
        "num_answers": 1,
        "num_turns": len(statuses) + 1,
        "statuses": statuses,
        "num_output_tokens": 20,
        "num_tokens": 40,
        "end": "answer",
    }
    return Finish(**(values | fields))  # type: ignore[arg-type]


def headers(rollouts: list[Finish], group_size: int, num_rollouts: int | None = None, group: int = 1) -> GroupHeaders:
    issued = 2 * group_size if num_rollouts is None else num_rollouts
    return GroupHeaders(group=group, group_size=group_size, num_rollouts=issued, rollouts=tuple(rollouts))


def split(num_right: int, num_wrong: int) -> list[Finish]:
    return [finish(at, 1.0 if at < num_right else 0.0, ("ok",)) for at in range(num_right + num_wrong)]
