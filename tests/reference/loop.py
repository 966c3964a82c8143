"""The plain synchronous loop that learns: sample, select, take a gradient, step. The reference for S = 0.

Consumes    a model with its chat, a problem stream, settings
Produces    updated weights; `StepFigures` for each step; the gradient of any recorded batch
Waits for   the executor
Invariant   every token is trained by the step that follows the version that sampled it: age 0

`recorded_gradient` is the yardstick for a run's own batches: it takes trajectories and rewards as they were recorded.
The loss is written out here once more, on purpose, and shares nothing with the learner's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.chat import Chat
from actors.problems import Problem, ProblemStream
from actors.roc import RocSettings, select
from buffer.schema import GroupHeaders, Trajectory
from sandbox.api import Result, Status, is_failure, is_infra
from tests.reference.sampler import Episode, Limits, sample_episodes

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Sizes of the loop, named as in a recipe."""

    groups_per_step: int = 8
    group_size: int = 8
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    roc: RocSettings = field(default_factory=RocSettings)
    limits: Limits = field(default_factory=Limits)

    @property
    def num_rollouts(self) -> int:
        return self.group_size if self.roc.mode == "off" else 2 * self.group_size


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptGroup:
    """What RoC kept of a group."""

    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How a set of episodes did."""

    accuracy: float
    tool_error_in_correct: float
    """failed calls / calls in correct rollouts"""
    calls: float
    """per episode"""
    tokens: float
    """per episode"""
    unfinished: float
    """share that ran into a limit"""


def score(episodes: Sequence[Episode]) -> Score:
    """Accuracy and tool errors."""
    correct = [Status(status) for episode in episodes if episode.reward for status in episode.statuses]
    calls = [status for status in correct if not is_infra(status)]
    return Score(
        accuracy=sum(episode.reward for episode in episodes) / len(episodes),
        tool_error_in_correct=sum(map(is_failure, calls)) / max(1, len(calls)),
        calls=sum(len(episode.statuses) for episode in episodes) / len(episodes),
        tokens=sum(len(episode.ids) for episode in episodes) / len(episodes),
        unfinished=sum(episode.end in ("length", "turns") for episode in episodes) / len(episodes),
    )


def evaluate(
    model: Any,
    chat: Chat,
    problems: Sequence[Problem],
    execute: Callable[[str], Result],
    limits: Limits,
    generator: torch.Generator,
) -> Score:
    """One episode for each problem, 128 at a time."""
    episodes: list[Episode] = []
    for start in range(0, len(problems), 128):
        episodes += sample_episodes(model, chat, problems[start : start + 128], execute, limits, generator)
    return score(episodes)


def select_group(episodes: Sequence[Episode], group: int, settings: LoopSettings, run_seed: int) -> KeptGroup | str:
    """The group's kept part, or the reason why it is dropped."""
    headers = GroupHeaders(
        group=group,
        group_size=settings.group_size,
        num_rollouts=len(episodes),
        rollouts=tuple(episode.finish(group, number) for number, episode in enumerate(episodes)),
    )
    decision = select(headers, settings.roc, run_seed)
    if decision.drop_reason:
        return decision.drop_reason
    return KeptGroup(
        trajectories=tuple(episodes[number].trajectory(group, number) for number in decision.keep),
        rewards=tuple(episodes[number].reward for number in decision.keep),
    )


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (population std + 1e-6)."""
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def accumulate_gradient(model: Any, groups: Sequence[KeptGroup], temperature: float = 1.0) -> float:
    """Adds the step's gradient to the parameters' `.grad`; returns the loss."""
    rows = [
        (trajectory, advantage)
        for group in groups
        for trajectory, advantage in zip(group.trajectories, advantages(group.rewards), strict=True)
    ]
    num_loss_tokens = sum(int(trajectory.sampled.sum()) for trajectory, _ in rows)
    total = 0.0
    model.train()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        loss = loss_sum(model, rows[start : start + ROWS_AT_ONCE], temperature) / num_loss_tokens
        loss.backward()
        total += float(loss.detach())
    return total


def loss_sum(model: Any, rows: Sequence[tuple[Trajectory, float]], temperature: float = 1.0) -> torch.Tensor:
    """- sum over sampled tokens of min(ratio * A, clip(ratio) * A), the ratio being policy / engine."""
    length = max(len(trajectory.ids) for trajectory, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)  # [B, T]
    mask = torch.zeros(len(rows), length)  # [B, T]
    behind = torch.zeros(len(rows), length)  # [B, T]
    advantage = torch.tensor([value for _, value in rows])[:, None]  # [B, 1]
    for row, (trajectory, _) in enumerate(rows):
        count = len(trajectory.ids)
        ids[row, :count] = torch.from_numpy(trajectory.ids.astype("int64"))
        mask[row, :count] = torch.from_numpy(trajectory.sampled.astype("float32"))
        behind[row, :count] = torch.from_numpy(trajectory.logprobs.copy())
    # causal attention and padding on the right: no real token sees a padded one, so no attention mask is needed
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature  # [B, T-1, V]
    logp = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]  # [B, T-1]
    ratio = torch.exp(logp - behind[:, 1:])
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    return -(gain * mask[:, 1:]).sum()


def recorded_gradient(model: Any, groups: Sequence[KeptGroup], temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The gradient that the loop would take on a recorded batch, by parameter name, before any clipping."""
    model.zero_grad(set_to_none=True)
    accumulate_gradient(model, groups, temperature)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What a step saw."""

    step: int
    sampled: Score
    """of all rollouts sampled for the step, dropped groups included"""
    groups_trained: int
    groups_dropped: int
    loss: float
    grad_norm: float


class SyncLoop:
    """The loop's state: model, optimizer, position in the problems, next group number."""

    def __init__(
        self,
        model: Any,
        chat: Chat,
        problems: ProblemStream,
        execute: Callable[[str], Result],
        settings: LoopSettings,
        seed: int,
    ) -> None:
        self.model, self.chat, self.problems, self.execute, self.settings = model, chat, problems, execute, settings
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.next_group = 0
        self.next_step = 0

    def sample_groups(self, count: int) -> list[list[Episode]]:
        """The next `count` problems, each attempted 2G times (G with `roc.mode = "off"`)."""
        each = self.settings.num_rollouts
        chosen = [self.problems.at(self.next_group + number) for number in range(count)]
        named = [problem for problem in chosen for _ in range(each)]
        episodes = sample_episodes(self.model, self.chat, named, self.execute, self.settings.limits, self.generator)
        return [episodes[start : start + each] for start in range(0, len(episodes), each)]

    def step(self, max_dropped: int = 40) -> StepFigures | None:
        """One learner step on P kept groups; None when `max_dropped` groups in a row were dropped."""
        kept: list[KeptGroup] = []
        seen: list[Episode] = []
        dropped = dropped_in_a_row = 0
        while len(kept) < self.settings.groups_per_step:
            for episodes in self.sample_groups(self.settings.groups_per_step - len(kept)):
                seen += episodes
                outcome = select_group(episodes, self.next_group, self.settings, self.seed)
                self.next_group += 1
                if isinstance(outcome, KeptGroup):
                    kept.append(outcome)
                    dropped_in_a_row = 0
                else:
                    dropped += 1
                    dropped_in_a_row += 1
            if dropped_in_a_row >= max_dropped:
                return None
        self.optimizer.zero_grad(set_to_none=True)
        loss = accumulate_gradient(self.model, kept, self.settings.limits.temperature)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.next_step += 1
        return StepFigures(
            step=self.next_step,
            sampled=score(seen),
            groups_trained=len(kept),
            groups_dropped=dropped,
            loss=loss,
            grad_norm=float(norm),
        )
