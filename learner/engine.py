"""The training engine: DeepSpeed around the scoring model. Loss in, one optimizer step out.

Consumes    micro-batches of this rank, the step's global token count, a learning rate
Produces    gradients, a step, figures; full weights on rank 0; state on disk
Waits for   the other ranks: accumulate, step, weights, gradient, moments, save and load are entered by all of them
Invariant   the gradient is that of sum over all tokens of all ranks / N: DeepSpeed averages over ranks, so each
            micro-batch's sum is scaled by world / N, and only the last one of a step is an accumulation boundary
            (otherwise ZeRO 1 and 2 would keep the last micro-batch's gradient alone)
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.batch import MicroBatch
from learner.device import DeviceChoices
from learner.loss import token_loss
from learner.model import ScoringModel, load_model, num_score_chunks
from learner.ranks import Ranks
from learner.settings import LearnerSettings, LossSettings

GATHER_BYTES = 512 * 2**20
"""Full parameters that ZeRO 3 gathers at a time."""
TAG = "engine"
"""Name of DeepSpeed's folder inside a checkpoint."""


class NonFiniteGradient(RuntimeError):
    """The step's gradient is not finite: stepping would destroy the weights."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSums:
    """Sums over this rank's micro-batches, see learner.loss.SUMS."""

    sums_S: Tensor
    max_logprob_diff: float


class TrainEngine:
    """One rank's engine. Not thread-safe: all calls come from one thread."""

    def __init__(
        self, settings: LearnerSettings, model_dir: Path, *, ranks: Ranks, device: DeviceChoices, temperature: float
    ) -> None:
        self._settings, self._ranks = settings, ranks
        self._stage = _stage(settings, device)
        self.model = load_model(
            model_dir,
            dtype=device.dtype,
            attention=device.attention,
            temperature=temperature,
            activation_checkpointing=settings.activation_checkpointing,
        )
        self._deepspeed = _import_deepspeed(device)
        self._engine: Any = self._deepspeed.initialize(
            model=self.model,
            optimizer=_optimizer(self.model, settings, device),
            dist_init_required=False,
            config=_deepspeed_config(settings, self._stage, device),
        )[0]
        self._device: torch.device = self._engine.device

    def accumulate(self, micros: Sequence[MicroBatch], num_loss_tokens: int, loss: LossSettings) -> StepSums:
        """Forward and backward over all micro-batches of a step; `step` must follow."""
        sums: list[Tensor] = []
        largest = 0.0
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            loss_sum, sums_S, diff = micro_loss(self._engine, self.model.vocab_size, micro, loss, self._device)
            self._engine.backward(loss_sum * (self._ranks.world / num_loss_tokens))
            if not last:
                self._engine.step()
            sums.append(sums_S)
            largest = max(largest, float(diff))
        return StepSums(sums_S=torch.stack(sums).sum(0).cpu(), max_logprob_diff=largest)

    def step(self, lr: float) -> float:
        """Clip and take the optimizer step; returns the norm of the gradient before clipping.

        Raises:
            NonFiniteGradient: the norm is infinite or not a number.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            # DeepSpeed clips float32 without ZeRO but does not tell the norm, so it is done here instead.
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm))
            _refuse_non_finite(norm)
            self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            _refuse_non_finite(norm)
        return norm

    def gradient(self) -> dict[str, Tensor]:
        """The whole gradient between `accumulate` and `step`, averaged as trained, before clipping."""
        if self._stage == 0:
            return {name: param.grad.detach().clone() for name, param in self._named_parameters()}
        full_grad = self._deepspeed.utils.safe_get_full_grad
        return {name: full_grad(param).detach().cpu().clone() for name, param in self._named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """Adam's mean of gradients by parameter name, on ZeRO 0; zeros before the first step.

        Step k turns m into beta1 * m + (1 - beta1) * g, g being its clipped gradient: so two checkpoints in a row
        tell which gradient was applied.
        """
        if self._stage != 0:
            raise ValueError(f"moments are read on ZeRO 0 only, this engine shards them (stage {self._stage})")
        state = self._engine.optimizer.state
        return {
            name: state[param]["exp_avg"].detach().clone() if state.get(param) else torch.zeros_like(param)
            for name, param in self._named_parameters()
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter and saved buffer, tied ones once.

        Every rank must exhaust the iterator; on ZeRO 3 a tensor is whole only until the next is asked for, and on
        ranks other than 0 too.
        """
        for part in _parts(list(self._named_parameters()), GATHER_BYTES):
            with self._gathered([param for _, param in part]):
                for name, param in part:
                    yield name, param.detach()
        saved = set(self.model.hf.state_dict())
        for name, buffer in self.model.hf.named_buffers():
            if name in saved:
                yield name, buffer.detach()

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state under `directory`."""
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote with the same number of ranks and ZeRO stage."""
        path, _ = self._engine.load_checkpoint(str(directory), tag=TAG, load_lr_scheduler_states=False)
        if path is None:
            raise FileNotFoundError(f"{directory / TAG}: DeepSpeed finds no state there")

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        return self.model.hf.named_parameters()

    def _gathered(self, params: Sequence[Any]) -> Any:
        return self._deepspeed.zero.GatheredParameters(list(params), enabled=self._stage == 3)


def micro_loss(
    forward: Any, vocab_size: int, micro: MicroBatch, loss: LossSettings, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, figures and largest log-prob difference of one micro-batch; `forward` is the model or its engine."""
    logp_M, entropy_M = forward(
        torch.from_numpy(micro.ids_BT).to(device),
        torch.from_numpy(micro.index_M).to(device),
        torch.from_numpy(micro.targets_M).to(device),
        num_score_chunks(micro.most_loss_tokens, vocab_size),
    )
    return token_loss(
        logp_M,
        torch.from_numpy(micro.engine_logp_M).to(device),
        torch.from_numpy(micro.advantage_M).to(device),
        torch.from_numpy(micro.mask_M).to(device),
        entropy_M,
        loss,
    )


def gradient_of(
    model: ScoringModel, micros: Sequence[MicroBatch], num_loss_tokens: int, loss: LossSettings
) -> dict[str, Tensor]:
    """The gradient of a step by plain torch, without DeepSpeed: what any engine must agree with."""
    model.zero_grad()
    for micro in micros:
        loss_sum, _, _ = micro_loss(model, model.vocab_size, micro, loss, next(model.parameters()).device)
        (loss_sum / num_loss_tokens).backward()
    return {name: param.grad.detach().clone() for name, param in model.hf.named_parameters() if param.grad is not None}


def learning_rate(settings: LearnerSettings, step: int, lr: float | None = None) -> float:
    """Rate of step `step` (counted from 0): rises linearly over warmup_steps, then constant; `lr` over the recipe's."""
    return (settings.lr if lr is None else lr) * min(1.0, (step + 1) / (settings.warmup_steps + 1))


def _refuse_non_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            f"the gradient's norm is {norm}: the step is not kept. Look at logprob_diff_max and ratio_mean of the "
            "steps before; lower learner.lr or loss.tis_cap, or use learner.dtype = float32"
        )


def _parts(named: list[tuple[str, Any]], num_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Runs of parameters of at most `num_bytes` together, at least one each."""
    part: list[tuple[str, Any]] = []
    size = 0
    for name, param in named:
        param_bytes = getattr(param, "ds_numel", param.numel()) * param.element_size()
        if part and size + param_bytes > num_bytes:
            yield part
            part, size = [], 0
        part.append((name, param))
        size += param_bytes
    yield part


def _stage(settings: LearnerSettings, device: DeviceChoices) -> int:
    """bfloat16 needs ZeRO 1 at least: without it DeepSpeed would add up micro-batches in bfloat16."""
    return settings.zero_stage if device.dtype == torch.float32 else max(1, settings.zero_stage)


def _optimizer(model: ScoringModel, settings: LearnerSettings, device: DeviceChoices) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.lr, betas=betas, fused=device.fused_adam
    )


def _deepspeed_config(settings: LearnerSettings, stage: int, device: DeviceChoices) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # not used: the learner sets boundaries and scales itself
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if stage == 0 else settings.max_grad_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "overlap_comm": device.kind != "cpu", "contiguous_gradients": True},
    }
    if device.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _import_deepspeed(device: DeviceChoices) -> Any:
    """DeepSpeed on the ranks' existing process group, quiet, and without compiling anything."""
    os.environ.setdefault("LOCAL_RANK", "0")  # each rank's process sees its own device only
    if device.kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.kind == "cpu":
        # Else a shared-memory op is compiled for 80 s, and a killed compile leaves a lock that hangs later starts.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(device.backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed
