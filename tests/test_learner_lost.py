"""The learner without a whole checkpoint, and without what it would have to train again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from learner.checkpoint import CheckpointError, complete_steps, step_directory
from learner.learner import Learner
from tests.learner_batches import make_model
from tests.learner_process import spec
from tests.learner_world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


async def test_batches_that_are_gone_are_an_error_that_names_what_was_damaged(tmp_path: Path) -> None:
    model_dir, directory = make_model(tmp_path / "model", hidden_size=32), tmp_path / "run"
    directory.mkdir()
    async with World(directory, steps=1) as world, asyncio.timeout(300):

        def learner() -> Learner:
            made = Learner(spec(model_dir, directory), resolve=world.resolve, heartbeat_s=0.2)
            world.weights_at(made.weights_endpoint)
            return made

        assert await learner().run() == "done"
        assert complete_steps(directory / "checkpoints") == [1]
        (step_directory(directory / "checkpoints", 1) / "COMPLETE").write_text("{")
        for path in (directory / "buffer" / "segments").iterdir():
            path.unlink()
        with pytest.raises(CheckpointError, match=r"step 0 can't be computed again from version 0.*step_1/COMPLETE"):
            await learner().run()
