"""A learner rank in a process of its own, for tests: python -m tests.learner_process ENDPOINT MODEL DIRECTORY RANK ...

Without arguments: `bear`, many lives one after the other.

Imports no more than the learner does, so that it starts fast. Prints where it serves weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch

from learner.learner import Learner
from learner.settings import LearnerSettings, LossSettings, PublishSettings
from learner.trainer import TrainerSpec
from tests.learner_batches import make_model

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


def live(endpoint: str, model_dir: str, directory: str, rank: str, world_size: str, port: str, kill: str) -> NoReturn:
    """Ends with status 0 when the run is done, 1 by an error, or by SIGKILL at the phase `kill`, e.g. "trained:3"."""
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


def bear() -> None:
    """One life per line of standard input, which holds `live`'s arguments; imports are done once for all of them.

    Prints "born PID", what the life prints, and "dead STATUS", negative for a signal.
    """
    import deepspeed

    assert deepspeed
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), hidden_size=16)  # most of transformers is imported when it is first needed
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print("born", os.getpid(), flush=True)
            live(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print("dead", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    live(*sys.argv[1:]) if sys.argv[1:] else bear()
