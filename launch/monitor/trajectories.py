"""One trajectory as people read it: thought, code, result, reward, RoC's penalties, versions.

Consumes    the index, the segments, the tokenizer of the run's model
Produces    `Trajectory`, its lines; the next and the previous one
Waits for   nothing but the disk
Invariant   what the model wrote is decoded from the tokens that were sampled; without their payload or a tokenizer that
            is said, and nothing is made up
"""

from __future__ import annotations

import json
import sqlite3
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgpack

from actors.tool_call import without_calls
from buffer.schema import Turn
from launch.monitor.records import payload

Decode: TypeAlias = Callable[[Sequence[int]], str]
Key: TypeAlias = tuple[int, int]
"""(group, rollout)"""
WIDTH = 100
CODE, RESULT, WORDS = "  | ", "  > ", "  "
MOVES = {
    "next": "(group_id, rollout) > (?, ?) ORDER BY group_id, rollout",
    "previous": "(group_id, rollout) < (?, ?) ORDER BY group_id DESC, rollout DESC",
    "next group": "group_id = (SELECT min(group_id) FROM turns WHERE group_id > ? + 0 * ?) ORDER BY rollout",
    "previous group": "group_id = (SELECT max(group_id) FROM turns WHERE group_id < ? + 0 * ?) ORDER BY rollout",
}
HEAD = """
SELECT g.kind, g.phase, g.problem_id, g.problem, g.state, g.base_version, g.deadline_step, g.step, g.drop_reason,
    g.num_rollouts, g.kept, g.p_err, g.p_format, r.state, r.attempt, r.engine, r.excluded_reason, r.reward, r.verdict,
    r.answer, r.end, r.num_output_tokens, r.num_tokens
FROM rollouts r JOIN groups g USING (group_id) WHERE r.group_id = ? AND r.rollout = ?
"""
TURNS = """
SELECT turn, attempt, engine, num_output_tokens, version_runs, status, segment, offset_bytes, length_bytes FROM turns
WHERE group_id = ? AND rollout = ? ORDER BY turn
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnText:
    """A turn; `told` is its payload, None where it was deleted."""

    number: int
    attempt: int
    engine: str
    num_tokens: int
    versions: tuple[tuple[int, int], ...]
    """(version, tokens) in their order"""
    status: str
    told: Turn | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A rollout of any state that has begun."""

    key: Key
    head: dict[str, Any]
    """columns of HEAD by name"""
    problem: str
    right_answer: str
    finished: tuple[int, ...]
    """rollouts of the group that have a score, ascending: RoC's penalties are in this order"""
    turns: tuple[TurnText, ...]


def newest(db: sqlite3.Connection) -> Key | None:
    """The first kept rollout of the newest group that RoC kept; before there is one, any with a turn."""
    row = db.execute(
        "SELECT group_id, json_extract(kept, '$[0]') FROM groups WHERE kept <> '[]' "
        "AND EXISTS (SELECT 1 FROM turns t WHERE t.group_id = groups.group_id) ORDER BY group_id DESC LIMIT 1"
    ).fetchone()
    row = row or db.execute("SELECT group_id, rollout FROM turns LIMIT 1").fetchone()
    return (row[0], row[1]) if row else None


def moved(db: sqlite3.Connection, key: Key, move: str) -> Key:
    """Where that leads among rollouts with a turn; at the end of all, where it was."""
    row = db.execute(f"SELECT group_id, rollout FROM turns WHERE {MOVES[move]} LIMIT 1", key).fetchone()
    return (row[0], row[1]) if row else key


def read(db: sqlite3.Connection, directory: Path, key: Key) -> Trajectory | None:
    """None when there is no such rollout."""
    cursor = db.execute(HEAD, key)
    row = cursor.fetchone()
    if row is None:
        return None
    names = [column[0] for column in cursor.description]
    names[names.index("state")] = "group_state"
    head = dict(zip(names, row, strict=True))
    _, problem, answer, *_ = msgpack.unpackb(head.pop("problem"))
    scored = db.execute(
        "SELECT rollout FROM rollouts WHERE group_id = ? AND state = 'finished' ORDER BY rollout", key[:1]
    )
    turns = db.execute(TURNS, key).fetchall()
    return Trajectory(
        key=key,
        head=head,
        problem=problem,
        right_answer=answer,
        finished=tuple(rollout for (rollout,) in scored),
        turns=tuple(_turn(turn, directory) for turn in turns),
    )


def _turn(row: Sequence[Any], directory: Path) -> TurnText:
    number, attempt, engine, num_tokens, runs, status, *place = row
    return TurnText(
        number=number,
        attempt=attempt,
        engine=engine,
        num_tokens=num_tokens,
        versions=tuple((version, count) for _, version, count in json.loads(runs)),
        status=status,
        told=payload(directory, *place),
    )


def lines(told: Trajectory, decode: Decode | None) -> list[str]:
    """The trajectory as text."""
    out = [*_head(told), "", "---- PROBLEM", *_indented(told.problem, WORDS)]
    for turn in told.turns:
        out += ["", *_turn_lines(turn, decode)]
    return out


def _head(told: Trajectory) -> Iterator[str]:
    head, (group, rollout) = told.head, told.key
    what = "training" if head["kind"] == "train" else f"evaluation {head['phase']}"
    yield f"---- TRAJECTORY  group {group}, rollout {rollout} of {head['num_rollouts']}; {what}; {head['problem_id']}"
    if head["state"] == "finished":
        yield (
            f"reward {head['reward']:g}: answer {head['answer'] or '(none)'!s:.60} is {head['verdict']}, wanted "
            f"{told.right_answer:.60}; ended by {head['end']}; {head['num_output_tokens']} tokens sampled of "
            f"{head['num_tokens']}"
        )
    else:
        why = f": {head['excluded_reason']}" if head["excluded_reason"] else ""
        yield f"{head['state']}{why}; wanted {told.right_answer:.60}"
    if head["kind"] == "train":
        yield f"RoC: {_roc(told)}"
        yield (
            f"group {_fate(head)}; base version {head['base_version']}, deadline step "
            f"{head['deadline_step']}; lease {head['attempt']} by {head['engine'] or 'nobody'}"
        )


def _roc(told: Trajectory) -> str:
    """Penalties are only known once the group is decided."""
    kept, p_err, p_format = (json.loads(told.head[name]) for name in ("kept", "p_err", "p_format"))
    rollout = told.key[1]
    if told.head["drop_reason"]:
        word = "the group is dropped"
    elif not kept:
        return "not decided yet"
    else:
        word = "kept" if rollout in kept else f"not kept ({len(kept)} others are)"
    at = told.finished.index(rollout) if rollout in told.finished else -1
    if 0 <= at < min(len(p_err), len(p_format)):
        word += f"; penalties: failed calls {p_err[at]:.2f}, form {p_format[at]:.2f}"
    return word


def _fate(head: dict[str, Any]) -> Any:
    if head["drop_reason"]:
        return f"dropped: {head['drop_reason']}"
    return head["group_state"] if head["step"] is None else f"{head['group_state']}, of step {head['step']}"


def _turn_lines(turn: TurnText, decode: Decode | None) -> Iterator[str]:
    runs = ", ".join(f"version {version} ({count} tokens)" for version, count in turn.versions)
    lease = f", lease {turn.attempt}" if turn.attempt > 1 else ""
    told = turn.told
    took = f"; {told.generate_s:.2f} s" if told else ""
    yield f"---- TURN {turn.number}  {turn.engine}{lease}: {runs}{took}"
    if told is None:
        yield f"  {turn.num_tokens} tokens, deleted since no checkpoint needs them; buffer.keep_segments keeps them"
        return
    text = decode(told.output_ids.tolist()) if decode else ""
    thought = without_calls(text) if told.code else text
    yield from _indented(thought, WORDS) if decode else (f"  {turn.num_tokens} tokens; no tokenizer.json is at hand",)
    if turn.status:
        yield f"  CALL {turn.status}: waited {told.tool_queue_s:.3f} s, ran {told.tool_run_s:.3f} s"
        yield from _indented(told.code, CODE)
        yield "  RESULT"
        yield from _indented(told.observation, RESULT)


def _indented(text: str, margin: str) -> Iterator[str]:
    """Its lines, long ones broken; control characters, which a terminal would obey, as their escapes."""
    for line in text.strip("\n").split("\n"):
        plain = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line.expandtabs(4))
        for part in textwrap.wrap(plain, WIDTH, drop_whitespace=False, replace_whitespace=False) or [""]:
            yield f"{margin}{part}".rstrip()


@lru_cache(4)
def decoder(directory: Path, model: str) -> Decode | None:
    """Of the exported model, else of the one that training began with; None when neither has a tokenizer.json."""
    from tokenizers import Tokenizer  # here: only who reads trajectories needs it

    for folder in (directory / "export", Path(model) if model else directory):
        path = folder / "tokenizer.json"
        if path.is_file():
            known = Tokenizer.from_file(str(path))
            return lambda ids: str(known.decode(list(ids), skip_special_tokens=False))
    return None
