"""What the learner puts on record: publications and checkpoints.

Consumes    records of the learner's rank 0
Produces    rows, and what may be deleted
Invariant   lineages only grow, and a version of a new lineage is never older than what was published before
"""

from __future__ import annotations

from buffer.peers import LEADER, Peer
from buffer.run_state import AGE_EDGES, Now, RunState
from buffer.wire import Checkpoint, Publication, Reason, Refusal

_NUM_CHECKPOINTS = 2
"""kept by the learner, when it does not say which"""


def on_publication(run: RunState, peer: Peer, record: Publication, now: Now) -> None:
    """A version is going to be sent: from now on it counts as published."""
    lineage, version, checksum = record.lineage, record.version, record.checksum
    if peer.name != LEADER or lineage != peer.epoch:
        raise Refusal(Reason.NOT_ALLOWED, f"{peer.name}, epoch {peer.epoch}: lineage {lineage} is not its own")
    if (lineage, version) == run.published:
        if run.checksums.get(run.published) != checksum:
            raise Refusal(
                Reason.WRONG_WEIGHTS,
                f"version {lineage}.{version} is on record with checksum {run.checksums.get(run.published)}, now it "
                f"has {checksum}: one version has one set of weights",
            )
        return
    if lineage < run.published[0] or version < run.published[1] or version > run.ledger.next_step:
        raise Refusal(
            Reason.NOT_ALLOWED,
            f"version {lineage}.{version} can't follow {run.published[0]}.{run.published[1]} before step "
            f"{run.ledger.next_step} is taken: a version is published once its steps are trained, and never goes back",
        )
    run.published = (lineage, version)
    run.deadlines.published(version)
    if version > run.ledger.acked:
        run.published_unix_s[version] = now.unix_s
    run.put(("INSERT OR IGNORE INTO publications VALUES (?, ?, ?)", (lineage, version, now.unix_s)))
    if checksum is not None:
        run.checksums[run.published] = checksum
        run.put(("INSERT OR IGNORE INTO checksums VALUES (?, ?, ?)", (lineage, version, checksum)))


def observe_lag(run: RunState, now: Now) -> None:
    """How long versions took to be loaded by all live engines, the slowest that is; and how many newer ones there were
    by then. An engine that starts takes version 0 when it can, which says nothing.
    """
    for version in [version for version in run.published_unix_s if version <= run.ledger.acked]:
        lag_s = now.unix_s - run.published_unix_s.pop(version)
        if version > 0:
            run.meters.observe("publish_lag_s", max(0.0, lag_s))
            run.meters.observe("publish_lag_versions", run.published[1] - version, edges=AGE_EDGES)


def on_checkpoint(run: RunState, peer: Peer, record: Checkpoint, now: Now) -> None:
    """A checkpoint is complete: batches before the oldest kept one are not needed any more."""
    if peer.name != LEADER:
        raise Refusal(Reason.NOT_ALLOWED, f"{peer.name} puts a checkpoint on record: {LEADER} alone does")
    if record.version < 0 or record.version > run.ledger.next_step:
        raise Refusal(
            Reason.NOT_ALLOWED, f"checkpoint of version {record.version}, the next step is {run.ledger.next_step}"
        )
    known = sorted({*run.checkpoints, record.version})
    run.checkpoints = sorted(set(record.kept)) if record.kept else known[-_NUM_CHECKPOINTS:]
    run.put(
        ("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, 1)", (record.version, now.unix_s)),
        ("UPDATE checkpoints SET kept = 0 WHERE version < ?", (run.checkpoints[0],)),
    )
    if len(run.checkpoints) >= _NUM_CHECKPOINTS and not run.settings.keep_segments:
        run.unit.retain_from_step = run.checkpoints[0]
