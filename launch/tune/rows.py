"""Rows of a run's index, as records of work.

Consumes    an open index (buffer/index.py), the segments beside it
Produces    groups with their rollouts and turns, learner steps, swaps, and the delays between them
Waits for   nothing but the disk
Invariant   only what is complete counts: groups that RoC decided on, rollouts with a score, published versions
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer.schema import Finish
from launch.monitor.records import seconds_of
from launch.tune.shapes import GroupWork, RolloutWork, StepTime, SwapTime, TurnWork

GROUPS = """
SELECT group_id, num_rollouts FROM groups WHERE kind = 'train' AND timed_out = 0 AND scored_unix_s IS NOT NULL
AND decided_unix_s BETWEEN ? AND ? ORDER BY group_id DESC LIMIT ?
"""
ROLLOUTS = """
SELECT rollout, reward, verdict, answer, well_formed, num_answers, num_turns, statuses, num_output_tokens, num_tokens,
end, tool_s FROM rollouts WHERE group_id = ? AND state = 'finished' ORDER BY rollout
"""
TURNS = """
SELECT rollout, segment, offset_bytes, length_bytes, num_prompt_tokens, num_output_tokens, num_observation_tokens,
status FROM turns WHERE group_id = ? ORDER BY rollout, turn
"""
STEPS = """
SELECT b.step, min(p.unix_s) - b.taken_unix_s FROM batches b JOIN publications p ON p.version = b.step + 1
WHERE b.step >= ? AND b.step < ? GROUP BY b.step ORDER BY b.step
"""
SWAPS = """
SELECT a.unix_s - min(p.unix_s), a.pause_s FROM acknowledgements a JOIN publications p USING (lineage, version)
WHERE a.version > ? AND a.version <= ? GROUP BY a.name, a.epoch, a.lineage, a.version ORDER BY a.unix_s
"""
REST = """
SELECT avg(finished_unix_s - leased_unix_s - generate_s - tool_s) FROM rollouts
WHERE group_id >= 0 AND state = 'finished' AND attempt = 1 AND finished_unix_s BETWEEN ? AND ?
"""
DECIDED = """
SELECT avg(decided_unix_s - scored_unix_s) FROM groups WHERE kind = 'train' AND decided_unix_s BETWEEN ? AND ?
"""


def groups(db: sqlite3.Connection, directory: Path, from_s: float, to_s: float, most: int) -> tuple[GroupWork, ...]:
    """Decided in the window; the newest, oldest first."""
    found = db.execute(GROUPS, (from_s, to_s, most)).fetchall()
    works = (
        GroupWork(num_rollouts=count, rollouts=_rollouts(db, directory, group)) for group, count in reversed(found)
    )
    return tuple(work for work in works if work.rollouts)


def _rollouts(db: sqlite3.Connection, directory: Path, group: int) -> tuple[RolloutWork, ...]:
    turns: dict[int, list[tuple[Any, ...]]] = {}
    for rollout, *turn in db.execute(TURNS, (group,)):
        turns.setdefault(rollout, []).append(tuple(turn))
    out = []
    for row in db.execute(ROLLOUTS, (group,)):
        finish = _finish(group, row)
        if turns.get(finish.rollout):
            out.append(RolloutWork(turns=_turns(turns[finish.rollout], finish, directory), finish=finish))
    return tuple(out)


def _finish(group: int, row: tuple[Any, ...]) -> Finish:
    rollout, reward, verdict, answer, well_formed, num_answers, num_turns, statuses, output, tokens, end, tool_s = row
    return Finish(
        group=group,
        rollout=rollout,
        attempt=1,
        reward=reward,
        verdict=verdict,
        answer=answer,
        well_formed=bool(well_formed),
        num_answers=num_answers,
        num_turns=num_turns,
        statuses=tuple(json.loads(statuses)),
        num_output_tokens=output,
        num_tokens=tokens,
        end=end,
        tool_s=tool_s or 0.0,
    )


def _turns(rows: list[tuple[Any, ...]], finish: Finish, directory: Path) -> tuple[TurnWork, ...]:
    """With the seconds of each call; where the payload is gone, an equal part of the rollout's."""
    context, out = 0, []
    for segment, offset, length, prompt, output, observation, status in rows:
        run_s = 0.0
        if status:
            found = seconds_of(directory, segment, offset, length)
            run_s = found[-1] if found is not None else finish.tool_s / max(1, len(finish.statuses))
        given = context + prompt
        context = given + output + observation
        called = bool(status) and status != "malformed"
        out.append(TurnWork(num_tokens=output, given_tokens=given, context_tokens=context, called=called, run_s=run_s))
    return tuple(out)


def steps(db: sqlite3.Connection, first: int, last: int) -> tuple[StepTime, ...]:
    """Of the window, whose version was published; tokens are those of the kept rollouts."""
    kept: dict[int, int] = {}
    lengths: Mapping[tuple[int, int], int] = {
        (group, rollout): tokens
        for group, rollout, tokens in db.execute(
            "SELECT r.group_id, r.rollout, r.num_tokens FROM rollouts r JOIN groups g USING (group_id) "
            "WHERE g.kind = 'train' AND g.step >= ? AND g.step < ?",
            (first, last),
        )
    }
    chosen = db.execute(
        "SELECT group_id, step, kept FROM groups WHERE kind = 'train' AND step >= ? AND step < ?", (first, last)
    )
    for group, step, rollouts in chosen:
        kept[step] = kept.get(step, 0) + sum(lengths[group, rollout] for rollout in json.loads(rollouts))
    return tuple(
        StepTime(num_tokens=kept[step], wall_s=max(0.0, wall_s))
        for step, wall_s in db.execute(STEPS, (first, last))
        if step in kept
    )


def swaps(db: sqlite3.Connection, first: int, last: int) -> tuple[SwapTime, ...]:
    """Of the window's versions, by every engine."""
    return tuple(
        SwapTime(receive_s=max(0.0, lag_s - pause_s), pause_s=pause_s)
        for lag_s, pause_s in db.execute(SWAPS, (first, last))
    )


def rollout_rest_s(db: sqlite3.Connection, from_s: float, to_s: float) -> float:
    """Mean of a rollout's life neither generating nor calling: messages, the disk, grading."""
    return max(0.0, db.execute(REST, (from_s, to_s)).fetchone()[0] or 0.0)


def decide_s(db: sqlite3.Connection, from_s: float, to_s: float) -> float:
    """Mean from a group's last score to RoC's word."""
    return max(0.0, db.execute(DECIDED, (from_s, to_s)).fetchone()[0] or 0.0)
