"""Multi-turn episodes with transformers alone: the whole batch turn by turn, token by token.

Consumes    a Hugging Face model, a `Chat`, problems, a function that executes code
Produces    `Episode`s: tokens, log-probs at sampling, parsed turns, statuses
Waits for   the executor
Invariant   what the model produced is never encoded again
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actors.chat import Chat, Malformed
from actors.problems import Problem
from buffer.schema import Finish, Trajectory
from sandbox.api import Result, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one episode."""

    max_turns: int = 4
    max_length_tokens: int = 160
    max_new_tokens: int = 40
    temperature: float = 1.0


@dataclass(kw_only=True, slots=True)
class Episode:
    """One attempt at a problem, growing turn by turn."""

    problem: Problem
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    statuses: list[str] = field(default_factory=list)
    answer: str | None = None
    well_formed: bool = False
    num_answers: int = 0
    num_turns: int = 0
    end: str = ""

    @property
    def reward(self) -> float:
        """1 when the boxed answer is the problem's, as text."""
        return float(self.answer is not None and self.answer.strip() == self.problem.answer)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Appends sampled tokens with their log-probs, or tokens that come from outside."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    def finish(self, group: int, rollout: int) -> Finish:
        """Its header, as the RoC filter reads it."""
        return Finish(
            group=group,
            rollout=rollout,
            attempt=0,
            reward=self.reward,
            verdict="right" if self.reward else "wrong",
            answer=self.answer or "",
            well_formed=self.well_formed,
            num_answers=self.num_answers,
            num_turns=self.num_turns,
            statuses=tuple(self.statuses),
            num_output_tokens=sum(self.sampled),
            num_tokens=len(self.ids),
            end=self.end,
        )

    def trajectory(self, group: int, rollout: int, version: int = 0) -> Trajectory:
        """Its tokens, as the learner trains them."""
        sampled = np.array(self.sampled)
        return Trajectory(
            group=group,
            rollout=rollout,
            ids=np.array(self.ids, dtype=np.int32),
            sampled=sampled,
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.where(sampled, version, -1).astype(np.int32),
        )


def sample_episodes(
    model: Any,
    chat: Chat,
    problems: Sequence[Problem],
    execute: Callable[[str], Result],
    limits: Limits,
    generator: torch.Generator,
) -> list[Episode]:
    """One episode for each problem named; name a problem twice for two attempts."""
    episodes = []
    for problem in problems:
        prompt = chat.prompt_ids(problem.problem)
        episode = Episode(problem=problem, ids=[], sampled=[], logprobs=[])
        episode.add(prompt)
        episodes.append(episode)
    active = list(episodes)
    while active:
        room = [limits.max_length_tokens - len(episode.ids) for episode in active]
        turns = generate(model, [episode.ids for episode in active], chat.stop_ids, room, limits, generator)
        for episode, (ids, logprobs) in zip(active, turns, strict=True):
            _advance(episode, chat, ids, logprobs, execute, limits)
        active = [episode for episode in active if not episode.end]
    return episodes


def _advance(
    episode: Episode,
    chat: Chat,
    ids: list[int],
    logprobs: list[float],
    execute: Callable[[str], Result],
    limits: Limits,
) -> None:
    """Adds a turn and what comes back, or the end."""
    episode.add(ids, logprobs)
    parsed = chat.parse(ids)
    episode.num_turns += 1
    episode.num_answers += parsed.num_answers
    episode.answer, episode.well_formed = parsed.answer, parsed.answer_well_formed
    if not parsed.ended:
        episode.end = "length"
    elif parsed.call is None:
        episode.end = "answer" if parsed.answer is not None else "no_call"
    elif episode.num_turns >= limits.max_turns:
        episode.end = "turns"
    else:
        malformed = isinstance(parsed.call, Malformed)
        result = None if malformed else execute(parsed.call.code)
        observation = chat.observation_ids(parsed.call.text if result is None else result.to_text())
        episode.statuses.append(str(Status.MALFORMED if result is None else result.status))
        if len(episode.ids) + len(observation) >= limits.max_length_tokens:
            episode.end = "length"
        else:
            episode.add(observation)


@torch.no_grad()
def generate(
    model: Any,
    contexts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    room: Sequence[int],
    limits: Limits,
    generator: torch.Generator,
) -> list[tuple[list[int], list[float]]]:
    """One turn for each context: tokens with the stop token, and their log-probs at the sampling temperature."""
    model.eval()
    count, width = len(contexts), max(map(len, contexts))
    ids = torch.zeros(count, width, dtype=torch.long)  # [B, T], padded on the left
    mask = torch.zeros(count, width, dtype=torch.long)  # [B, T]
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(stop_ids)
    budget = torch.tensor(room).clamp(max=limits.max_new_tokens)
    live = torch.ones(count, dtype=torch.bool)
    tokens, logprobs, lives = [], [], []
    cache = None
    for made in range(int(budget.max())):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = out.past_key_values
        logp = torch.log_softmax(out.logits[:, -1].float() / limits.temperature, dim=-1)  # [B, V]
        token = torch.multinomial(logp.exp(), 1, generator=generator)  # [B, 1]
        tokens.append(token)
        logprobs.append(logp.gather(1, token))
        lives.append(live)
        live = live & ~torch.isin(token[:, 0], stops) & (made + 1 < budget)
        if not live.any():
            break
        ids, position = token, position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(count, 1, dtype=torch.long)], dim=1)
    lengths = torch.stack(lives).sum(0).tolist()
    token_rows, logprob_rows = torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist()
    return [(token_rows[row][:n], logprob_rows[row][:n]) for row, n in enumerate(lengths)]
