"""Single records behind the screen's figures: groups, calls, learner steps, versions.

Consumes    RUN/buffer/index.sqlite and the segments, also while the run goes on; metrics/steps.jsonl
Produces    the newest few of each, frozen
Waits for   nothing but the disk
Invariant   the index is only read; what its run has deleted or not recorded yet is None; every query ends after a few
            rows, so that a long run is as quick to look at as a short one
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from buffer.codec import CodecError, decode, unpack
from buffer.index import reading
from buffer.schema import Turn
from buffer.segments import Place, SegmentError, SegmentGone, read
from launch.config import ConfigError
from launch.monitor.readings import tail

GROUPS = """
SELECT g.group_id, g.problem_id, g.state, g.base_version, g.deadline_step, g.step, g.decided_step, g.drop_reason,
    g.num_rollouts, g.issued_unix_s, g.decided_unix_s, json_array_length(g.kept),
    (SELECT count(*) FROM rollouts r WHERE r.group_id = g.group_id AND r.state = 'finished'),
    (SELECT count(*) FROM rollouts r WHERE r.group_id = g.group_id AND r.state = 'leased')
FROM groups g
"""
OUTSTANDING = "WHERE g.kind = 'train' AND g.state IN ('waiting', 'leased', 'finished', 'taken') ORDER BY g.group_id"
CLOSED = "WHERE g.kind = 'train' AND +g.state IN ('released', 'dropped') ORDER BY g.group_id DESC LIMIT ?"
"""by group, not by the index of states, which would first collect them all"""
CALLS = """
SELECT received_unix_s, engine, group_id, rollout, turn, status, segment, offset_bytes, length_bytes FROM turns
WHERE status <> '' ORDER BY segment DESC, offset_bytes DESC LIMIT ?
"""


class NoRecords(ConfigError):
    """The run has no index, or none that can be read; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A group of training; its fields are the columns of GROUPS."""

    group: int
    problem: str
    state: str
    base: int
    deadline: int
    step: int | None
    decided_step: int | None
    drop_reason: str
    num_rollouts: int
    issued_unix_s: float
    decided_unix_s: float | None
    num_kept: int
    num_finished: int
    num_leased: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A turn that called the tool."""

    unix_s: float
    """when the turn was durable"""
    engine: str
    group: int
    rollout: int
    turn: int
    status: str
    queue_s: float | None
    run_s: float | None
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """An engine has loaded a version."""

    engine: str
    version: int
    unix_s: float
    pause_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A publication and who has loaded it."""

    lineage: int
    version: int
    published_unix_s: float
    acks: tuple[Ack, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What there is on record of a learner step; the last that computed it."""

    step: int
    taken_unix_s: float
    num_groups: int | None
    fetched_unix_s: float | None
    trained_unix_s: float | None
    published_unix_s: float | None
    checkpoint_unix_s: float | None
    acks: tuple[Ack, ...]
    reward: float | None
    age: float | None


@contextmanager
def opened(directory: Path) -> Iterator[sqlite3.Connection]:
    """The index, to be read.

    Raises:
        NoRecords: there is none, or it cannot be read.
    """
    index = directory / "buffer" / "index.sqlite"
    if not index.is_file():
        raise NoRecords(f"nothing is recorded yet (no buffer/index.sqlite in {directory}): let the run train first")
    try:
        with closing(reading(index)) as db:
            yield db
    except sqlite3.Error as error:
        raise NoRecords(f"{index} cannot be read: {error}") from error


def groups(db: sqlite3.Connection, num_closed: int) -> tuple[list[Group], list[Group]]:
    """All that are active, oldest first; the newest that are closed, newest first."""
    active = [_group(row) for row in db.execute(GROUPS + OUTSTANDING)]
    return active, [_group(row) for row in db.execute(GROUPS + CLOSED, (num_closed,))]


def _group(row: Sequence[object]) -> Group:
    return Group(**dict(zip((field.name for field in fields(Group)), row, strict=True)))  # type: ignore[arg-type]


def calls(db: sqlite3.Connection, directory: Path, count: int) -> list[Call]:
    """The newest, newest first."""
    out = []
    for at_s, engine, group, rollout, turn, status, *place in db.execute(CALLS, (count,)):
        held = payload(directory, *place)
        told = Call(
            unix_s=at_s,
            engine=engine,
            group=group,
            rollout=rollout,
            turn=turn,
            status=status,
            queue_s=held.tool_queue_s if held else None,
            run_s=held.tool_run_s if held else None,
            code=held.code if held else "",
        )
        out.append(told)
    return out


def payload(directory: Path, segment: int, offset: int, length: int) -> Turn | None:
    """A turn's record; None where it was deleted, since no kept checkpoint needs it.

    Raises:
        NoRecords: its bytes are not what they were.
    """
    found = _record(directory, segment, offset, length)
    try:
        return None if found is None else decode(Turn, *found)
    except CodecError as error:
        raise NoRecords(str(error)) from error


def seconds_of(directory: Path, segment: int, offset: int, length: int) -> tuple[float, float, float] | None:
    """generate_s, tool_queue_s, tool_run_s of a turn: the last fields of its record; None where it was deleted.

    Raises:
        NoRecords: its bytes are not what they were.
    """
    found = _record(directory, segment, offset, length)
    if found is None:
        return None
    generate_s, queue_s, run_s = unpack(found[0], len(found[0]))[-3:]
    return float(generate_s), float(queue_s), float(run_s)


def _record(directory: Path, segment: int, offset: int, length: int) -> tuple[memoryview, memoryview] | None:
    place = Place(segment=segment, offset_bytes=offset, length_bytes=length)
    try:
        return read(directory / "buffer" / "segments", [place])[0]
    except SegmentGone:
        return None
    except SegmentError as error:
        raise NoRecords(str(error)) from error


def versions(db: sqlite3.Connection, count: int) -> list[Version]:
    """The newest, newest first."""
    rows = db.execute("SELECT lineage, version, unix_s FROM publications ORDER BY 1 DESC, 2 DESC LIMIT ?", (count,))
    found = rows.fetchall()
    acks = _acks(db, min((version for _, version, _ in found), default=0))
    return [
        Version(lineage=lineage, version=version, published_unix_s=at_s, acks=tuple(acks[lineage, version]))
        for lineage, version, at_s in found
    ]


def _acks(db: sqlite3.Connection, least: int) -> defaultdict[tuple[int, int], list[Ack]]:
    """By lineage and version, of versions from `least` on; by engine's name."""
    out: defaultdict[tuple[int, int], list[Ack]] = defaultdict(list)
    rows = db.execute(
        "SELECT lineage, name, version, unix_s, pause_s FROM acknowledgements WHERE version >= ? ORDER BY name",
        (least,),
    )
    for lineage, name, version, at_s, pause_s in rows:
        out[lineage, version].append(Ack(engine=name, version=version, unix_s=at_s, pause_s=pause_s))
    return out


def steps(db: sqlite3.Connection, directory: Path, count: int) -> list[Step]:
    """The newest, oldest first."""
    lines = {line["step"]: line for line in tail(directory / "metrics" / "steps.jsonl", None)}
    taken = db.execute("SELECT step, taken_unix_s FROM batches ORDER BY step DESC LIMIT ?", (count,)).fetchall()
    least = min((step for step, _ in taken), default=0)
    acks, published = _acks(db, least), _published(db, least)
    saved = dict(db.execute("SELECT version, unix_s FROM checkpoints WHERE version > ?", (least,)).fetchall())
    out = []
    for step, taken_s in reversed(taken):
        lineage, published_s = published.get(step + 1, (-1, None))
        told = lines.get(step, {})
        end_s = told.get("time_s")
        record = Step(
            step=step,
            taken_unix_s=taken_s,
            num_groups=told.get("groups"),
            fetched_unix_s=None if end_s is None else end_s - told["train_s"],
            trained_unix_s=end_s,
            published_unix_s=published_s,
            checkpoint_unix_s=saved.get(step + 1),
            acks=tuple(acks[lineage, step + 1]),
            reward=told.get("reward_mean"),
            age=told.get("age_mean"),
        )
        out.append(record)
    return out


def _published(db: sqlite3.Connection, least: int) -> Mapping[int, tuple[int, float]]:
    """Version -> (lineage, when), of the first lineage: later ones published it again, after a restart."""
    rows = db.execute(
        "SELECT version, lineage, unix_s FROM publications WHERE version > ? ORDER BY lineage DESC", (least,)
    )
    return {version: (lineage, at_s) for version, lineage, at_s in rows}
