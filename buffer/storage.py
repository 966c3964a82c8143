"""The disk under the buffer: group commits in one thread, reading in others.

Consumes    units: payload records, index statements, and replies that may go out once both are durable
Produces    `commit` returns when a unit is durable; turns of a rollout, trajectories of a batch, recorded rows
Waits for   the disk
Invariant   payload is synced before the rows that point to it commit; units commit in the order they were filled
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from buffer.codec import decode
from buffer.index import ENDS, NEEDED, Index, IndexFault, reading
from buffer.journal import NO_PAYLOAD, Statement
from buffer.schema import RolloutKey, Trajectory, Turn
from buffer.segments import Bytes, Place, Segments, record_bytes
from buffer.spare import Spare


@dataclass(slots=True)
class Unit:
    """What one group commit makes durable."""

    statements: list[Statement] = field(default_factory=list)
    records: list[tuple[Place, Bytes, Bytes]] = field(default_factory=list)
    retain_from_step: int | None = None
    """delete segments that only batches before this step need"""
    num_bytes: int = 0

    @property
    def empty(self) -> bool:
        return not self.statements and not self.records and self.retain_from_step is None


class Storage:
    """Index and segments of one run directory."""

    def __init__(self, directory: Path, run: str, segment_bytes: int) -> None:
        """Raises IndexFault or SegmentError, with the remedy, when the directory can't be used."""
        self._path = directory / "buffer" / "index.sqlite"
        self._readers = threading.local()
        self._spare = Spare(directory / "buffer")
        try:
            self._open(directory / "buffer", run, segment_bytes)
        except OSError as error:
            raise IndexFault(f"{directory} can't be written ({error}): the buffer needs to, make it so") from error

    def _open(self, directory: Path, run: str, segment_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError("read-only")
        if told := self._spare.prepare():
            print(f"buffer: {told}", flush=True)
        self.index = Index(self._path)
        self.is_new = self.index.check(run)
        ends = self.index.rows(ENDS)
        last, end_bytes = ends[0] if ends else (0, 0)
        self.segments = Segments(directory / "segments", segment_bytes, last, end_bytes)
        self._spare.attach(self.index)

    def place(self, unit: Unit, body: Bytes, payload: Bytes) -> Place:
        """Put a turn into `unit`; where it will lie."""
        place = self.segments.place(record_bytes(body, payload))
        unit.records.append((place, body, payload))
        unit.num_bytes += place.length_bytes
        return place

    def commit(self, unit: Unit) -> None:
        """Make `unit` durable. Called by one thread."""
        self.segments.append(unit.records)
        if unit.statements:
            self.index.commit(unit.statements, _end(unit))
        if unit.retain_from_step is not None:
            self._retain(unit.retain_from_step)

    def _retain(self, from_step: int) -> None:
        """Delete the segments that nothing needs: no group being worked on, an evaluation's included, no kept group,
        no batch from `from_step` on.
        """
        needed = self.index.rows(NEEDED, (from_step,))
        self.segments.delete(self.segments.numbers() - {row[0] for row in needed})

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Committed rows; any thread."""
        if not hasattr(self._readers, "db"):
            self._readers.db = reading(self._path, timeout_s=30.0)
        return self._readers.db.execute(sql, parameters).fetchall()

    def turns(self, key: RolloutKey, *, writable: bool = False) -> list[Turn]:
        """The durable turns of a rollout, in order; any thread."""
        rows = self.rows(
            "SELECT segment, offset_bytes, length_bytes FROM turns WHERE group_id = ? AND rollout = ? ORDER BY turn",
            key,
        )
        places = (Place(segment=s, offset_bytes=o, length_bytes=n) for s, o, n in rows)
        return [decode(Turn, body, payload, writable=writable) for body, payload in self.segments.read(places)]

    def trajectories(self, keys: Iterable[RolloutKey], max_bytes: int) -> list[Trajectory]:
        """The trajectories of the first keys, at least one, up to about `max_bytes`; any thread."""
        out: list[Trajectory] = []
        num_bytes = 0
        for key in keys:
            turns = self.turns(key)
            if not turns:
                break
            out.append(trajectory(turns))
            num_bytes += 13 * len(out[-1].ids)
            if num_bytes >= max_bytes:
                break
        return out

    def close(self) -> None:
        self.segments.close()
        self._spare.close()
        self.index.close()


def _end(unit: Unit) -> tuple[int, int]:
    """Where its payload ends."""
    if not unit.records:
        return NO_PAYLOAD
    place = unit.records[-1][0]
    return place.segment, place.offset_bytes + place.length_bytes


def trajectory(turns: Sequence[Turn]) -> Trajectory:
    """What the learner trains: prompt, then output and observation of each turn.

    The observation of the last turn is left out: nothing was sampled after it.
    """
    ids, sampled, logprobs, versions = [turns[0].prompt_ids], [], [], []
    context = len(turns[0].prompt_ids)
    for turn in turns:
        sampled += [np.zeros(context, np.bool_), np.ones(len(turn.output_ids), np.bool_)]
        logprobs += [np.zeros(context, np.float32), turn.logprobs]
        runs = [np.full(run.num_tokens, run.version, np.int32) for run in turn.version_runs]
        versions += [np.full(context, -1, np.int32), *runs]
        ids += [turn.output_ids, turn.observation_ids]
        context = len(turn.observation_ids)
    return Trajectory(
        group=turns[0].group,
        rollout=turns[0].rollout,
        ids=np.concatenate(ids[:-1]),
        sampled=np.concatenate(sampled),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
    )
