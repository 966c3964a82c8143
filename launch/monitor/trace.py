"""`rocstar trace RUN`: what a run recorded, as one time line for Perfetto or chrome://tracing.

Consumes    RUN/buffer/index.sqlite, the segments (times within turns), metrics/steps.jsonl, metrics/*.jsonl
Produces    a JSON object of trace events: a track per rollout slot of each engine (rollouts, turns, tool calls), swaps,
            the sandbox's calls, batches, learner steps, checkpoints, publications; counters
Waits for   nothing; the index is only read, also while the run goes on
Invariant   every event lies within the asked seconds or reaches into them; times are those that the run recorded. A
            turn's generation and call end when the buffer received it, which is a commit later

Processes of the trace are the run's roles, in the order of the work's way.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config import ConfigError
from launch.monitor.readings import History, read_directory
from launch.monitor.records import opened, seconds_of
from launch.monitor.tracks import Span, Tracks

LEARNER, STORE = "learner-0", "buffer-0"
REACH_S = 60.0
"""what ends so much later may have begun within the shown seconds"""
GAUGES = {"rollout": ("requests_running", "rollouts", "kv_tokens"), "sandbox": ("waiting", "placed")}
TICKETS = ("waiting", "leased", "finished", "taken")
ROLLOUTS = """
SELECT engine, group_id, rollout, attempt, leased_unix_s, coalesce(finished_unix_s, ?), state, reward, end
FROM rollouts WHERE leased_unix_s < ? AND coalesce(finished_unix_s, ?) > ? ORDER BY leased_unix_s, group_id, rollout
"""
TURNS = """
SELECT engine, group_id, rollout, turn, received_unix_s, segment, offset_bytes, length_bytes, num_output_tokens,
status, version_runs FROM turns WHERE received_unix_s > ? AND received_unix_s < ? ORDER BY received_unix_s
"""


def trace(directory: Path, seconds: float, until_unix_s: float | None = None) -> dict[str, Any]:
    """The last `seconds` of what the run recorded, or those before `until_unix_s`.

    Raises:
        ConfigError: nothing is recorded.
    """
    with opened(directory) as db:
        end_s = until_unix_s or _last(db)
        if end_s is None:
            raise ConfigError(f"{directory}: nothing is recorded yet")
        tracks = Tracks(Span(from_s=end_s - seconds, to_s=end_s))
        _rollouts(db, directory, tracks)
        _swaps(db, tracks)
        _records(db, tracks)
    history = read_directory(directory)
    _steps(history, tracks)
    _counters(history, tracks)
    told = {"run": directory.name, "from_unix_s": tracks.span.from_s, "to_unix_s": tracks.span.to_s}
    return {"traceEvents": tracks.events, "displayTimeUnit": "ms", "otherData": told}


def _last(db: sqlite3.Connection) -> float | None:
    """When the last thing happened that is shown."""
    row = db.execute(
        "SELECT max(at) FROM (SELECT max(received_unix_s) AS at FROM turns UNION SELECT max(unix_s) FROM publications "
        "UNION SELECT max(unix_s) FROM acknowledgements UNION SELECT max(unix_s) FROM dials)"
    ).fetchone()
    return None if row[0] is None else float(row[0]) + 1e-3


def _rollouts(db: sqlite3.Connection, directory: Path, tracks: Tracks) -> None:
    """Each engine's rollouts on as many tracks as it held at once, with their turns and calls inside."""
    span, slots = tracks.span, _Slots()
    where: dict[tuple[int, int], tuple[str, float]] = {}
    query = (span.to_s, span.to_s, span.to_s, span.from_s)
    for engine, group, rollout, attempt, start_s, end_s, state, reward, end in db.execute(ROLLOUTS, query):
        track = slots.take(engine, start_s, end_s)
        where[group, rollout] = track, start_s
        told = {"group": group, "rollout": rollout, "attempt": attempt, "state": state, "reward": reward, "end": end}
        tracks.slice(engine, track, f"rollout {group}.{rollout}", start_s, end_s, **told)
    for row in _turns(db, directory, span):
        if (row.group, row.rollout) in where:
            track, after_s = where[row.group, row.rollout]
            _turn(row, track, min(after_s, row.received_s), tracks)
            where[row.group, row.rollout] = track, row.received_s


class _Slots:
    """Gives rollouts that overlap tracks of their own."""

    def __init__(self) -> None:
        self._free: dict[str, list[tuple[float, int]]] = {}

    def take(self, engine: str, start_s: float, end_s: float) -> str:
        heap = self._free.setdefault(engine, [])
        slot = heapq.heappop(heap)[1] if heap and heap[0][0] <= start_s else len(heap)
        heapq.heappush(heap, (end_s, slot))
        return f"slot {slot:03d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _TurnRow:
    """A durable turn."""

    engine: str
    group: int
    rollout: int
    turn: int
    received_s: float
    num_tokens: int
    status: str
    version_runs: str
    generate_s: float
    queue_s: float
    run_s: float


def _turns(db: sqlite3.Connection, directory: Path, span: Span) -> Iterator[_TurnRow]:
    """With the times that only the payload holds; 0 where it was deleted."""
    for engine, group, rollout, turn, at_s, segment, offset, length, tokens, status, runs in db.execute(
        TURNS, (span.from_s, span.to_s + REACH_S)
    ):
        generate_s, queue_s, run_s = seconds_of(directory, segment, offset, length) or (0.0, 0.0, 0.0)
        yield _TurnRow(
            engine=engine,
            group=group,
            rollout=rollout,
            turn=turn,
            received_s=at_s,
            num_tokens=tokens,
            status=status,
            version_runs=runs,
            generate_s=generate_s,
            queue_s=queue_s,
            run_s=run_s,
        )


def _turn(row: _TurnRow, track: str, after_s: float, tracks: Tracks) -> None:
    """A turn, and in it the generation, the wait for the sandbox and the call; none begins before the turn before."""
    end_s = row.received_s
    run_s = max(after_s, end_s - row.run_s)
    queue_s = max(after_s, run_s - row.queue_s)
    start_s = max(after_s, queue_s - row.generate_s)
    told = {"tokens": row.num_tokens, "versions": json.loads(row.version_runs), "status": row.status}
    tracks.slice(row.engine, track, f"turn {row.turn}", start_s, end_s, **told)
    tracks.slice(row.engine, track, "generate", start_s, queue_s, tokens=row.num_tokens)
    if row.status:
        if row.queue_s:
            tracks.slice(row.engine, track, "wait for sandbox", queue_s, run_s)
        tracks.slice(row.engine, track, "call", run_s, end_s, status=row.status)


def _swaps(db: sqlite3.Connection, tracks: Tracks) -> None:
    """Pauses of engines for a version."""
    for name, lineage, version, pause_s, at_s in db.execute(
        "SELECT name, lineage, version, pause_s, unix_s FROM acknowledgements ORDER BY unix_s"
    ):
        told = {"lineage": lineage, "version": version}
        tracks.slice(name, "weights", f"swap to version {version}", at_s - pause_s, at_s, **told)


def _records(db: sqlite3.Connection, tracks: Tracks) -> None:
    """What the buffer put on record: decided groups, batches, publications, checkpoints, dials."""
    for step, at_s, acked in db.execute("SELECT step, taken_unix_s, acked FROM batches ORDER BY step"):
        tracks.mark(STORE, "batches", f"batch of step {step}", at_s, acked=acked)
    for group, at_s, reason in db.execute(
        "SELECT group_id, decided_unix_s, drop_reason FROM groups WHERE decided_unix_s IS NOT NULL ORDER BY 2"
    ):
        tracks.mark(STORE, "groups", f"group {group} {f'dropped: {reason}' if reason else 'kept'}", at_s)
    for version, at_s in db.execute("SELECT version, unix_s FROM publications ORDER BY unix_s"):
        tracks.mark(LEARNER, "publications", f"version {version}", at_s)
    for version, at_s in db.execute("SELECT version, unix_s FROM checkpoints ORDER BY unix_s"):
        tracks.mark(LEARNER, "checkpoints", f"checkpoint {version}", at_s)
    for name, value, at_s in db.execute("SELECT name, value, unix_s FROM dials ORDER BY id"):
        tracks.mark(STORE, "dials", f"{name} = {value:g}", at_s)


def _steps(history: History, tracks: Tracks) -> None:
    """The learner's steps: fetching, then training."""
    for step in history.steps:
        end_s, train_s = step["time_s"], step["train_s"]
        start_s = end_s - step["step_s"]
        figures = {key: value for key, value in step.items() if isinstance(value, int | float)}
        tracks.slice(LEARNER, "steps", f"step {step['step']}", start_s, end_s, **figures)
        tracks.slice(LEARNER, "steps", "fetch", start_s, end_s - train_s)
        tracks.slice(LEARNER, "steps", "train", end_s - train_s, end_s)


def _counters(history: History, tracks: Tracks) -> None:
    """Present figures, once a second."""
    for reading in history.readings:
        states = (reading.standing.get("tickets") or {}).get("by_state", {})
        tracks.counter(STORE, "tickets", reading.unix_s, {state: states.get(state, 0) for state in TICKETS})
        for name, role in reading.roles.items():
            wanted = GAUGES.get(name.rpartition("-")[0], ())
            gauges = {key: value for key in wanted if (value := role["gauges"].get(key)) is not None}
            for key, value in gauges.items():
                tracks.counter(name, key, reading.unix_s, {key: value})
