"""When things happened in a run, from its index alone.

Consumes    RUN/buffer/index.sqlite; RUN/run.json, which is written once, when the run is made
Produces    seconds to the first step, what was generated while the learner computed, deadlines met, rollouts by second
Waits for   nothing
Invariant   imports nothing of ours
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

WINDOW_S = 60.0
CONSUMED = "(g.step IS NOT NULL OR (g.state = 'dropped' AND g.drop_reason IN ('all_right', 'all_wrong', 'too_few')))"
"""trained, or dropped by RoC"""


def times(directory: Path) -> dict[str, Any]:
    """Everything, as plain types."""
    begun_s = (directory / "run.json").stat().st_mtime
    with closing(
        sqlite3.connect(f"{(directory / 'buffer' / 'index.sqlite').absolute().as_uri()}?mode=ro", uri=True)
    ) as db:
        batches = dict(db.execute("SELECT step, taken_unix_s FROM batches ORDER BY step"))
        published = dict(db.execute("SELECT version, max(unix_s) FROM publications GROUP BY version"))
        spans = [(taken_s, published[step + 1]) for step, taken_s in batches.items() if step + 1 in published]
        during = sum(
            db.execute("SELECT count(*) FROM turns WHERE received_unix_s BETWEEN ? AND ?", span).fetchone()[0]
            for span in spans
        )
        met, late = db.execute(
            "SELECT coalesce(sum(step <= deadline_step), 0), coalesce(sum(step > deadline_step), 0) FROM groups"
            " WHERE kind = 'train' AND step IS NOT NULL"
        ).fetchone()
        return {
            "first_batch_s": round(batches[0] - begun_s, 1) if batches else None,
            "first_step_published_s": round(published[1] - begun_s, 1) if 1 in published else None,
            "learner_computing_s": round(sum(end_s - taken_s for taken_s, end_s in spans), 1),
            "turns_received_while_learner_computed": during,
            "deadlines_met": met,
            "deadlines_missed": late,
            "window": window(db, batches.get(2), WINDOW_S),
        }


def window(db: sqlite3.Connection, begin_s: float | None, length_s: float) -> dict[str, Any] | None:
    """Rollouts of groups that were trained or dropped by RoC, decided in `length_s` from `begin_s`."""
    if begin_s is None:
        return None
    span = (begin_s, begin_s + length_s)
    groups, rollouts, tokens, output_tokens = db.execute(
        "SELECT count(DISTINCT g.group_id), count(*), coalesce(sum(num_tokens), 0), coalesce(sum(num_output_tokens), 0)"
        f" FROM groups g JOIN rollouts r USING (group_id) WHERE g.kind = 'train' AND r.state = 'finished'"
        f" AND g.decided_unix_s BETWEEN ? AND ? AND {CONSUMED}",
        span,
    ).fetchone()
    steps = db.execute("SELECT count(*) FROM batches WHERE taken_unix_s BETWEEN ? AND ?", span).fetchone()[0]
    return {
        "seconds": length_s,
        "groups": groups,
        "rollouts": rollouts,
        "rollouts_per_s": round(rollouts / length_s, 1),
        "tokens_per_rollout": round(tokens / rollouts, 1) if rollouts else None,
        "output_tokens_per_rollout": round(output_tokens / rollouts, 1) if rollouts else None,
        "steps_taken": steps,
    }
