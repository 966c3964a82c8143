"""A run directory as it lies on disk, read by the documented formats and by nothing of the program that wrote it.

Consumes    RUN/buffer/index.sqlite (tables: buffer/index.py), RUN/recipe.toml and RUN/summary.json where they are
Produces    Run: its groups, rollouts, turns, batches and the rest as plain records
Waits for   nothing; the index is read in one transaction, also while the run goes on
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

OUTSTANDING = ("waiting", "leased", "finished")
"""states of a training group that is neither taken, dropped nor unused"""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A row of `rollouts`, with its turns."""

    group: int
    number: int
    state: str
    excluded_reason: str
    reward: float
    verdict: str
    answer: str
    well_formed: bool
    num_answers: int
    num_turns: int
    statuses: list[str]
    num_output_tokens: int
    num_tokens: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def length(self) -> int:
        """Tokens of the trajectory: without what was observed after the last output."""
        observed = sum(turn.num_observation_tokens for turn in self.turns[:-1])
        return observed + sum(turn.num_prompt_tokens + turn.num_output_tokens for turn in self.turns)


@dataclass(kw_only=True, slots=True)
class Turn:
    """A row of `turns`."""

    group: int
    rollout: int
    number: int
    attempt: int
    segment: int
    offset: int
    length: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_observation_tokens: int
    version_runs: list[tuple[int, int, int]]
    """(lineage, version, num_tokens)"""
    status: str


@dataclass(kw_only=True, slots=True)
class Group:
    """A row of `groups`, with its rollouts by number."""

    id: int
    kind: str
    phase: str
    problem_index: int
    problem_id: str
    problem: str
    gold: str
    num_rollouts: int
    base: int
    deadline: int
    max_staleness: int
    state: str
    drop_reason: str
    timed_out: bool
    kept: list[int]
    p_err: list[float]
    p_format: list[float]
    decided_step: int | None
    step: int | None
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def finished(self) -> list[Rollout]:
        """Scored rollouts, by number."""
        return [rollout for _, rollout in sorted(self.rollouts.items()) if rollout.finished]

    @property
    def kept_rollouts(self) -> list[Rollout]:
        """Those of `kept` that there are (that all are is a check of its own)."""
        return [self.rollouts[number] for number in self.kept if number in self.rollouts]


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything the index says, and what the run claims."""

    directory: Path
    meta: dict[str, Any]
    groups: dict[int, Group]
    turns: list[Turn]
    batches: dict[int, tuple[int, list[Any]]]
    """step: (acked when taken, [step, [[group, base, deadline, rollouts, rewards, lengths, output lengths]...]])"""
    publications: list[tuple[int, int]]
    published_unix_s: list[tuple[float, int]]
    """time and version of each publication's record, in order"""
    raised_unix_s: list[tuple[float, int]]
    """time of each acknowledgement, and the version that all live engines had after it, in order"""
    """(lineage, version)"""
    evaluations: dict[str, tuple[int, int, int]]
    """phase: (lineage, version, num_problems)"""
    checkpoints: list[tuple[int, bool]]
    """(version, kept)"""
    recipe: dict[str, Any]
    summary: dict[str, Any]

    def of_kind(self, kind: str) -> list[Group]:
        return [group for group in self.groups.values() if group.kind == kind]

    @property
    def trained(self) -> list[Group]:
        """Groups whose step has been trained."""
        return [group for group in self.groups.values() if group.step is not None and group.step < self.learner_steps]

    @property
    def learner_steps(self) -> int:
        """Steps in the newest version that is on record."""
        versions = [version for _, version in self.publications] + [version for version, _ in self.checkpoints]
        return max(versions, default=0)

    def segment_path(self, number: int) -> Path:
        return self.directory / "buffer" / "segments" / f"{number:08d}.seg"


def load(directory: Path) -> Run:
    """Read a run directory.

    Raises:
        FileNotFoundError: it holds no index.
    """
    index = directory / "buffer" / "index.sqlite"
    if not index.is_file():
        raise FileNotFoundError(f"{index} is not there: give a run directory")
    db = sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    db.row_factory = sqlite3.Row
    try:
        db.execute("BEGIN")
        groups = {row["group_id"]: _group(row) for row in db.execute("SELECT * FROM groups ORDER BY group_id")}
        for row in db.execute("SELECT * FROM rollouts ORDER BY group_id, rollout"):
            groups[row["group_id"]].rollouts[row["rollout"]] = _rollout(row)
        turns = [_turn(row) for row in db.execute("SELECT * FROM turns ORDER BY group_id, rollout, turn")]
        for turn in turns:
            groups[turn.group].rollouts[turn.rollout].turns.append(turn)
        return Run(
            directory=directory,
            meta=dict(tuple(row) for row in db.execute("SELECT key, value FROM meta")),
            groups=groups,
            turns=turns,
            batches={
                row["step"]: (row["acked"], msgpack.unpackb(row["record"]))
                for row in db.execute("SELECT * FROM batches")
            },
            publications=_pairs(db, "SELECT lineage, version FROM publications ORDER BY unix_s"),
            published_unix_s=_pairs(db, "SELECT unix_s, version FROM publications ORDER BY unix_s"),
            raised_unix_s=_pairs(db, "SELECT unix_s, acked FROM acknowledgements ORDER BY unix_s"),
            evaluations={
                row["phase"]: (row["lineage"], row["version"], row["num_problems"])
                for row in db.execute("SELECT * FROM evaluations")
            },
            checkpoints=[(row["version"], bool(row["kept"])) for row in db.execute("SELECT * FROM checkpoints")],
            recipe=_read(directory / "recipe.toml", tomllib.loads),
            summary=_read(directory / "summary.json", json.loads),
        )
    finally:
        db.close()


def _read(path: Path, parse: Any) -> dict[str, Any]:
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _group(row: sqlite3.Row) -> Group:
    problem = msgpack.unpackb(row["problem"])
    return Group(
        id=row["group_id"],
        kind=row["kind"],
        phase=row["phase"],
        problem_index=row["problem_index"],
        problem_id=row["problem_id"],
        problem=problem[1],
        gold=problem[2],
        num_rollouts=row["num_rollouts"],
        base=row["base_version"],
        deadline=row["deadline_step"],
        max_staleness=row["max_staleness"],
        state=row["state"],
        drop_reason=row["drop_reason"],
        timed_out=bool(row["timed_out"]),
        kept=json.loads(row["kept"]),
        p_err=json.loads(row["p_err"]),
        p_format=json.loads(row["p_format"]),
        decided_step=row["decided_step"],
        step=row["step"],
    )


def _rollout(row: sqlite3.Row) -> Rollout:
    return Rollout(
        group=row["group_id"],
        number=row["rollout"],
        state=row["state"],
        excluded_reason=row["excluded_reason"],
        reward=row["reward"] or 0.0,
        verdict=row["verdict"] or "",
        answer=row["answer"] or "",
        well_formed=bool(row["well_formed"]),
        num_answers=row["num_answers"] or 0,
        num_turns=row["num_turns"] or 0,
        statuses=json.loads(row["statuses"] or "[]"),
        num_output_tokens=row["num_output_tokens"] or 0,
        num_tokens=row["num_tokens"] or 0,
    )


def _pairs(db: sqlite3.Connection, sql: str) -> list[tuple[Any, Any]]:
    return [(row[0], row[1]) for row in db.execute(sql)]


def _turn(row: sqlite3.Row) -> Turn:
    return Turn(
        group=row["group_id"],
        rollout=row["rollout"],
        number=row["turn"],
        attempt=row["attempt"],
        segment=row["segment"],
        offset=row["offset_bytes"],
        length=row["length_bytes"],
        num_prompt_tokens=row["num_prompt_tokens"],
        num_output_tokens=row["num_output_tokens"],
        num_observation_tokens=row["num_observation_tokens"],
        version_runs=[tuple(run) for run in json.loads(row["version_runs"])],
        status=row["status"],
    )
