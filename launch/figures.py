"""What a run has done, read from the buffer's index.

Consumes    RUN/buffer/index.sqlite, also while the run goes on
Produces    `figures(directory)`: counts of groups by fate, ages, tokens, evaluations
Waits for   nothing
Invariant   only durable rows count, so the figures are the same before and after any restart
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from buffer.index import reading
from sandbox.api import Status, is_failure, is_infra

TRAINED = """
SELECT g.group_id, g.step, g.decided_step, t.num_output_tokens, t.version_runs
FROM groups g
JOIN json_each(g.kept) k
JOIN turns t ON t.group_id = g.group_id AND t.rollout = k.value
WHERE g.step IS NOT NULL AND g.step < ?
"""
TURNED = """
SELECT name, value, step FROM dials
WHERE id IN (SELECT max(id) FROM dials GROUP BY name HAVING count(*) > 1) ORDER BY name
"""
EVALUATED = """
SELECT r.reward, r.statuses FROM rollouts r JOIN groups g ON g.group_id = r.group_id
WHERE g.kind = 'eval' AND g.phase = ? AND r.state = 'finished'
"""


def figures(directory: Path) -> dict[str, Any]:
    """Everything, as plain types."""
    with closing(reading(directory / "buffer" / "index.sqlite")) as db:
        meta = dict(db.execute("SELECT key, value FROM meta"))
        steps = _learner_steps(db)
        out = {
            "phase": meta.get("phase"),
            "acked": meta.get("acked"),
            "next_step": meta.get("next_step"),
            "max_staleness": meta.get("max_staleness"),
            "learner_steps": steps,
            "groups_by_state": dict(
                db.execute("SELECT state, count(*) FROM groups WHERE kind = 'train' GROUP BY state")
            ),
            "groups_dropped": dict(
                db.execute("SELECT drop_reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY drop_reason")
            ),
            "groups_trained": _one(db, "SELECT count(*) FROM groups WHERE step IS NOT NULL AND step < ?", steps),
            "rollouts_finished": _one(
                db,
                "SELECT count(*) FROM rollouts JOIN groups USING (group_id) "
                "WHERE kind = 'train' AND rollouts.state = 'finished'",
            ),
            "tokens_generated": _one(db, "SELECT coalesce(sum(num_output_tokens), 0) FROM turns"),
            "weights_pause_s": _one(db, "SELECT coalesce(sum(pause_s), 0.0) FROM acknowledgements"),
            "checkpoints": [
                v for (v,) in db.execute("SELECT version FROM checkpoints WHERE kept = 1 ORDER BY version")
            ],
            "dials": {name: (value, step) for name, value, step in db.execute(TURNED)},
            "evaluations": {phase: _evaluation(db, phase) for (phase,) in db.execute("SELECT phase FROM evaluations")},
        }
        return out | _publish_lag(db) | _ages(db.execute(TRAINED, (steps,)))


def _learner_steps(db: sqlite3.Connection) -> int:
    return max(
        _one(db, "SELECT coalesce(max(version), 0) FROM publications"),
        _one(db, "SELECT coalesce(max(version), 0) FROM checkpoints"),
    )


def _publish_lag(db: sqlite3.Connection) -> dict[str, Any]:
    """Of versions from 1 on: from the last record of the publication to the acknowledgement after which all live
    engines had that version, in seconds and in newer versions published by then.
    """
    publications = db.execute("SELECT version, unix_s FROM publications ORDER BY unix_s").fetchall()
    raised = db.execute("SELECT acked, min(unix_s) FROM acknowledgements GROUP BY acked ORDER BY acked").fetchall()
    seconds, versions = [], []
    for version in sorted({version for version, _ in publications if version > 0}):
        acknowledged_s = min((unix_s for acked, unix_s in raised if acked >= version), default=None)
        if acknowledged_s is None:
            continue
        before = [one for one in publications if one[1] <= acknowledged_s]
        seconds.append(acknowledged_s - max((s for known, s in before if known == version), default=acknowledged_s))
        versions.append(max(known for known, _ in before) - version)
    return {"publish_lag_s": _spread(seconds), "publish_lag_versions": _spread(versions)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": median(values) if values else None, "max": max(values, default=None)}


def _one(db: sqlite3.Connection, sql: str, *parameters: Any) -> Any:
    return db.execute(sql, parameters).fetchone()[0]


def _ages(rows: Iterable[tuple[int, int, int | None, int, str]]) -> dict[str, Any]:
    """Of all trained tokens; the part in the queue counts from the step that was next when RoC decided."""
    histogram: Counter[int] = Counter()
    queued = tokens = 0
    for _, step, decided_step, num_output_tokens, version_runs in rows:
        tokens += num_output_tokens
        for _, version, num_tokens in json.loads(version_runs):
            histogram[step - version] += num_tokens
            queued += (step - (step if decided_step is None else decided_step)) * num_tokens
    count = max(1, sum(histogram.values()))
    mean = sum(age * number for age, number in histogram.items()) / count
    return {
        "tokens_trained": tokens,
        "age_mean": mean,
        "age_max": max(histogram, default=0),
        "age_in_queue_mean": queued / count,
        "age_in_flight_mean": mean - queued / count,
        "age_histogram": {str(age): number for age, number in sorted(histogram.items())},
    }


def _evaluation(db: sqlite3.Connection, phase: str) -> dict[str, Any]:
    lineage, version, problems = db.execute(
        "SELECT lineage, version, num_problems FROM evaluations WHERE phase = ?", (phase,)
    ).fetchone()
    rows = db.execute(EVALUATED, (phase,)).fetchall()
    statuses = [Status(text) for reward, words in rows if reward > 0 for text in json.loads(words)]
    calls = [status for status in statuses if not is_infra(status)]
    return {
        "lineage": lineage,
        "version": version,
        "problems": problems,
        "finished": len(rows),
        "accuracy": sum(reward > 0 for reward, _ in rows) / len(rows) if rows else None,
        "tool_error_in_correct": sum(map(is_failure, calls)) / len(calls) if calls else None,
    }
