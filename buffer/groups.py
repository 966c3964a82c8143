"""What the buffer remembers of each group between its ticket and its batch: scores, counts, versions; no payload.

Consumes    durable turns and finishes of a group
Produces    its headers for RoC, its entry in a batch, the ages of its tokens
Waits for   nothing: plain state, changed by the service only
Invariant   everything here can be rebuilt from the index (buffer/restore.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from buffer.schema import BatchGroup, Finish, GroupHeaders, Kind, Problem, Turn


@dataclass(slots=True)
class RolloutWork:
    """One rollout so far."""

    attempts: list[int] = field(default_factory=list)
    """the attempt that generated each durable turn"""
    num_tokens: int = 0
    """length of the trajectory: without what was observed after the last output"""
    num_output_tokens: int = 0
    num_bytes: int = 0
    """of its durable turns, as they lie in segments and go to the next engine"""
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    finish: Finish | None = None
    _num_observed: int = 0

    @property
    def num_turns(self) -> int:
        return len(self.attempts)

    def add(
        self, attempt: int, num_bytes: int, prompt: int, output: int, observation: int, runs: Iterable[tuple[int, int]]
    ) -> None:
        """The next turn, by the lengths of its parts in tokens; `runs` are (version, num_tokens)."""
        self.attempts.append(attempt)
        self.num_bytes += num_bytes
        self.num_tokens += prompt + self._num_observed + output
        self.num_output_tokens += output
        self._num_observed = observation
        for version, num_tokens in runs:
            self.tokens_by_version[version] = self.tokens_by_version.get(version, 0) + num_tokens


@dataclass(kw_only=True, slots=True)
class GroupWork:
    """One group that is not in a batch yet."""

    group: int
    kind: Kind
    phase: str
    """of an evaluation: start | end; "" for training"""
    problem: Problem
    base: int
    deadline: int
    rollouts: list[RolloutWork]
    scored: bool = False
    """closed for the engines; waits for RoC unless `kept` says otherwise"""
    deciding: str = ""
    """name of the RoC filter that has the headers"""
    kept: tuple[int, ...] = ()
    decided_step: int = 0
    decided_s: float = 0.0

    def finishes(self) -> list[Finish]:
        return [work.finish for work in self.rollouts if work.finish is not None]

    def headers(self, group_size: int) -> GroupHeaders:
        return GroupHeaders(
            group=self.group,
            group_size=group_size,
            num_rollouts=len(self.rollouts),
            rollouts=tuple(self.finishes()),
        )

    def batch_group(self) -> BatchGroup:
        works = [self.rollouts[rollout] for rollout in self.kept]
        return BatchGroup(
            group=self.group,
            base=self.base,
            deadline=self.deadline,
            rollouts=self.kept,
            rewards=tuple(work.finish.reward for work in works if work.finish is not None),
            num_tokens=tuple(work.num_tokens for work in works),
            num_output_tokens=tuple(work.num_output_tokens for work in works),
        )

    def kept_versions(self) -> dict[int, int]:
        """Tokens of the kept rollouts by the version that sampled them."""
        total: dict[int, int] = {}
        for rollout in self.kept:
            for version, count in self.rollouts[rollout].tokens_by_version.items():
                total[version] = total.get(version, 0) + count
        return total


def fault_of(turn: Turn, group: GroupWork) -> str:
    """What is wrong with a turn; "" when nothing is."""
    num_output, runs = len(turn.output_ids), turn.version_runs
    if num_output == 0:
        return "no token was sampled"
    if len(turn.logprobs) != num_output:
        return f"{len(turn.logprobs)} log-probs for {num_output} tokens"
    if not np.isfinite(turn.logprobs).all():
        return f"log-prob {int(np.flatnonzero(~np.isfinite(turn.logprobs))[0])} is not finite"
    if min((run.num_tokens for run in runs), default=1) < 1 or sum(run.num_tokens for run in runs) != num_output:
        return f"version runs {[run.num_tokens for run in runs]} do not cover {num_output} tokens"
    if (len(turn.prompt_ids) > 0) != (turn.turn == 0):
        return (
            f"{len(turn.prompt_ids)} prompt tokens in turn {turn.turn}: the prompt belongs into turn 0 and only there"
        )
    versions = [run.version for run in runs]
    if versions and min(versions) < group.base:
        return f"a token of version {min(versions)} is older than the ticket's base {group.base}"
    if group.kind == "eval" and any(version != group.base for version in versions):
        return f"versions {versions} in an evaluation of version {group.base}"
    return ""
