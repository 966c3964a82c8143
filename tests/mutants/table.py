"""The laws, and how each is broken: a text of one source file is replaced, and these tests are asked.

Consumes    nothing
Produces    TABLE
Invariant   `old` occurs exactly once in its file (tests/test_mutants.py): the table can't go stale unnoticed
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.table_peers import PEERS

TABLE = (
    Mutant(
        law="a lease goes only to an engine that has loaded the ticket's base",
        file="buffer/leases.py",
        old='return loaded == self.base if self.kind == "eval" else loaded >= self.base',
        new='return loaded == self.base if self.kind == "eval" else True',
        tests="tests/test_leases.py",
    ),
    Mutant(
        law="an evaluation runs on one version",
        file="buffer/leases.py",
        old='return loaded == self.base if self.kind == "eval" else loaded >= self.base',
        new="return loaded >= self.base",
        tests="tests/test_leases.py",
    ),
    Mutant(
        law="no ticket without a live engine",
        file="buffer/ledger.py",
        old='        if not self.live:\n            return f"an engine',
        new='        if not self.members:\n            return f"an engine',
        tests="tests/test_ledger.py",
    ),
    Mutant(
        law="step k's tickets are released when acked >= k + 1",
        file="buffer/ledger.py",
        old="t.step < self.acked]",
        new="t.step <= self.acked]",
        tests="tests/test_ledger.py",
    ),
    Mutant(
        law="a dropped group's ticket is free at once",
        file="buffer/ledger.py",
        old='return [self._retire(replace(ticket, state="dropped", drop_reason=reason))]',
        new='return [self._change(ticket, "dropped")]',
        tests="tests/test_ledger.py",
    ),
    Mutant(
        law="a group is taken only if what remains can meet its deadlines",
        file="buffer/taking.py",
        old="if _worst(step, P, left) <= P - len(chosen) - 1:",
        new="if left is not None:",
        tests="tests/test_taking.py",
    ),
    Mutant(
        law="the learner waits for every group whose deadline is the step",
        file="buffer/taking.py",
        old='    if any(t.state != "finished" for t in due):\n        return None\n    chosen = list(due)',
        new='    chosen = [t for t in due if t.state == "finished"]',
        tests="tests/test_taking.py tests/test_ledger.py",
    ),
    Mutant(
        law="acknowledged means durable: the answer waits for the commit",
        file="buffer/server.py",
        old="        self._committing = True\n        started_s",
        new="        self._send_all(replies)\n        replies = []\n        self._committing = True\n        started_s",
        tests="tests/test_durable.py",
    ),
    Mutant(
        law="payload is synced before the rows that point to it commit",
        file="buffer/storage.py",
        old="        self.segments.append(unit.records)\n        if unit.statements:\n"
        "            self.index.commit(unit.statements, _end(unit))\n",
        new="        if unit.statements:\n            self.index.commit(unit.statements, _end(unit))\n"
        "        self.segments.append(unit.records)\n",
        tests="tests/test_durable.py",
    ),
    Mutant(
        law="payload is synced at all",
        file="buffer/segments.py",
        old="        if records:\n            os.fdatasync(self._file)\n",
        new="",
        tests="tests/test_durable.py",
    ),
    Mutant(
        law="the index is synced at every commit",
        file="buffer/index.py",
        old='"PRAGMA synchronous = FULL"',
        new='"PRAGMA synchronous = NORMAL"',
        tests="tests/test_durable.py",
    ),
    Mutant(
        law="what lies behind the last indexed record is cut off",
        file="buffer/segments.py",
        old="            if int(path.stem) > last:\n                path.unlink()",
        new="            if int(path.stem) > last + 1000:\n                path.unlink()",
        tests="tests/test_store.py",
    ),
    Mutant(
        law="the index of a copy is not believed",
        file="buffer/spare.py",
        old="        if not place.exists() or place",
        new="        if place.exists() or place",
        tests="tests/test_disk_and_clock.py",
    ),
    Mutant(
        law="a copy goes back to the payload that it holds",
        file="buffer/spare.py",
        old="        if not _within(commit.end, held):\n            break\n",
        new="",
        tests="tests/test_disk_and_clock.py",
    ),
    Mutant(
        law="only the current epoch of a peer is heard",
        file="buffer/peers.py",
        old='if peer.epoch != epoch or peer.state != "alive":',
        new='if peer.state != "alive":',
        tests="tests/test_buffer_leases.py",
    ),
    Mutant(
        law="only the current attempt of a rollout is heard",
        file="buffer/leases.py",
        old="(state.engine, state.epoch, state.attempt) != (engine, epoch, attempt):",
        new="(state.engine, state.epoch) != (engine, epoch):",
        tests="tests/test_leases.py tests/test_buffer_leases.py",
    ),
    Mutant(
        law="a turn that is sent again is acknowledged, not stored again",
        file="buffer/handlers_actor.py",
        old="work.attempts[turn.turn] == turn.attempt:",
        new="turn.turn < 0:",
        tests="tests/test_buffer_leases.py",
    ),
    Mutant(
        law="the record of a publication never goes back",
        file="buffer/handlers_learner.py",
        old="if lineage < run.published[0] or version < run.published[1] or version > run.ledger.next_step:",
        new="if version > run.ledger.next_step:",
        tests="tests/test_buffer_resume.py",
    ),
    Mutant(
        law="payload that a kept checkpoint needs stays",
        file="buffer/index.py",
        old='"OR groups.step >= ?)"',
        new='"OR groups.step > ? + 1)"',
        tests="tests/test_retention.py",
    ),
    Mutant(
        law="a checkpoint without its mark is none",
        file="learner/checkpoint.py",
        old=" and (path / MARK).is_file()",
        new="",
        tests="tests/test_checkpoint.py",
    ),
    Mutant(
        law="the checkpoint that is loaded is verified",
        file="learner/trainer.py",
        old="        checkpoint.verify(directory, announced, ",
        new="        print(",
        tests="tests/test_trainer.py",
    ),
    Mutant(
        law="no batch past a deadline is trained",
        file="learner/batch.py",
        old="if not group.base <= step <= group.deadline:",
        new="if not group.base <= step:",
        tests="tests/test_batch.py",
    ),
    Mutant(
        law="no token older than its ticket's base is trained",
        file="learner/batch.py",
        old="versions[(versions < group.base) | (versions > step)]",
        new="versions[versions > step]",
        tests="tests/test_batch.py",
    ),
    Mutant(
        law="an engine takes no weights that differ from their checksum",
        file="actors/weights.py",
        old="or zlib.crc32(data) != manifest.bucket_crc32[index]:",
        new="and data:",
        tests="tests/test_weights.py",
    ),
    Mutant(
        law="a stopped process counts as dead",
        file="launch/supervisor.py",
        old="if unheard_s > self._dead_after_s:",
        new="if unheard_s > 1e9:",
        tests="tests/test_supervisor.py",
    ),
    Mutant(
        law="a version is published after its record is written",
        file="learner/learner.py",
        old='        self._on_phase("packed", version)\n',
        new='        self._server.publish(packed)\n        self._on_phase("packed", version)\n',
        tests="tests/test_learner_faults.py",
        slow=True,
    ),
    Mutant(
        law="a restarted learner recomputes up to the last published version",
        file="learner/learner.py",
        old="await self._recompute(max(self._trainer.version, welcome.published_version))",
        new="await self._recompute(self._trainer.version)",
        tests="tests/test_learner_loop.py",
        slow=True,
    ),
    Mutant(
        law="nothing is published while steps are recomputed",
        file="learner/learner.py",
        old="            await self._train(batch, recomputed=True)\n",
        new="            await self._train(batch, recomputed=True)\n"
        "            await self._publish(self._client.epoch)\n",
        tests="tests/test_learner_loop.py",
        slow=True,
    ),
    *PEERS,
)
