"""What a person should look at, whatever limits the run.

Consumes    a snapshot
Produces    alerts, the gravest first
Waits for   nothing: pure
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.monitor.snapshot import Alert, Snapshot

SLOW_ENGINE = 0.5
"""of the median engine's speed"""
MANY_TIMEOUTS = 0.05
MANY_EQUAL = 0.3
SLOW_COMMIT_S = 0.5
LOW_ESS = 0.5
SILENT_S = 10.0
LEVELS = ("error", "warn", "info")


def alerts(snapshot: Snapshot) -> tuple[Alert, ...]:
    """All that there are."""
    found = [*_roles(snapshot), *_engines(snapshot), *_work(snapshot), *_learning(snapshot)]
    return tuple(sorted(found, key=lambda alert: LEVELS.index(alert.level)))


def _roles(snapshot: Snapshot) -> Iterator[Alert]:
    limit_s = float(snapshot.settings.get("buffer.dead_after_s", SILENT_S))
    live = snapshot.run.state in ("running", "evaluating")
    for role in snapshot.roles:
        if role.state in ("dead", "failed"):
            said = f": {role.error.splitlines()[0]}" if role.error else ""
            yield Alert(level="error", text=f"{role.name} is {role.state}{said}")
        elif live and role.state == "alive" and (role.heartbeat_age_s or 0.0) > limit_s:
            yield Alert(level="warn", text=f"{role.name} has not been heard for {role.heartbeat_age_s:.0f} s")
        if role.lives > 1:
            yield Alert(level="info", text=f"{role.name} was started {role.lives} times")


def _engines(snapshot: Snapshot) -> Iterator[Alert]:
    speeds = sorted(engine.tokens_per_s for engine in snapshot.engines if engine.tokens_per_s is not None)
    if len(speeds) > 2:
        median = speeds[len(speeds) // 2]
        for engine in snapshot.engines:
            if engine.tokens_per_s is not None and engine.tokens_per_s < SLOW_ENGINE * median:
                yield Alert(
                    level="warn", text=f"{engine.name}: {engine.tokens_per_s:.0f} tokens/s, the median is {median:.0f}"
                )
    if snapshot.swap is not None and snapshot.swap.slowest and (snapshot.swap.lag_steps or 0.0) > 1.0:
        yield Alert(level="warn", text=f"{snapshot.swap.slowest} is behind: versions wait for it")


def _work(snapshot: Snapshot) -> Iterator[Alert]:
    sandbox, useful, store = snapshot.sandbox, snapshot.useful, snapshot.store
    if sandbox is not None and (sandbox.timeouts or 0.0) > MANY_TIMEOUTS:
        yield Alert(level="warn", text=f"{sandbox.timeouts:.0%} of the calls time out")
    if sandbox is not None and sandbox.refused:
        yield Alert(level="warn", text=f"the sandbox's queue was full: {sandbox.refused} calls were refused")
    if useful is not None:
        equal = sum(useful.dropped.get(reason, 0.0) for reason in ("all_right", "all_wrong", "all_equal"))
        if equal > MANY_EQUAL:
            which = "easy" if useful.dropped.get("all_right", 0.0) * 2 > equal else "hard"
            yield Alert(level="info", text=f"{equal:.0%} of the groups have equal rewards: problems too {which}")
        if useful.dropped.get("timed_out"):
            yield Alert(level="warn", text=f"{useful.dropped['timed_out']:.1%} of the groups timed out")
        if useful.dropped.get("failed"):
            yield Alert(level="warn", text=f"{useful.dropped['failed']:.1%} of the groups failed")
    if store is not None and store.commit is not None and store.commit.p95_s > SLOW_COMMIT_S:
        yield Alert(level="warn", text=f"the buffer's disk is slow: p95 of a commit is {store.commit.p95_s:.2f} s")


def _learning(snapshot: Snapshot) -> Iterator[Alert]:
    stale = snapshot.staleness
    bound = stale.max_staleness if stale is not None else 0
    over = [int(age) for age in (stale.histogram if stale is not None else {}) if int(age) > bound]
    if over and not any(dial.name == "staleness.max_staleness" for dial in snapshot.dials):
        yield Alert(level="error", text=f"tokens of age {max(over)} were trained, the bound is {bound}")
    figures = snapshot.learner.figures if snapshot.learner is not None else {}
    if figures.get("ess", 1.0) < LOW_ESS:
        yield Alert(level="warn", text=f"few tokens carry the gradient: effective sample size {figures['ess']:.0%}")
