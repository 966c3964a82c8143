"""Batches and a tiny model for the learner's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from buffer.schema import Batch, BatchGroup, Trajectory

VOCAB = 460


def make_batch(
    *,
    step: int = 4,
    num_groups: int = 4,
    group_size: int = 4,
    seed: int = 0,
    shortest: int = 12,
    longest: int = 60,
    versions: tuple[int, ...] = (3, 4),
    first_group: int = 0,
) -> tuple[Batch, list[Trajectory]]:
    """A batch of step `step` whose groups have base versions[0] and deadline step + 1; lengths are uneven."""
    random = np.random.default_rng(seed)
    groups, trajectories = [], []
    for group in range(first_group, first_group + num_groups):
        rollouts = [
            make_trajectory(random, group, rollout, int(random.integers(shortest, longest)), versions)
            for rollout in range(group_size)
        ]
        trajectories += rollouts
        rewards = [float(value) for value in random.integers(0, 2, group_size)]
        rewards[0], rewards[-1] = 0.0, 1.0
        groups.append(
            BatchGroup(
                group=group,
                base=versions[0],
                deadline=step + 1,
                rollouts=tuple(range(group_size)),
                rewards=tuple(rewards),
                num_tokens=tuple(rollout.ids.size for rollout in rollouts),
                num_output_tokens=tuple(int(rollout.sampled.sum()) for rollout in rollouts),
            )
        )
    return Batch(step=step, groups=tuple(groups)), trajectories


def make_trajectory(
    random: np.random.Generator, group: int, rollout: int, length: int, versions: tuple[int, ...]
) -> Trajectory:
    """A prompt of 4 to 8 tokens, an output, an observation of 3, an output again; versions change along the way."""
    prompt = int(random.integers(4, 9))
    sampled = np.zeros(length, dtype=np.bool_)
    sampled[prompt:] = True
    sampled[prompt + 2 : prompt + 5] = length < prompt + 7
    stamps = np.sort(random.choice(versions, size=length)).astype(np.int32)
    return Trajectory(
        group=group,
        rollout=rollout,
        ids=random.integers(0, VOCAB, length).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -6.0 + 0.3 * random.normal(size=length), 0.0).astype(np.float32),
        versions=np.where(sampled, stamps, -1).astype(np.int32),
    )


def make_model(directory: Path, *, hidden_size: int = 64) -> Path:
    """A tiny Qwen3 with tied embeddings, random weights, saved in `directory`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_untied_model(directory: Path) -> Path:
    """A tiny Llama with an output layer of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def relative_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Norm of the difference over the norm of what was expected, all tensors together."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().pow(2).sum()) for name in expected)
    return (off / sum(float(value.double().pow(2).sum()) for value in expected.values())) ** 0.5
