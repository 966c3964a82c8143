"""What rollout actors send: turns, scores, exclusions, acknowledgements of versions.

Consumes    records of a living engine
Produces    changes of the run's state and their rows; payload is stored as it came, without coding it again
Invariant   idempotent by key (group, rollout, attempt, turn): what is durable already is acknowledged again; what comes
            from a lease that is over is refused with LEASE_OVER
"""

from __future__ import annotations

from buffer.groups import GroupWork, RolloutWork, fault_of
from buffer.peers import Peer
from buffer.run_state import Now, RunState, as_json
from buffer.schema import Excluded, Finish, Loaded, Turn
from buffer.storage import Storage
from buffer.tickets import FencedError, LedgerError
from buffer.wire import Reason, Refusal

_INSERT_TURN = (
    "INSERT INTO turns (group_id, rollout, turn, attempt, engine, epoch, segment, offset_bytes, length_bytes, "
    "num_prompt_tokens, num_output_tokens, num_observation_tokens, version_runs, status, received_unix_s) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_FINISH_ROLLOUT = (
    "UPDATE rollouts SET state = 'finished', finished_unix_s = ?, reward = ?, verdict = ?, answer = ?, "
    "well_formed = ?, num_answers = ?, num_turns = ?, statuses = ?, num_output_tokens = ?, num_tokens = ?, end = ?, "
    "generate_s = ?, tool_s = ? WHERE group_id = ? AND rollout = ?"
)


def on_turn(run: RunState, storage: Storage, peer: Peer, turn: Turn, frames: list[bytes], now: Now) -> None:
    """Store a turn."""
    group = run.groups.get(turn.group)
    if group is None or group.scored or not 0 <= turn.rollout < len(group.rollouts):
        return _known_turn(storage, turn)
    work = group.rollouts[turn.rollout]
    if 0 <= turn.turn < work.num_turns and work.attempts[turn.turn] == turn.attempt:
        return None  # sent again
    _check_lease(run, peer, turn)
    if turn.turn != work.num_turns or work.finish is not None:
        raise Refusal(
            Reason.OUT_OF_ORDER,
            f"{_name(turn)}: turn {turn.turn} came, turn {work.num_turns} is the next; send turns in order",
        )
    fault = fault_of(turn, group)
    if fault:
        raise Refusal(Reason.MALFORMED, f"{_name(turn)}, turn {turn.turn}: {fault}")
    work.add(
        turn.attempt,
        _store(run, storage, peer, turn, frames, now),
        len(turn.prompt_ids),
        len(turn.output_ids),
        len(turn.observation_ids),
        ((one.version, one.num_tokens) for one in turn.version_runs),
    )
    run.meters.count("turns")
    run.meters.count("tokens_generated", len(turn.output_ids))
    return None


def _store(run: RunState, storage: Storage, peer: Peer, turn: Turn, frames: list[bytes], now: Now) -> int:
    """Put it into the unit; its size on disk in bytes."""
    place = storage.place(run.unit, frames[0], frames[1] if len(frames) > 1 else b"")
    run.put(
        (
            _INSERT_TURN,
            (
                turn.group,
                turn.rollout,
                turn.turn,
                turn.attempt,
                peer.name,
                peer.epoch,
                place.segment,
                place.offset_bytes,
                place.length_bytes,
                len(turn.prompt_ids),
                len(turn.output_ids),
                len(turn.observation_ids),
                as_json([[one.lineage, one.version, one.num_tokens] for one in turn.version_runs]),
                turn.status,
                now.unix_s,
            ),
        )
    )
    return place.length_bytes


def _known_turn(storage: Storage, turn: Turn) -> None:
    """A turn of a group that is over: acknowledged again if it is durable, else refused."""
    key = (turn.group, turn.rollout, turn.turn, turn.attempt)
    sql = "SELECT 1 FROM turns WHERE group_id = ? AND rollout = ? AND turn = ? AND attempt = ?"
    if not storage.rows(sql, key):
        raise Refusal(Reason.LEASE_OVER, f"{_name(turn)}: the group is closed; drop the rollout")


def on_finish(run: RunState, storage: Storage, peer: Peer, finish: Finish, now: Now) -> None:
    """Score a rollout; the last one of a group sends the group to RoC."""
    found = _open_rollout(run, storage, finish, "finished")
    if found is None:
        return
    group, work = found
    if work.finish is not None and work.finish.attempt == finish.attempt:
        return
    _check_lease(run, peer, finish)
    if finish.num_turns != work.num_turns or work.num_turns == 0:
        raise Refusal(
            Reason.OUT_OF_ORDER, f"{_name(finish)}: num_turns = {finish.num_turns}, {work.num_turns} are durable"
        )
    work.finish = finish
    complete = run.leases.done(finish.group, finish.rollout, finish.attempt, peer.name, peer.epoch)
    run.put((_FINISH_ROLLOUT, _finish_row(finish, now)))
    _count(run, group, finish)
    if complete:
        run.score(group, now)


def _finish_row(finish: Finish, now: Now) -> tuple[object, ...]:
    return (
        now.unix_s,
        finish.reward,
        finish.verdict,
        finish.answer,
        int(finish.well_formed),
        finish.num_answers,
        finish.num_turns,
        as_json(finish.statuses),
        finish.num_output_tokens,
        finish.num_tokens,
        finish.end,
        finish.generate_s,
        finish.tool_s,
        finish.group,
        finish.rollout,
    )


def _count(run: RunState, group: GroupWork, finish: Finish) -> None:
    where = f"eval_{group.phase}" if group.kind == "eval" else "train"
    run.meters.count(f"rollouts_finished/{where}")
    run.meters.count(f"reward/{where}", finish.reward)
    for status in finish.statuses:
        run.meters.count(f"calls/{where}/{status}")
        if finish.reward > 0:
            run.meters.count(f"calls_in_correct/{where}/{status}")


def on_exclude(run: RunState, storage: Storage, peer: Peer, excluded: Excluded, now: Now) -> None:
    """A rollout that can't be finished, for reasons that are not the model's."""
    found = _open_rollout(run, storage, excluded, "excluded")
    if found is None:
        return
    group, _ = found
    state = run.leases.state(excluded.group, excluded.rollout)
    if state is not None and state.hold == "excluded" and state.attempt == excluded.attempt:
        return
    _check_lease(run, peer, excluded)
    complete = run.leases.excluded(excluded.group, excluded.rollout, excluded.attempt, peer.name, peer.epoch)
    run.put(
        (
            "UPDATE rollouts SET state = 'excluded', finished_unix_s = ?, excluded_reason = ? "
            "WHERE group_id = ? AND rollout = ?",
            (now.unix_s, excluded.reason, excluded.group, excluded.rollout),
        )
    )
    run.meters.count(f"rollouts_excluded/{excluded.reason}")
    if complete:
        run.score(group, now)


def on_loaded(run: RunState, peer: Peer, loaded: Loaded, now: Now) -> None:
    """An engine has loaded a version: `acked` may rise, and tickets are released with it."""
    if peer.role != "rollout":
        raise Refusal(Reason.NOT_ALLOWED, f"{peer.name}: a {peer.role} loads no version")
    if loaded.lineage > run.published[0] or loaded.version > run.published[1]:
        raise Refusal(
            Reason.NOT_ALLOWED,
            f"{peer.name}: version {loaded.lineage}.{loaded.version} is not on record as published, "
            f"{run.published[0]}.{run.published[1]} is the newest",
        )
    published = run.checksums.get((loaded.lineage, loaded.version), loaded.checksum)
    if loaded.checksum != published:
        raise Refusal(
            Reason.WRONG_WEIGHTS,
            f"{peer.name}: version {loaded.lineage}.{loaded.version} was loaded with checksum {loaded.checksum}, and "
            f"published with {published}: end this engine, its next life fetches the weights again",
        )
    try:
        released = run.ledger.acknowledge(peer.name, peer.epoch, loaded.version)
    except FencedError as error:
        raise Refusal(Reason.FENCED, str(error)) from error
    except LedgerError as error:
        raise Refusal(Reason.NOT_ALLOWED, str(error)) from error
    run.offers += 1  # an engine may have what it has loaded now
    run.write_released(released)
    run.put(
        (
            "INSERT OR IGNORE INTO acknowledgements VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                peer.name,
                peer.epoch,
                loaded.lineage,
                loaded.version,
                loaded.checksum,
                loaded.pause_s,
                now.unix_s,
                run.ledger.acked,
            ),
        ),
        (
            "UPDATE peers SET loaded_lineage = ?, loaded_version = ? WHERE name = ?",
            (loaded.lineage, loaded.version, peer.name),
        ),
    )


def _open_rollout(
    run: RunState, storage: Storage, record: Finish | Excluded, state: str
) -> tuple[GroupWork, RolloutWork] | None:
    """The rollout of a record, or None when the record is durable already and its group is over."""
    group = run.groups.get(record.group)
    if group is not None and 0 <= record.rollout < len(group.rollouts):
        work = group.rollouts[record.rollout]
        if not group.scored or (work.finish is not None and work.finish.attempt == record.attempt):
            return group, work
    key = (record.group, record.rollout, record.attempt, state)
    if not storage.rows("SELECT 1 FROM rollouts WHERE group_id = ? AND rollout = ? AND attempt = ? AND state = ?", key):
        raise Refusal(Reason.LEASE_OVER, f"{_name(record)}: the group is closed; drop the rollout")
    return None


def _check_lease(run: RunState, peer: Peer, record: Turn | Finish | Excluded) -> None:
    try:
        run.leases.check(record.group, record.rollout, record.attempt, peer.name, peer.epoch)
    except FencedError as error:
        raise Refusal(Reason.LEASE_OVER, str(error)) from error


def _name(record: Turn | Finish | Excluded) -> str:
    return f"group {record.group}, rollout {record.rollout}, attempt {record.attempt}"
