"""Snapshots of runs that are limited by one thing, for the tests of who reads snapshots.

Consumes    what is to differ from a run at ease
Produces    snapshots
Waits for   nothing
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.monitor.snapshot import SCHEMA, Host, Rates, Role, Run, Snapshot, Staleness, Tickets, Useful, Window
from launch.monitor.stage_figures import CurvePoint, Engine, Learner, Sandbox, Store, Swap, Times

SETTINGS = {
    "staleness.max_staleness": 1,
    "groups.groups_per_step": 8,
    "groups.group_size": 8,
    "rollout.engines": 1,
    "rollout.concurrency": 64,
    "rollout.kv_cache_mib": 64,
    "rollout.max_length": 1024,
    "rollout.cpu_threads": 1,
    "rollout.device": "auto",
    "sandbox.workers": 2,
    "sandbox.nodes": 1,
    "sandbox.wall_s": 4.0,
    "learner.ranks": 1,
    "learner.micro_batch_tokens": 8192,
    "learner.checkpoint_every": 10,
    "weights.kv": "recompute",
    "weights.bucket_mib": 64,
    "loss.correction": "direct",
    "buffer.dead_after_s": 10.0,
}
FLAT = ((8, 800.0), (16, 1000.0), (32, 1050.0), (64, 1060.0))
RISING = ((1, 50.0), (2, 95.0), (4, 180.0), (8, 340.0))


def clock(**shares: float) -> dict[str, float]:
    """Of a role; what is left over it waits for input."""
    out = dict.fromkeys(("busy", "starved", "blocked", "sync", "down"), 0.0) | shares
    return out | {"starved": 1.0 - sum(shares.values())}


def role(name: str, shares: dict[str, float], cores: float = 0.2, wait: float = 0.0) -> Role:
    return Role(
        name=name,
        role=name.rpartition("-")[0],
        state="alive",
        error="",
        waits_for="",
        lives=1,
        heartbeat_age_s=0.5,
        shares=shares,
        cores_used=cores,
        core_wait=wait,
        host="node",
    )


def engine(**figures: Any) -> Engine:
    """With room, at half its speed."""
    points = figures.pop("points", FLAT)
    curve = tuple(CurvePoint(concurrency=c, tokens_per_s=speed, seconds=5.0) for c, speed in points)
    top = curve[-1].tokens_per_s if curve else None
    fields: dict[str, Any] = {
        "name": "rollout-0",
        "version": 5,
        "slots": 64,
        "held": 30.0,
        "generating": 20.0,
        "full": 0.0,
        "held_when_full": None,
        "waiting": 0.0,
        "kv_use": 0.3,
        "tokens_per_s": 0.5 * top if top else None,
        "starved": 0.1,
        "paused": 0.01,
        "curve": curve,
        "capacity_tokens_per_s": top,
        "capacity_now_tokens_per_s": top,
        "rising": points is RISING,
    }
    return Engine(**(fields | figures))


def learner(busy_s: float = 2.0, wait_s: float = 2.0, checkpoint_s: float = 0.0) -> Learner:
    parts = {"wait": wait_s, "fetch": 0.1, "train": busy_s, "checkpoint": checkpoint_s, "publish": 0.1, "other": 0.0}
    times = Times(count=10, mean_s=busy_s, p50_s=busy_s, p95_s=busy_s)
    return Learner(ranks=1, steps=10, parts_s=parts, train=times, tokens_per_s=4000.0, figures={"loss": 0.1})


def run(**parts: Any) -> Snapshot:
    """A run in which nothing is used to the full: 120 groups/min, a step in 4 s."""
    quick = Times(count=100, mean_s=0.02, p50_s=0.02, p95_s=0.05)
    roles = {
        "rollout": clock(busy=0.8),
        "sandbox": {},
        "filter": clock(busy=0.01),
        "buffer": clock(busy=0.1, blocked=0.05),
        "learner": clock(busy=0.5, sync=0.03),
    }
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "run": Run(
            name="r",
            state="running",
            reason="",
            phase="train",
            step=20,
            steps=100,
            acked=19,
            published=20,
            wall_s=100.0,
            step_s=4.0,
            eta_s=320.0,
        ),
        "window": Window(span_s=60.0, ends_unix_s=1e9, what="last 60 s"),
        "rates": Rates(
            groups_decided_per_min=140.0,
            groups_trained_per_min=120.0,
            rollouts_per_s=37.0,
            calls_per_s=20.0,
            tokens_generated_per_s=530.0,
            tokens_trained_per_s=200.0,
        ),
        "roles": tuple(role(f"{kind}-0", shares) for kind, shares in roles.items()),
        "hosts": (Host(name="node", cores=4, run_used=1.6, used=1.7),),
        "tickets": Tickets(
            bound=16,
            active=12,
            active_mean=12.0,
            by_state={"leased": 4, "taken": 8},
            waiting_mean=0.0,
            finished_mean=2.0,
            waits_for="",
            batch_waits_for="",
        ),
        "staleness": Staleness(
            max_staleness=1, mean=0.5, in_flight=0.4, in_queue=0.1, max=1, histogram={"0": 50, "1": 50}, mixed_turns=0.1
        ),
        "useful": Useful(
            groups=140,
            kept=0.85,
            dropped={"all_right": 0.15},
            tokens_generated=32000,
            tokens_trained=12000,
            tokens_per_trained_group=265.0,
            tool_wait=0.1,
            tool_error=0.1,
            reward=0.5,
        ),
        "engines": (engine(),),
        "sandbox": Sandbox(
            nodes=1,
            workers=2,
            waiting=0.0,
            backlog=0.0,
            calls_per_s=20.0,
            queue=quick,
            run=quick,
            cpu_use=0.2,
            timeouts=0.0,
            refused=0,
        ),
        "learner": learner(),
        "swap": Swap(
            swaps=15, publish_s=0.1, receive_s=0.05, pause_s=0.05, paused=0.01, lag_steps=0.1, lag=None, slowest=""
        ),
        "store": Store(commit=quick, disk_wait=0.05, mib_per_s=0.5, refused={}),
        "trend": (),
        "alerts": (),
        "dials": (),
        "settings": SETTINGS,
    }
    return Snapshot(**(fields | parts))


def with_role(snapshot: Snapshot, changed: Role) -> Snapshot:
    """One role in place of the one of its name."""
    return replace(snapshot, roles=tuple(changed if one.name == changed.name else one for one in snapshot.roles))


def exhausted(snapshot: Snapshot, **figures: Any) -> Snapshot:
    """All tickets are in use, none waits for an engine."""
    assert snapshot.tickets is not None
    used = {"active": 16, "active_mean": 15.9, "waiting_mean": 0.1} | figures
    return replace(snapshot, tickets=replace(snapshot.tickets, **used))


def slow_sandbox(strength: int) -> Snapshot:
    slow = Times(count=100, mean_s=2.0 * strength, p50_s=2.0, p95_s=9.0)
    base = run(engines=(engine(full=0.6, held_when_full=64.0),))
    assert base.sandbox is not None
    backlog = 0.9 if strength == 1 else 0.99
    return replace(base, sandbox=replace(base.sandbox, queue=slow, waiting=20.0 * strength, backlog=backlog))


def few_slots(strength: int) -> Snapshot:
    slots = 8 // strength
    one = engine(slots=slots, held=slots, full=0.9, held_when_full=float(slots), points=RISING, tokens_per_s=300.0)
    return exhausted(run(engines=(one,), settings=SETTINGS | {"rollout.concurrency": slots}), waiting_mean=5.0)


def small_kv(strength: int) -> Snapshot:
    held = 8.0 / strength
    one = engine(held=held, full=0.95, held_when_full=held, points=RISING, tokens_per_s=300.0, kv_use=0.9)
    return exhausted(run(engines=(one,)), waiting_mean=5.0)


def slow_learner(strength: int) -> Snapshot:
    busy = 0.9 if strength == 1 else 0.99
    base = with_role(run(learner=learner(3.8, 0.1)), role("learner-0", clock(busy=busy), cores=0.95))
    return exhausted(base, finished_mean=7.0)


def slow_swap(strength: int) -> Snapshot:
    swap = Swap(
        swaps=15,
        publish_s=1.0,
        receive_s=2.6 * strength,
        pause_s=0.2,
        paused=0.05,
        lag_steps=0.9,
        lag=None,
        slowest="rollout-0",
    )
    return exhausted(with_role(run(swap=swap), role("learner-0", clock(busy=0.3, sync=0.2))))


def few_tickets(strength: int) -> Snapshot:
    one = engine(held=4.0, starved=0.4, points=RISING, tokens_per_s=150.0)
    base = run(engines=(one,), settings=SETTINGS | {"staleness.max_staleness": 0})
    return exhausted(with_role(base, role("learner-0", clock(busy=0.4 / strength))))


def full_cores(strength: int) -> Snapshot:
    hosts = (Host(name="node", cores=2, run_used=1.8 + 0.1 * strength, used=1.85 + 0.07 * strength),)
    base = with_role(run(hosts=hosts), role("rollout-0", clock(busy=0.9), cores=1.1))
    return with_role(base, role("learner-0", clock(busy=0.75), cores=0.4, wait=0.3))


MADE = {
    "sandbox": slow_sandbox,
    "slots": few_slots,
    "kv": small_kv,
    "learner": slow_learner,
    "swap": slow_swap,
    "tickets": few_tickets,
    "cores": full_cores,
}
