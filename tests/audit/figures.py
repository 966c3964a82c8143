"""What a run's records say about it: groups, ages, rewards, tool errors, evaluations, curves.

Consumes    a Run
Produces    plain dictionaries, ready for JSON
Waits for   nothing: pure functions
Invariant   every figure follows from rows and version runs alone; no metric that a role reported is read
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from tests.audit.load import Group, Rollout, Run

FAILED = frozenset(
    ("error", "exit", "signal", "timeout", "cpu_timeout", "memory", "output_limit", "bad_request", "malformed")
)
"""statuses of a call that failed by the model's doing"""
INFRASTRUCTURE = frozenset(("overloaded", "cancelled", "worker_lost", "internal"))
"""neither a call nor a failure"""


def figures(run: Run) -> dict[str, Any]:
    """Everything that is recomputed."""
    train = run.of_kind("train")
    kept = [rollout for group in run.trained for rollout in group.kept_rollouts]
    return {
        "run": run.meta.get("run", ""),
        "seed": run.meta.get("seed"),
        "max_staleness": run.meta.get("max_staleness"),
        "learner_steps": run.learner_steps,
        "groups_issued": len(train),
        "groups_trained": len(run.trained),
        "groups_dropped": dict(sorted(Counter(g.drop_reason for g in train if g.state == "dropped").items())),
        "groups_by_state": dict(sorted(Counter(group.state for group in train).items())),
        "rollouts_finished": sum(len(group.finished) for group in train),
        "rollouts_excluded": dict(sorted(Counter(_excluded(train)).items())),
        "tokens_generated": sum(turn.num_output_tokens for turn in run.turns),
        "tokens_trained": sum(turn.num_output_tokens for rollout in kept for turn in rollout.turns),
        "reward_trained_mean": _mean(rollout.reward for rollout in kept),
        **ages(run),
        **publish_lag(run),
        "evaluations": {phase: _evaluation(run, phase) for phase in run.evaluations},
        "steps": _steps(run),
        "versions": _versions(train),
    }


def publish_lag(run: Run) -> dict[str, dict[str, float | None]]:
    """From each version's record to the acknowledgement by the slowest engine: seconds, and newer versions by then."""
    events = [(at, 0, version) for at, version in run.published_unix_s]
    events += [(at, 1, version) for at, version in run.raised_unix_s]
    waiting: dict[int, float] = {}
    seconds: list[float] = []
    behind: list[float] = []
    newest = reached = 0
    for at, is_acknowledgement, version in sorted(events):
        if not is_acknowledgement:
            newest = max(newest, version)
            if version > reached:
                waiting[version] = at
            continue
        reached = max(reached, version)
        for one in [one for one in waiting if one <= reached]:
            seconds.append(at - waiting.pop(one))
            behind.append(newest - one)
    return {"publish_lag_s": _spread(seconds), "publish_lag_versions": _spread(behind)}


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "max": None}
    ordered, half = sorted(values), len(values) // 2
    middle = ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return {"p50": middle, "max": ordered[-1]}


def ages(run: Run) -> dict[str, Any]:
    """Ages of all trained tokens: the step that trains a token minus the version that sampled it.

    In the queue: from the step that was next when RoC decided. In flight: before that.
    """
    histogram: Counter[int] = Counter()
    queued = 0
    for group in run.trained:
        some = group_ages(group)
        histogram.update(some)
        if group.step is not None and group.decided_step is not None:
            queued += (group.step - group.decided_step) * sum(some.values())
    count = max(1, sum(histogram.values()))
    mean = sum(age * tokens for age, tokens in histogram.items()) / count
    return {
        "age_mean": mean,
        "age_in_queue_mean": queued / count,
        "age_in_flight_mean": mean - queued / count,
        "age_max": max(histogram, default=0),
        "age_histogram": {str(age): tokens for age, tokens in sorted(histogram.items())},
    }


def group_ages(group: Group) -> Counter[int]:
    """Tokens of a taken group's kept rollouts by age."""
    assert group.step is not None
    out: Counter[int] = Counter()
    for rollout in group.kept_rollouts:
        for turn in rollout.turns:
            for _, version, num_tokens in turn.version_runs:
                out[group.step - version] += num_tokens
    return out


def tool_errors(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """Failed calls / calls in correct rollouts; None without a call."""
    statuses = Counter(status for rollout in rollouts if rollout.reward > 0 for status in rollout.statuses)
    calls = sum(count for status, count in statuses.items() if status not in INFRASTRUCTURE)
    failed = sum(count for status, count in statuses.items() if status in FAILED)
    return {"calls": calls, "failed": failed, "tool_error_in_correct": failed / calls if calls else None}


def p_err(rollout: Rollout) -> float:
    """Failed share of a rollout's calls; one half without a call."""
    calls = [status for status in rollout.statuses if status not in INFRASTRUCTURE]
    return sum(status in FAILED for status in calls) / len(calls) if calls else 0.5


def p_format(rollout: Rollout) -> float:
    """1 without a well-formed answer, else surplus answers per assistant turn."""
    if not rollout.well_formed:
        return 1.0
    return min(1.0, (rollout.num_answers - 1) / rollout.num_turns)


def _evaluation(run: Run, phase: str) -> dict[str, Any]:
    groups = [group for group in run.of_kind("eval") if group.phase == phase]
    finished = [rollout for group in groups for rollout in group.finished]
    lineage, version, num_problems = run.evaluations[phase]
    return {
        "lineage": lineage,
        "version": version,
        "problems": num_problems,
        "finished": len(finished),
        "excluded": dict(Counter(_excluded(groups))),
        "accuracy": _mean(float(rollout.reward > 0) for rollout in finished),
        **tool_errors(finished),
    }


def _steps(run: Run) -> list[dict[str, Any]]:
    """A row per trained step: what was generated for its groups, and what of it was trained."""
    by_step: dict[int, list[Group]] = defaultdict(list)
    for group in run.trained:
        by_step[group.step or 0].append(group)
    rows = []
    for step, groups in sorted(by_step.items()):
        generated = [rollout for group in groups for rollout in group.finished]
        kept = [rollout for group in groups for rollout in group.kept_rollouts]
        row = {"step": step, "groups": len(groups), "reward": _mean(r.reward for r in generated)}
        row |= tool_errors(generated) | {"reward_kept": _mean(r.reward for r in kept)}
        rows.append(row | {"tool_error_in_correct_kept": tool_errors(kept)["tool_error_in_correct"]})
    return rows


def _versions(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """A row per version: all finished rollouts it began, dropped groups' among them; the policy as it was."""
    by_version: dict[int, list[Rollout]] = defaultdict(list)
    for group in groups:
        for rollout in group.finished:
            if rollout.turns and rollout.turns[0].version_runs:
                by_version[rollout.turns[0].version_runs[0][1]].append(rollout)
    return [
        {"version": version, "rollouts": len(some), "reward": _mean(r.reward for r in some), **tool_errors(some)}
        for version, some in sorted(by_version.items())
    ]


def _excluded(groups: Iterable[Group]) -> list[str]:
    return [r.excluded_reason for group in groups for r in group.rollouts.values() if r.state == "excluded"]


def _mean(values: Iterable[float]) -> float | None:
    some = list(values)
    return sum(some) / len(some) if some else None
