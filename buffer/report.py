"""What the buffer tells about the run: one dictionary that `rocstar status` and the live view show.

Consumes    the run's state, the last snapshot of every peer
Produces    plain types only; the same without the roles' figures is a line of metrics/run.jsonl
Waits for   nothing
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from buffer import dials
from buffer.peers import Peer
from buffer.run_state import Now, RunState


def status(run: RunState, now: Now) -> dict[str, Any]:
    """Where the run stands, what each role waits for, and every role's figures."""
    snapshot = run.meters.snapshot(now.s)
    out = standing(run, now, snapshot)
    for name, peer in out["peers"].items():
        peer["snapshot"] = run.peers.by_name[name].snapshot
    return out | {"buffer": snapshot}


def standing(run: RunState, now: Now, snapshot: dict[str, Any]) -> dict[str, Any]:
    """The same without figures of roles: a line of metrics/run.jsonl; `snapshot` is the buffer's own."""
    ledger, settings = run.ledger, run.settings
    peers = {peer.name: _peer(run, peer, now) for peer in run.peers.by_name.values() if peer.role != "monitor"}
    return {
        "state": run.state,
        "phase": run.phase,
        "goal": run.goal,
        "life": run.life,
        "next_step": ledger.next_step,
        "steps": settings.steps,
        "acked": ledger.acked,
        "published": {"lineage": run.published[0], "version": run.published[1]},
        "max_staleness": ledger.S,
        "tickets": {
            "bound": ledger.bound,
            "active": ledger.active,
            "by_state": dict(Counter(ticket.state for ticket in ledger.tickets)),
            "waits_for": ledger.issue_waits_for(),
        },
        "groups": _groups(run, snapshot["counters"]),
        "rollouts": {"leased": sum(len(run.leases.held_by(p.name)) for p in run.peers.living("rollout"))},
        "ages": {
            key: _mean(snapshot["histograms"].get(name))
            for key, name in (("total", "age"), ("in_flight", "age_in_flight"), ("in_queue", "age_in_queue"))
        }
        | {"max": snapshot["gauges"].get("age_max", 0)},
        "peers": peers,
        "waits_for": waits_for(run),
        "dials": dials.report(run),
    }


def waits_for(run: RunState) -> dict[str, str]:
    """Who waits for what, in words: the law's part of it, then what each peer says itself."""
    ledger = run.ledger
    out = {"tickets": ledger.issue_waits_for() or "nothing"}
    if run.phase == "start":
        out["phase start"] = "a live engine" if not ledger.live else "the evaluation's rollouts"
    elif run.phase == "train" and not ledger.goal:
        out["batch"] = ledger.take_waits_for()
    elif run.phase == "last_version":
        out["phase last_version"] = f"all live engines at version {ledger.next_step}; acked is {ledger.acked}"
    elif run.phase == "end":
        out["phase end"] = "the evaluation's rollouts"
    for peer in run.peers.by_name.values():
        if peer.state == "alive" and peer.snapshot.get("waits_for"):
            out[peer.name] = str(peer.snapshot["waits_for"])
    return out


def _groups(run: RunState, counters: dict[str, float]) -> dict[str, Any]:
    waiting = [group for group in run.groups.values() if group.kind == "train"]
    return {
        "open": sum(not group.scored for group in waiting),
        "at_roc": sum(group.scored and not group.kept for group in waiting),
        "kept_waiting": sum(bool(group.kept) for group in waiting),
        "kept": counters.get("groups_kept", 0),
        "taken": counters.get("groups_taken", 0),
        "dropped": dict(run.ledger.drops),
        "unused": run.ledger.unused,
        "problems_used": run.ledger.next_problem,
    }


def _peer(run: RunState, peer: Peer, now: Now) -> dict[str, Any]:
    member = next((m for m in run.ledger.members if m.name == peer.name), None)
    return {
        "role": peer.role,
        "epoch": peer.epoch,
        "state": peer.state,
        "error": peer.error,
        "heartbeat_age_s": now.s - peer.heard_s,
        "loaded_version": None if member is None else member.version,
    }


def _mean(histogram: dict[str, Any] | None) -> dict[str, Any]:
    if histogram is None:
        return {"mean": 0.0, "num_tokens": 0, "histogram": None}
    num = sum(histogram["counts"])
    return {"mean": histogram["sum"] / max(1, num), "num_tokens": num, "histogram": histogram}
