"""Settings of the learner: optimizer and memory, the loss, what is published.

Consumes    the [learner], [loss] and [publish] tables of a recipe
Produces    frozen models; unknown keys, wrong types and impossible values are refused with the reason
Invariant   each dial is here once; the staleness bound, P, G and the sampling temperature belong to other packages
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from buffer.settings import LIVE

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class LearnerSettings(BaseModel):
    """How the weights are trained, on how many ranks, and how often they are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int = Field(default=1, ge=1, description="learner processes; each trains its share of a batch")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="what DeepSpeed shards over ranks: nothing, optimizer state, gradients, weights"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of weights and activations; auto: float32 on CPU, bfloat16 on GPU"
    )
    lr: float = Field(
        default=3e-4, gt=0, json_schema_extra=LIVE, description="AdamW's learning rate, constant after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the rate rises linearly to lr")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled, on matrices only (not norms or biases)")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW: decay of the mean of gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW: decay of the mean of squared gradients")
    max_grad_norm: float = Field(default=1.0, gt=0, description="norm to which the step's whole gradient is clipped")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="tokens, padding included, of one forward pass; a longer trajectory goes alone"
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: about 30% slower, far less memory"
    )
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints; the last step has one too")
    keep_checkpoints: int = Field(default=2, ge=2, description="complete checkpoints kept; older ones are deleted")
    rank_timeout_s: float = Field(
        default=300.0, gt=0, description="seconds a rank waits for the others in a collective before it gives up"
    )
    step_timeout_s: float = Field(
        default=3600.0, gt=0, description="seconds after which a step, checkpoint or export that goes on counts as hung"
    )


class LossSettings(BaseModel):
    """The clipped token-level objective and how samples of older versions are corrected (design: Loss)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip_low: float = Field(default=0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.28, gt=0, description="the ratio is clipped above 1 + clip_high")
    correction: Literal["direct", "decoupled", "none"] = Field(
        default="direct",
        description="direct: ratio to the engine's log-probs, clipped; decoupled: ratio to the policy at the step's "
        "start, weighted by that policy over the engine's; none: no weight (refused when stale tokens may come)",
    )
    tis_cap: float = Field(default=2.0, ge=1, description="largest importance weight a token may have")
    tis_mode: Literal["cap", "mask"] = Field(
        default="cap", description="a token above tis_cap is weighted as if at it (cap), or left out (mask); counted"
    )
    advantage_std: Literal["population", "sample", "none"] = Field(
        default="population", description="what a group's centred rewards are divided by (none: nothing)"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="with negative advantages the objective is at least dual_clip x advantage"
    )

    def refuse_uncorrected(self, max_staleness: int) -> None:
        """Raise when the loss would treat stale tokens as fresh ones.

        Raises:
            ValueError: correction is "none" although max_staleness allows tokens of older versions.
        """
        if self.correction == "none" and max_staleness > 0:
            raise ValueError(
                f'loss.correction = "none" with staleness.max_staleness = {max_staleness}: tokens up to '
                f"{max_staleness} steps old would be trained as if the present policy had sampled them, which biases "
                'the gradient without a sign. Set loss.correction = "direct" or "decoupled", or max_staleness = 0.'
            )


class PublishSettings(BaseModel):
    """How a version travels to the engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket_mib: int = Field(default=64, ge=1, le=1024, description="size of one message of weights, in MiB")
    max_mib_per_s: float = Field(
        default=0.0,
        ge=0,
        description="most MiB per second that the learner sends to all engines together, where trajectories share "
        "the network; 0: no limit",
    )
    dtype: Dtype = Field(default="auto", description="of published floating-point weights; auto: the learner's own")
