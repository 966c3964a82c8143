"""One rank of a learner engine in a process of its own, for tests: python -m tests.learner_rank RANK PORT MODEL OUT"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from learner.batch import batch_advantages, build_micro_batches, plan_step
from learner.device import device_choices
from learner.engine import TrainEngine
from learner.ranks import Ranks
from learner.settings import LearnerSettings, LossSettings
from tests.learner_batches import make_batch

LOSS = LossSettings()
RANK_STAGES = (0, 2, 3)


def engine(model_dir, ranks, **settings) -> TrainEngine:
    return TrainEngine(
        LearnerSettings(**settings), model_dir, ranks=ranks, device=device_choices("cpu"), temperature=1.0
    )


def copied(trainer):
    return [(name, tensor.clone()) for name, tensor in trainer.weights()]


def main() -> None:
    """Writes gradient, norm, weights by ZeRO stage, and the number of fillers, to OUT/rankRANK."""
    rank, port, model_dir, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    ranks = Ranks(rank=rank, world=2, backend="gloo", timeout_s=200)
    batch, trajectories = make_batch()
    plan = plan_step(batch, 2, 195)
    share = {key for micro in plan.shares[rank] for key in micro}
    mine = [trajectory for trajectory in trajectories if (trajectory.group, trajectory.rollout) in share]
    micros = build_micro_batches(plan, rank, mine, batch_advantages(batch, LOSS))
    results: dict[Any, Any] = {"fillers": sum(not micro.mask_M.any() for micro in micros)}
    for stage in RANK_STAGES:
        trainer = engine(model_dir, ranks, zero_stage=stage)
        trainer.accumulate(micros, plan.num_loss_tokens, LOSS)
        gradient = trainer.gradient()
        norm = trainer.step(1e-3)
        results[stage] = {"gradient": gradient, "norm": norm, "weights": dict(copied(trainer))}
    (out / f"rank{rank}").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
