"""From a scored group to a batch: headers to RoC, its decision, the taking of a step.

Consumes    decisions of the RoC filter, the learner's demand for a step
Produces    headers, recorded batches
Invariant   one filter has at most one undecided group; a batch is recorded once and answered from the record ever after
"""

from __future__ import annotations

from buffer.codec import encode
from buffer.groups import GroupWork
from buffer.index import put_meta
from buffer.peers import Peer
from buffer.run_state import AGE_EDGES, Now, RunState, as_json
from buffer.schema import Batch, Decision, GroupHeaders
from buffer.tickets import LedgerError, Ticket
from buffer.wire import Reason, Refusal

KEPT = "kept"
ALL_RIGHT = "all_right"
_NUM_RECENT_BATCHES = 8


def on_next_group(run: RunState, peer: Peer) -> GroupHeaders | None:
    """The oldest scored group that nobody decides on; the same again to a filter that has not decided yet."""
    waiting = [g for g in run.groups.values() if g.scored and not g.kept]
    mine = next((g for g in waiting if g.deciding == peer.name), None)
    group = mine or next((g for g in waiting if not g.deciding), None)
    if group is None:
        return None
    group.deciding = peer.name
    return group.headers(run.settings.group_size)


def on_decide(run: RunState, decision: Decision, now: Now) -> None:
    """RoC's word on a group; the word of a second filter, or the same once more, changes nothing."""
    group = run.groups.get(decision.group)
    if group is None or group.kept:
        return
    if not group.scored:
        raise Refusal(Reason.NOT_ALLOWED, f"group {group.group} is still being worked on: nothing to decide")
    _check_decision(run, group, decision)
    run.put(
        (
            "UPDATE groups SET kept = ?, p_err = ?, p_format = ?, decided_unix_s = ?, decided_step = ? "
            "WHERE group_id = ?",
            (
                as_json(decision.keep),
                as_json(decision.p_err),
                as_json(decision.p_format),
                now.unix_s,
                run.ledger.next_step,
                group.group,
            ),
        )
    )
    run.outcomes.append(decision.drop_reason or KEPT)
    if not decision.keep:
        run.drop(group, decision.drop_reason, now)
        if len(run.outcomes) == run.outcomes.maxlen and set(run.outcomes) == {ALL_RIGHT} and not run.ledger.goal:
            run.finish_run(ALL_RIGHT)
        return
    group.kept, group.decided_step, group.decided_s = decision.keep, run.ledger.next_step, now.s
    run.outlooks += 1
    run.write_tickets(run.ledger.finish(group.group))
    run.meters.count("groups_kept")


def _check_decision(run: RunState, group: GroupWork, decision: Decision) -> None:
    finished = {finish.rollout for finish in group.finishes()}
    keep = decision.keep
    fault = ""
    if bool(keep) == bool(decision.drop_reason):
        fault = f"keep = {keep} and drop_reason = {decision.drop_reason!r}: exactly one must be given"
    elif list(keep) != sorted(set(keep)) or not finished.issuperset(keep):
        fault = f"keep = {keep} are not ascending numbers among the finished {sorted(finished)}"
    elif len(keep) > run.settings.group_size:
        fault = f"keep has {len(keep)} rollouts, group_size is {run.settings.group_size}"
    if fault:
        raise Refusal(Reason.NOT_ALLOWED, f"group {group.group}: {fault}")


def on_take(run: RunState, step: int, now: Now) -> bytes | None:
    """The encoded batch of a step, or None while it has to wait (past the goal: for ever)."""
    if step in run.batches:
        return run.batches[step]
    if step != run.ledger.next_step or step >= run.settings.steps or run.ledger.goal:
        return None
    if run.outlook_seen == run.outlooks:
        return None
    try:
        tickets = run.ledger.take(step)
    except LedgerError as error:  # the law was broken before: everything stops here, with its numbers
        raise AssertionError(str(error)) from error
    if tickets is None:
        run.outlook_seen = run.outlooks
        return None
    return _record(run, step, tickets, now)


def _record(run: RunState, step: int, tickets: list[Ticket], now: Now) -> bytes:
    groups = [run.groups.pop(ticket.group) for ticket in tickets]
    record = encode(Batch, Batch(step=step, groups=tuple(group.batch_group() for group in groups)))[0]
    run.batches[step] = record
    run.batches.pop(step - _NUM_RECENT_BATCHES, None)
    run.write_tickets(tickets)
    run.put(
        ("INSERT INTO batches VALUES (?, ?, ?, ?)", (step, now.unix_s, run.ledger.acked, record)),
        put_meta("next_step", run.ledger.next_step),
    )
    for group in groups:
        _observe(run, step, group, now)
    run.put_meters(now)
    return record


def _observe(run: RunState, step: int, group: GroupWork, now: Now) -> None:
    """Ages over tokens: in flight up to RoC's decision, in the queue from there, and their sum."""
    meters = run.meters
    meters.count("groups_taken")
    meters.count("rollouts_taken", len(group.kept))
    meters.observe("queue_s", now.s - group.decided_s)
    for version, num_tokens in group.kept_versions().items():
        meters.count("tokens_taken", num_tokens)
        meters.observe("age", step - version, count=num_tokens, edges=AGE_EDGES)
        meters.observe("age_in_flight", group.decided_step - version, count=num_tokens, edges=AGE_EDGES)
        meters.observe("age_in_queue", step - group.decided_step, count=num_tokens, edges=AGE_EDGES)
        meters.gauge("age_max", max(meters.gauge_value("age_max", 0), step - version))
