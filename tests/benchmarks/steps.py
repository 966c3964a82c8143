"""When a real run takes the batches of its steps, and what it came to between two of them.

Consumes    a run that a Victim has started; RUN/buffer/index.sqlite, which is only read
Produces    the moments at which batches were taken; figures of a span of steps
Waits for   the batch of a step, at most PATIENCE_S
Invariant   times are those that the run itself recorded
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from buffer.index import reading
from tests.chaos.victim import Victim

PATIENCE_S = 300.0


def index(directory: Path) -> sqlite3.Connection:
    """The run's, read-only."""
    return reading(directory / "buffer" / "index.sqlite")


def taken(victim: Victim, step: int, patience_s: float = PATIENCE_S) -> float:
    """When the batch of `step` was taken, seconds since 1970, as soon as it was."""
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s and victim.exit_code is None:
        moment = _moment(victim.directory, step)
        if moment is not None:
            return moment
        time.sleep(0.1)
    raise SystemExit(f"no batch of step {step} within {patience_s:.0f} s\n{victim.told()}")


def _moment(directory: Path, step: int) -> float | None:
    if not (directory / "buffer" / "index.sqlite").exists():
        return None
    with closing(index(directory)) as db:
        try:
            row = db.execute("SELECT taken_unix_s FROM batches WHERE step = ?", (step,)).fetchone()
        except sqlite3.OperationalError:  # the table is not there yet
            return None
        return None if row is None else float(row[0])


def span(directory: Path, first: int, last: int) -> dict[str, Any]:
    """Of the time from the batch of step `first` to that of step `last`."""
    with closing(index(directory)) as db:
        begin_s, end_s = (
            db.execute("SELECT taken_unix_s FROM batches WHERE step = ?", (step,)).fetchone()[0]
            for step in (first, last)
        )
        groups = db.execute(
            "SELECT count(*) FROM groups WHERE kind = 'train' AND step >= ? AND step < ?", (first, last)
        ).fetchone()[0]
        decided = dict(
            db.execute(
                "SELECT coalesce(nullif(drop_reason, ''), 'kept'), count(*) FROM groups WHERE kind = 'train' AND "
                "decided_unix_s BETWEEN ? AND ? GROUP BY 1",
                (begin_s, end_s),
            )
        )
        rollouts, calls, tool_s = db.execute(
            "SELECT count(*), coalesce(sum(json_array_length(statuses)), 0), coalesce(sum(tool_s), 0) FROM rollouts"
            " JOIN groups USING (group_id) WHERE kind = 'train' AND rollouts.state = 'finished'"
            " AND finished_unix_s BETWEEN ? AND ?",
            (begin_s, end_s),
        ).fetchone()
        age, slowest_s, renewal_s = _age(db, first, last), _slowest_s(db, first, last), _renewal_s(db, first, last)
    seconds = end_s - begin_s
    return {
        "first_step": first,
        "steps": last - first,
        "seconds": round(seconds, 2),
        "groups_trained": groups,
        "groups_per_min": round(60 * groups / seconds, 2),
        "groups_kept_per_min": round(60 * decided.get("kept", 0) / seconds, 2),
        "groups_decided": decided,
        "age_mean": None if age is None else round(age, 3),
        "rollouts_per_s": round(rollouts / seconds, 1),
        "calls_per_rollout": round(calls / rollouts, 3) if rollouts else None,
        "tool_s_per_call": round(tool_s / calls, 3) if calls else None,
        "slowest_group_s": slowest_s,
        "renewal_s": renewal_s,
    }


def _age(db: sqlite3.Connection, first: int, last: int) -> float | None:
    """Mean over the trained tokens, by the versions that sampled them."""
    rows = db.execute(
        "SELECT g.step, t.version_runs FROM groups g JOIN turns t USING (group_id) WHERE g.kind = 'train'"
        " AND g.step >= ? AND g.step < ? AND t.rollout IN (SELECT value FROM json_each(g.kept))",
        (first, last),
    )
    tokens = age = 0
    for step, runs in rows:
        for _, version, count in json.loads(runs):
            tokens += count
            age += count * (step - version)
    return age / tokens if tokens else None


def _slowest_s(db: sqlite3.Connection, first: int, last: int) -> float | None:
    """From issue to its last rollout, of the slowest group issued at each version; the mean over versions."""
    rows = db.execute(
        "SELECT max(scored_unix_s - issued_unix_s) FROM groups WHERE kind = 'train' AND scored_unix_s IS NOT NULL"
        " AND base_version >= ? AND base_version < ? AND deadline_step < ? GROUP BY base_version",
        (first - 1, last, last),
    ).fetchall()
    return round(sum(row[0] for row in rows) / len(rows), 2) if rows else None


def _renewal_s(db: sqlite3.Connection, first: int, last: int) -> float | None:
    """From a batch to new tickets in place of its own: trained, published, loaded; the mean over steps."""
    rows = db.execute(
        "SELECT max(a.unix_s) - b.taken_unix_s FROM batches b JOIN acknowledgements a ON a.version = b.step + 1"
        " WHERE b.step >= ? AND b.step < ? GROUP BY b.step",
        (first, last),
    ).fetchall()
    return round(sum(row[0] for row in rows) / len(rows), 2) if rows else None
