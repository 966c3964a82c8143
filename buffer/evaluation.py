"""The order of a run: evaluation of the first version, training, evaluation of the last version, done.

Consumes    the run's state after each change
Produces    the next phase; evaluation groups, offered like any other but without a ticket
Waits for   start: a live engine; last_version: all live engines at the last version; evaluations: their rollouts
Unblocked by acknowledgements, finished and excluded evaluation rollouts, the goal
Invariant   an evaluation runs on one version, said with its lineage; nothing of it is ever trained on

    start -> train -> last_version -> end -> done        (start and end without groups when no evaluation is wanted)

Numbers of evaluation groups are negative: -1 - i at the start, -1 - n - i at the end, for held-out problem i of n. A
run resumed with more steps than it was done with goes on (buffer/restore.py); its next end has the next n numbers.
"""

from __future__ import annotations

from buffer.groups import GroupWork, RolloutWork
from buffer.run_state import Now, RunState


def advance(run: RunState, now: Now) -> None:
    """Go on to the next phase as far as possible."""
    while _step(run, now):
        pass


def _step(run: RunState, now: Now) -> bool:
    ledger, settings = run.ledger, run.settings
    evaluating = any(group.kind == "eval" for group in run.groups.values())
    if evaluating:
        return False
    if run.phase == "start":
        if settings.evaluation_at_start and run.heldout and not run.evaluated_start:
            if not ledger.live:
                return False
            run.evaluated_start = True
            _open(run, "start", ledger.acked, now)
        else:
            _close(run, "start", now)
            run.put_phase("train")
        return True
    if run.phase == "train" and (ledger.spent or ledger.next_step >= settings.steps):
        run.finish_run("steps" if ledger.next_step >= settings.steps else "exhausted")
        return True
    if run.phase == "last_version" and ledger.live and ledger.acked == ledger.next_step:
        run.put_phase("end")
        if settings.evaluation_at_end and run.heldout:
            _open(run, "end", ledger.acked, now)
        return True
    if run.phase == "end":
        _close(run, "end", now)
        run.put_phase("done")
        return True
    return False


def _open(run: RunState, phase: str, version: int, now: Now) -> None:
    """Offer every held-out problem once."""
    run.put(
        (
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, NULL)",
            (phase, run.published[0], version, len(run.heldout), now.unix_s),
        )
    )
    first = -1 if phase == "start" else run.next_evaluation
    run.next_evaluation = min(run.next_evaluation, first - len(run.heldout))
    for index, problem in enumerate(run.heldout):
        group = GroupWork(
            group=first - index,
            kind="eval",
            phase=phase,
            problem=problem,
            base=version,
            deadline=-1,
            rollouts=[RolloutWork()],
        )
        run.open_group(group, index, "waiting", now)


def _close(run: RunState, phase: str, now: Now) -> None:
    run.put(("UPDATE evaluations SET ended_unix_s = ? WHERE phase = ?", (now.unix_s, phase)))
