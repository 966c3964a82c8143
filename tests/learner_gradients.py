"""What a run's learner applied, read from its checkpoints; for comparison with other implementations.

Needs a run on one rank with learner.zero_stage = 0, checkpoint_every = 1 and keep_checkpoints > its steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from learner.checkpoint import step_directory
from learner.device import device_choices
from learner.engine import TrainEngine
from learner.ranks import Ranks
from learner.settings import LearnerSettings


def version_state(
    directory: Path, model_dir: Path, settings: LearnerSettings, version: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of a version, and Adam's mean of gradients that came with it; version 0 is the model itself."""
    ranks = Ranks(rank=0, world=1, backend="gloo", timeout_s=60)
    engine = TrainEngine(settings, model_dir, ranks=ranks, device=device_choices("cpu"), temperature=1.0)
    if version:
        engine.load(step_directory(directory / "checkpoints", version))
    return {name: tensor.clone() for name, tensor in engine.weights()}, engine.moments()


def applied_gradient(directory: Path, model_dir: Path, settings: LearnerSettings, step: int) -> dict[str, torch.Tensor]:
    """The gradient of step `step` before clipping: (m' - beta1 m) / (1 - beta1), unclipped by the logged norm."""
    lines = [json.loads(line) for line in (directory / "metrics" / "steps.jsonl").read_text().splitlines()]
    norm = next(line["grad_norm"] for line in reversed(lines) if line["step"] == step)
    scale = max(1.0, (norm + 1e-6) / settings.max_grad_norm)
    _, before = version_state(directory, model_dir, settings, step)
    _, after = version_state(directory, model_dir, settings, step + 1)
    beta = settings.beta1
    return {
        name: ((after[name].double() - beta * before[name].double()) / (1 - beta) * scale).float() for name in after
    }
