"""`python -m tests.chaos.replay RUN`: the recorded batches once more, in one go, from version 0.

Consumes    a run directory at rest: its recipe, batches, payload files
Produces    one line of JSON: the checksum of every version from 0 to the last, as publications carry it
Waits for   nothing
Invariant   writes nothing in the run; the learner's trainer is the only thing it shares with the run's life: no
            checkpoint, no restart and no publication can have touched these weights
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.witness import opened

LOOPBACK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(list(checksums(directory, Path(scratch)))), flush=True)
    os._exit(0)  # DeepSpeed's threads would hold up the end


def checksums(directory: Path, scratch: Path) -> Iterator[int]:
    """Of version 0, 1, ... in turn; each is trained when it is asked for."""
    from launch.config import parse, read_toml
    from launch.environment import detect_device, device_environment, role_environment

    recipe = parse(read_toml(directory / "recipe.toml"), [], str(directory))
    os.environ.update(role_environment("learner", scratch) | device_environment(recipe, "learner", detect_device()))
    os.environ.update(LOOPBACK)
    import torch

    from buffer.codec import decode
    from buffer.schema import Batch
    from learner.trainer import Trainer, TrainerSpec

    torch.set_num_threads(1)
    trainer = Trainer(
        TrainerSpec(
            run="replay",
            model=Path(recipe.model.path),
            directory=scratch,
            temperature=recipe.rollout.temperature,
            learner=recipe.learner,
            loss=recipe.loss,
            publish=recipe.publish_settings(),
        ),
        rank=0,
        world=1,
    )
    yield _checksum(trainer)
    with opened(directory) as db:
        records = db.execute("SELECT record FROM batches ORDER BY step").fetchall()
        for (record,) in records:
            batch = decode(Batch, record)
            trainer.train(batch, [_trajectory(directory, db, *key) for key in trainer.share(batch)])
            yield _checksum(trainer)


def _checksum(trainer: Any) -> int:
    packed = trainer.pack(lineage=0)
    assert packed is not None, "there is one rank"
    checksum: int = packed.manifest.checksum
    return checksum


def _trajectory(directory: Path, db: Any, group: int, rollout: int) -> Any:
    from buffer.codec import decode
    from buffer.schema import Turn
    from buffer.storage import trajectory

    places = db.execute(
        "SELECT segment, offset_bytes, length_bytes FROM turns WHERE group_id = ? AND rollout = ? ORDER BY turn",
        (group, rollout),
    )
    turns = []
    for segment, offset, length in places:
        with open(directory / "buffer" / "segments" / f"{segment:08d}.seg", "rb") as file:
            file.seek(offset)
            data = file.read(length)
        num_body = int.from_bytes(data[8:12], "little")
        turns.append(decode(Turn, data[16 : 16 + num_body], data[16 + num_body :]))
    return trajectory(turns)


if __name__ == "__main__":
    main()
