"""A run taken up again from its index, whenever and however the buffer before ended.

Consumes    the rows of `index.sqlite`
Produces    the state that the service goes on with
Waits for   the disk
Invariant   what was acknowledged is there; tickets keep base and deadline, rollouts their attempt and durable turns.
            Peers of the previous life are given `dead_after_s` from now to be heard again
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from buffer import dials
from buffer.codec import decode
from buffer.groups import GroupWork, RolloutWork
from buffer.index import IndexFault, put_meta
from buffer.leases import Hold, RolloutState
from buffer.membership import Member
from buffer.peers import Peer
from buffer.run_state import Now, RunState, Source
from buffer.schema import SCHEMA, Finish, Problem
from buffer.settings import BufferSettings
from buffer.storage import Storage
from buffer.tickets import Ticket

_FIXED = ("seed", "groups_per_step", "group_size", "num_rollouts")
_HOLDS: dict[str, Hold] = {"waiting": "waiting", "leased": "leased", "finished": "done", "excluded": "excluded"}
_NOT_BY_ROC = ("timed_out", "failed")


def open_run(
    storage: Storage,
    run_name: str,
    settings: BufferSettings,
    problems: Source,
    heldout: Sequence[Problem],
    now: Now,
    live: Mapping[str, float],
) -> RunState:
    """The state of a new run, or of the one in this directory; its first rows are in `unit`.

    `live` are the recipe's live dials that the buffer only keeps for others (buffer/dials.py).

    Raises:
        IndexFault: the settings don't fit the run that is there.
    """
    run = RunState(settings, problems, heldout, now)
    if storage.is_new:
        run.put(put_meta("schema", SCHEMA), put_meta("run", run_name), put_meta("started_unix_s", now.unix_s))
        run.put(put_meta("max_staleness", settings.max_staleness), put_meta("acked", 0), put_meta("next_step", 0))
        run.put(put_meta("next_problem", 0), put_meta("phase", run.phase))
        run.put(*(put_meta(name, getattr(settings, name)) for name in _FIXED))
        dials.begin(run, live, now)
    else:
        _restore(run, storage, now, live)
    run.put(put_meta("life", run.life), put_meta("steps", settings.steps))
    return run


def _restore(run: RunState, storage: Storage, now: Now, live: Mapping[str, float]) -> None:
    meta = storage.index.meta()
    for name in _FIXED:
        if meta[name] != getattr(run.settings, name):
            raise IndexFault(
                f"{name} = {getattr(run.settings, name)}, the run in this directory has {meta[name]}: it is fixed for "
                "a run; use another run.directory"
            )
    run.life = meta["life"] + 1
    run.phase = meta["phase"]
    _restore_goal(run, storage, meta)
    _restore_peers(run, storage, now)
    _restore_learner(run, storage)
    _restore_ledger(run, storage, meta)
    _restore_groups(run, storage, now)
    _restore_leases(run, storage, now)
    run.evaluated_start = bool(storage.index.rows("SELECT 1 FROM evaluations WHERE phase = 'start'"))
    turned = storage.index.rows("SELECT name, value, step FROM dials ORDER BY id")
    dials.restore(run, turned, meta["recipe_dials"], live, now)
    if "meters" in meta:
        run.meters.restore(json.loads(meta["meters"]))


def _restore_goal(run: RunState, storage: Storage, meta: dict[str, Any]) -> None:
    """A run that was over because all its steps were trained goes on when there are more of them now.

    Steps, versions and checkpoints stand; what the evaluation at that end found is kept under
    step_N_life_L, as far as it got.
    """
    numbers = storage.index.rows("SELECT min(group_id) FROM groups")
    run.next_evaluation = min(run.next_evaluation, (numbers[0][0] or 0) - 1)
    if run.phase in ("start", "train"):
        return
    trained = meta["next_step"]
    run.goal = meta.get("goal") or ("steps" if trained >= meta["steps"] else "")
    if run.goal != "steps" or run.settings.steps <= trained:
        return
    run.goal = ""
    earlier = f"step_{trained}_life_{meta['life']}"
    storage.index.commit(
        [
            ("UPDATE groups SET state = 'unused' WHERE phase = 'end' AND state IN ('waiting', 'leased')", ()),
            ("UPDATE groups SET phase = ? WHERE phase = 'end'", (earlier,)),
            ("UPDATE evaluations SET phase = ? WHERE phase = 'end'", (earlier,)),
            put_meta("goal", ""),
            put_meta("phase", "train"),
        ]
    )
    run.phase = "train"


def _restore_peers(run: RunState, storage: Storage, now: Now) -> None:
    for name, role, epoch, life, state in storage.index.rows("SELECT name, role, epoch, life, state FROM peers"):
        peer = Peer(name=name, role=role, epoch=epoch, life=life, state=state, heard_s=now.s)
        run.peers.by_name[name] = peer


def _restore_learner(run: RunState, storage: Storage) -> None:
    newest = storage.index.rows("SELECT lineage, version FROM publications ORDER BY lineage DESC, version DESC LIMIT 1")
    if newest:
        run.published = newest[0]
        run.deadlines.published(run.published[1])
    run.published_unix_s = dict(
        storage.index.rows(
            "SELECT version, max(unix_s) FROM publications GROUP BY version "
            "HAVING version > (SELECT value FROM meta WHERE key = 'acked')"
        )
    )
    for lineage, version, checksum in storage.index.rows("SELECT lineage, version, checksum FROM checksums"):
        run.checksums[lineage, version] = checksum
    run.checkpoints = [
        row[0] for row in storage.index.rows("SELECT version FROM checkpoints WHERE kept ORDER BY version")
    ]


def _restore_ledger(run: RunState, storage: Storage, meta: dict[str, Any]) -> None:
    tickets = (
        Ticket(group=g, problem_index=i, base=base, deadline=deadline, state=state, step=step, drop_reason=reason)
        for g, i, base, deadline, state, step, reason in storage.index.rows(
            "SELECT group_id, problem_index, base_version, deadline_step, state, step, drop_reason FROM groups "
            "WHERE kind = 'train' ORDER BY group_id"
        )
    )
    members = (
        Member(name=name, epoch=epoch, version=version)
        for name, epoch, version in storage.index.rows(
            "SELECT name, epoch, loaded_version FROM peers WHERE role = 'rollout' AND state = 'alive'"
        )
    )
    run.ledger.restore(tickets, meta["acked"], members, meta["next_step"], meta["max_staleness"])
    run.ledger.next_problem = max(run.ledger.next_problem, meta["next_problem"])
    run.ledger.goal = run.phase in ("last_version", "end", "done")
    decided = storage.index.rows(
        "SELECT CASE drop_reason WHEN '' THEN 'kept' ELSE drop_reason END FROM groups WHERE decided_unix_s IS NOT NULL "
        "AND drop_reason NOT IN (?, ?) ORDER BY decided_unix_s DESC, group_id DESC LIMIT ?",
        (*_NOT_BY_ROC, run.outcomes.maxlen),
    )
    run.outcomes.extend(row[0] for row in reversed(decided))


_OPEN = "groups.state IN ('waiting', 'leased') OR (groups.state = 'finished' AND groups.kind = 'train')"


def _restore_groups(run: RunState, storage: Storage, now: Now) -> None:
    """Groups that are in no batch yet, with what is durable of their rollouts."""
    for row in storage.index.rows(
        "SELECT group_id, kind, phase, problem, num_rollouts, base_version, deadline_step, scored_unix_s, kept, "
        f"decided_step FROM groups WHERE {_OPEN} ORDER BY group_id"
    ):
        number, kind, phase, problem, num_rollouts, base, deadline, scored, kept, decided_step = row
        run.groups[number] = GroupWork(
            group=number,
            kind=kind,
            phase=phase,
            problem=decode(Problem, problem),
            base=base,
            deadline=deadline,
            rollouts=[RolloutWork() for _ in range(num_rollouts)],
            scored=scored is not None,
            kept=tuple(json.loads(kept)),
            decided_step=decided_step or 0,
            decided_s=now.s,
        )
    for row in storage.index.rows(
        "SELECT group_id, rollout, turns.attempt, length_bytes, num_prompt_tokens, num_output_tokens, "
        f"num_observation_tokens, version_runs FROM groups JOIN turns USING (group_id) WHERE {_OPEN} "
        "ORDER BY group_id, rollout, turn"
    ):
        number, rollout, attempt, num_bytes, prompt, output, observation, runs = row
        pairs = ((version, num_tokens) for _, version, num_tokens in json.loads(runs))
        run.groups[number].rollouts[rollout].add(attempt, num_bytes, prompt, output, observation, pairs)
    for row in storage.index.rows(
        "SELECT group_id, rollout, attempt, reward, verdict, answer, well_formed, num_answers, num_turns, statuses, "
        "num_output_tokens, num_tokens, end, generate_s, tool_s FROM groups JOIN rollouts USING (group_id) "
        f"WHERE rollouts.state = 'finished' AND ({_OPEN})"
    ):
        run.groups[row[0]].rollouts[row[1]].finish = _finish(row)


def _finish(row: Sequence[Any]) -> Finish:
    return Finish(
        group=row[0],
        rollout=row[1],
        attempt=row[2],
        reward=row[3],
        verdict=row[4],
        answer=row[5],
        well_formed=bool(row[6]),
        num_answers=row[7],
        num_turns=row[8],
        statuses=tuple(json.loads(row[9])),
        num_output_tokens=row[10],
        num_tokens=row[11],
        end=row[12],
        generate_s=row[13],
        tool_s=row[14],
    )


def _restore_leases(run: RunState, storage: Storage, now: Now) -> None:
    for group in run.groups.values():
        if not group.scored:
            run.leases.open(group.group, group.base, group.deadline, group.kind, len(group.rollouts))
    states = []
    for number, rollout, state, attempt, engine, epoch, seq in storage.index.rows(
        "SELECT group_id, rollout, rollouts.state, attempt, engine, epoch, lease_seq FROM groups "
        f"JOIN rollouts USING (group_id) WHERE {_OPEN}"
    ):
        if state == "leased" and seq is not None and run.peers.by_name[engine].epoch == epoch:
            run.peers.by_name[engine].granted.setdefault(seq, []).append((number, rollout, attempt))
        if not run.groups[number].scored:
            hold = _HOLDS[state]
            states.append(
                RolloutState(group=number, rollout=rollout, hold=hold, attempt=attempt, engine=engine, epoch=epoch)
            )
    run.leases.restore(states, now.s)
