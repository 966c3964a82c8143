"""Supervised fine-tuning on demonstrations, in plain torch.

Consumes    a model, encoded examples, `SftSettings`
Produces    the trained model, one `SftProgress` per report
Waits for   nothing
Invariant   on one machine and thread count, the result depends on the model, the examples and the seed alone

The loss is the mean over the assistant's tokens, plus `all_tokens_weight` times the mean over all tokens: a model that
starts from nothing learns to copy numbers sooner when it is also asked to predict the text it reads. Both means divide
by the tokens of an average batch, not of the batch at hand: batches hold examples of one length, and a short episode's
token must not weigh more than a long one's, or the model would learn other shares than its demonstrations have.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

BATCHES_PER_POOL = 16
"""Batches are cut from pools sorted by length, which halves the padding, and come in random order."""


class SftSettings(BaseModel):
    """The `[sft]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    """At its highest; it falls to a hundredth of this along a cosine."""
    warmup_steps: int = Field(default=50, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    all_tokens_weight: float = Field(default=0.1, ge=0)
    report_every_steps: int = Field(default=25, ge=1)
    shuffle: bool = True
    """Take the examples in a random order; False keeps theirs, but for the order inside a pool."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One encoded conversation."""

    ids: Sequence[int]
    """[T] tokens"""
    ours: Sequence[bool]
    """[T] the assistant's tokens"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftProgress:
    """Where a fine-tuning stands."""

    step: int
    steps: int
    loss_assistant: float
    """Mean since the last report, nats per token."""
    loss_all: float
    learning_rate: float


def train(
    model: Any, examples: Sequence[Example], settings: SftSettings, report: Callable[[SftProgress], None]
) -> None:
    """Trains the model in place."""
    model.train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    kept = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    tokens = torch.tensor([float(sum(sum(e.ours) for e in examples)), float(sum(len(e.ids) - 1 for e in examples))])
    tokens *= settings.batch_size / len(examples)  # [2] of an average batch
    sums = torch.zeros(2)
    since = 0
    for step, batch in zip(range(1, settings.steps + 1), batches(examples, settings), strict=False):
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = batch_losses(model, batch) / tokens  # [2]
        (losses[0] + settings.all_tokens_weight * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += losses.detach()
        since += 1
        if step % settings.report_every_steps == 0 or step == settings.steps:
            ours, every = (sums / since).tolist()
            report(
                SftProgress(step=step, steps=settings.steps, loss_assistant=ours, loss_all=every, learning_rate=rate)
            )
            sums, since = torch.zeros(2), 0


def learning_rate(settings: SftSettings, step: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth; steps count from 1."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    part = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))


def batches(examples: Sequence[Example], settings: SftSettings) -> Iterator[list[Example]]:
    """Batches without end; each example once per epoch, but for a rest smaller than a batch."""
    if len(examples) < settings.batch_size:
        raise ValueError(f"sft.batch_size = {settings.batch_size}, but there are {len(examples)} examples: lower it")
    random = Random(settings.seed)
    size = settings.batch_size
    while True:
        order = list(range(len(examples)))
        if settings.shuffle:
            random.shuffle(order)
        for start in range(0, len(order), size * BATCHES_PER_POOL):
            pool = order[start : start + size * BATCHES_PER_POOL]
            pool.sort(key=lambda place: len(examples[place].ids))
            cuts = [pool[at : at + size] for at in range(0, len(pool) - size + 1, size)]
            random.shuffle(cuts)
            for cut in cuts:
                yield [examples[place] for place in cut]


def batch_losses(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """[2]: summed nats of the assistant's tokens, and of all tokens but the first of each example."""
    length = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)  # [B, T]
    ours = torch.zeros(len(batch), length, dtype=torch.bool)  # [B, T]
    real = torch.zeros(len(batch), length, dtype=torch.bool)  # [B, T]
    for row, example in enumerate(batch):
        count = len(example.ids)
        ids[row, :count] = torch.tensor(example.ids)
        ours[row, :count] = torch.tensor(example.ours)
        real[row, :count] = True
    # causal attention and padding on the right: no real token sees a padded one, so no mask is needed
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T-1, V]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    nats = nats.view(len(batch), length - 1)  # [B, T-1]
    masks = (ours[:, 1:], real[:, 1:])
    return torch.stack([(nats * mask).sum() for mask in masks])
