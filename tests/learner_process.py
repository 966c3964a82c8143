"""A learner rank in a process of its own, for tests: python -m tests.learner_process ENDPOINT MODEL DIRECTORY RANK ...

Imports no more than the learner does, so that it starts fast. Prints where it serves weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import torch

from learner.learner import Learner
from learner.settings import LearnerSettings, LossSettings, PublishSettings
from learner.trainer import TrainerSpec

RUN = "learner-test"


def spec(model_dir: Path, directory: Path, **settings) -> TrainerSpec:
    learner = {"checkpoint_every": 2, "micro_batch_tokens": 120, "lr": 1e-2, "rank_timeout_s": 60.0} | settings
    return TrainerSpec(
        run=RUN,
        model=model_dir,
        directory=directory,
        temperature=1.0,
        learner=LearnerSettings(**learner),
        loss=LossSettings(),
        publish=PublishSettings(bucket_mib=1, dtype="float32"),
    )


def main() -> None:
    """Ends with status 0 when the run is done, 1 by an error, or by SIGKILL at the phase given last."""
    endpoint, model_dir, directory, rank, world_size, port, kill = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)

    async def resolve() -> str:
        return endpoint

    def on_phase(phase: str, step: int) -> None:
        if f"{phase}:{step}" == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    async def body() -> None:
        settings = {"ranks": int(world_size), "zero_stage": 2 if int(world_size) > 1 else 0}
        learner = Learner(
            spec(Path(model_dir), Path(directory), **settings),
            resolve=resolve,
            rank=int(rank),
            world=int(world_size),
            heartbeat_s=0.2,
            on_phase=on_phase,
        )
        print(learner.weights_endpoint, flush=True)
        await learner.run()

    try:
        asyncio.run(body())
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
