"""What follows from a recipe: figures that nobody sets and everybody asks for.

Consumes    a recipe, the model's config.json
Produces    `Derived` and its lines, as `--dry-run` prints them
Waits for   nothing; imports neither torch, vLLM nor Ray
Invariant   no figure here is a dial
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.platform import CPU_KV_MIB
from launch.tree import Recipe

MIB = 1 << 20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RECORD_BYTES_PER_TOKEN = 8
"""On disk: token id and log-prob; versions and texts come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder's sizes, from config.json."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    vocabulary: int
    max_length_tokens: int
    tied: bool

    @property
    def num_parameters(self) -> int:
        """Close to the truth for dense decoders of the Llama kind: attention, gated MLP, embeddings."""
        heads = self.hidden_size * self.hidden_size * 2 + self.hidden_size * self.num_kv_heads * self.head_dim * 2
        layer = heads + 3 * self.hidden_size * self.mlp_size
        return self.num_layers * layer + self.vocabulary * self.hidden_size * (1 if self.tied else 2)

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype]


def read_shape(folder: Path) -> Shape:
    """Sizes of the model in `folder`.

    Raises:
        KeyError: the configuration is of another kind and lacks a size.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    return Shape(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden_size=config["hidden_size"],
        mlp_size=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        max_length_tokens=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """Figures that follow from a recipe."""

    tickets: int
    """B = (S + 1) P: groups that may be in the system at once"""
    rollouts_in_flight: int
    """most rollouts in the system at once"""
    engine_slots: int
    """rollouts that all engines together may hold"""
    rollouts_per_step: int
    trajectories_per_step: int
    tokens_per_step_max: int
    """if every kept rollout had the greatest length"""
    disk_bytes_per_step_max: int
    kv_tokens_per_engine: int | None
    """None where the accelerator or the host decides"""
    full_length_rollouts_per_engine: int | None
    engine_weight_bytes: int
    learner_state_bytes: int
    """per rank: weights, gradients and AdamW's two moments, as the ZeRO stage shards them"""


def derive(recipe: Recipe, shape: Shape, device: str) -> Derived:
    """Everything that follows. `device` is that of the engines: "auto" where nobody knows before they are there."""
    step, rollout = recipe.groups, recipe.rollout
    tickets = (recipe.staleness.max_staleness + 1) * step.groups_per_step
    kept = step.groups_per_step * step.group_size
    kv_mib = rollout.kv_cache_mib or (CPU_KV_MIB if device == "cpu" else None)
    per_token = shape.kv_bytes_per_token(rollout.dtype) // rollout.tensor_parallel
    kv_tokens = None if kv_mib is None else kv_mib * MIB // per_token
    return Derived(
        tickets=tickets,
        rollouts_in_flight=tickets * recipe.num_rollouts,
        engine_slots=rollout.engines * rollout.concurrency,
        rollouts_per_step=step.groups_per_step * recipe.num_rollouts,
        trajectories_per_step=kept,
        tokens_per_step_max=kept * rollout.max_length,
        disk_bytes_per_step_max=step.groups_per_step
        * recipe.num_rollouts
        * rollout.max_length
        * RECORD_BYTES_PER_TOKEN,
        kv_tokens_per_engine=kv_tokens,
        full_length_rollouts_per_engine=None if kv_tokens is None else kv_tokens // rollout.max_length,
        engine_weight_bytes=shape.num_parameters * BYTES[rollout.dtype] // rollout.tensor_parallel,
        learner_state_bytes=_learner_bytes(recipe, shape.num_parameters),
    )


def _learner_bytes(recipe: Recipe, num_parameters: int) -> int:
    """Mixed precision keeps a float32 master copy beside 2-byte weights and gradients."""
    learner = recipe.learner
    half = learner.dtype == "bfloat16"
    weights, gradients, optimizer = (2, 2, 12) if half else (4, 4, 8)
    stage, ranks = learner.zero_stage, learner.ranks
    per_parameter = (
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )
    return int(num_parameters * per_parameter)


def lines(derived: Derived) -> list[str]:
    """For people."""
    kv = "the engine's host decides"
    if derived.kv_tokens_per_engine is not None:
        kv = (
            f"{derived.kv_tokens_per_engine:,} tokens per engine, "
            f"{derived.full_length_rollouts_per_engine:,} rollouts of the greatest length"
        )
    return [
        f"tickets              {derived.tickets} groups, {derived.rollouts_in_flight} rollouts at most in the system",
        f"engine slots         {derived.engine_slots} rollouts at once",
        f"a step               {derived.rollouts_per_step} rollouts generated, {derived.trajectories_per_step} trained",
        f"tokens per step      {derived.tokens_per_step_max:,} at most",
        f"disk per step        {derived.disk_bytes_per_step_max / MIB:,.1f} MiB at most",
        f"KV cache             {kv}",
        f"engine weights       {derived.engine_weight_bytes / MIB:,.1f} MiB per accelerator or process",
        f"learner state        {derived.learner_state_bytes / MIB:,.1f} MiB per rank, activations apart",
    ]
