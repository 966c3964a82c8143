"""What a recipe may say about rollout actors and the weights they receive.

Produces    `RolloutSettings` (table `[rollout]`), `WeightsSettings` (table `[weights]`)
Invariant   frozen; an unknown key is refused; a dial is in one place only
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from buffer.settings import LIVE

__all__ = ["Device", "Dtype", "RolloutSettings", "WeightsSettings"]

Device = Literal["auto", "cpu", "cuda", "rocm"]
Dtype = Literal["float32", "bfloat16", "float16"]


class RolloutSettings(BaseModel):
    """Engines, and the limits of a rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: int = Field(default=1, ge=1)
    """Rollout actors, each with an engine of its own."""
    concurrency: int = Field(default=64, ge=1, json_schema_extra=LIVE)
    """Most rollouts at once in one engine; its KV cache may allow fewer."""
    max_turns: int = Field(default=4, ge=1)
    """Most generations of one rollout; a call made in the last one is not executed."""
    max_length: int = Field(default=1024, ge=8)
    """Most tokens of one rollout: prompt, outputs and observations."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens of one generation."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling in training; the full distribution (top_p = 1, top_k off)."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """KV cache of one engine in MiB; unset: 64 on CPU, what the accelerator has left otherwise."""
    dtype: Dtype = "bfloat16"
    """Of the engine's weights and KV; versions are published in it."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Accelerators of one engine."""
    device: Device = "auto"
    """What engines run on; auto takes the accelerator that torch finds, else the CPU."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of an engine that runs on the CPU."""

    @model_validator(mode="after")
    def _a_turn_fits(self) -> "RolloutSettings":
        if self.max_new_tokens > self.max_length:
            raise ValueError(
                f"rollout.max_new_tokens = {self.max_new_tokens} exceeds rollout.max_length = {self.max_length}: a "
                f"generation is part of its rollout; lower it to {self.max_length} or raise rollout.max_length"
            )
        return self


class WeightsSettings(BaseModel):
    """How an engine takes a published version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv: Literal["recompute", "keep"] = "recompute"
    """KV of running requests at a new version: recompute it, so that log-probs are those of one version; or keep it,
    cheaper with long contexts, with log-probs of mixed KV that no trainer can reproduce."""
    ack_timeout_s: float = Field(default=120.0, gt=0, json_schema_extra=LIVE)
    """Longest from a version's publication to its acknowledgement; an engine that needs longer is restarted."""
