"""The learner's loop against the real buffer: a whole run, a death and a restart, two ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sqlite3
import sys
import time
from pathlib import Path

import pytest
import torch

from buffer.client import BufferClient
from learner.checkpoint import complete_steps, read_mark, step_directory
from learner.learner import Learner, StepHung
from learner.trainer import Trainer
from tests.learner_batches import make_model, relative_difference
from tests.learner_gradients import applied_gradient, version_state
from tests.learner_process import RUN, spec
from tests.learner_world import World
from tests.reference.loop import KeptGroup, recorded_gradient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums depend on the number of threads, and a replay is compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def step_lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics" / "steps.jsonl").read_text().splitlines()]


def exported(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "export" / "model.safetensors")


async def test_a_run_from_the_first_version_to_the_export(model_dir, tmp_path):
    phases = []
    async with World(tmp_path, steps=5) as world, asyncio.timeout(200):
        learner = Learner(
            spec(model_dir, tmp_path),
            resolve=world.resolve,
            heartbeat_s=0.2,
            on_phase=lambda phase, step: phases.append((phase, step)),
        )
        world.weights_at(learner.weights_endpoint)
        assert await learner.run() == "done"
        monitor = BufferClient(world.resolve, run=RUN, role="monitor", name="monitor-0")
        status = await monitor.status()
        await monitor.close()
    assert [phase for phase in phases if phase[0] == "published"] == [("published", step) for step in range(6)]
    step_2 = phases.index(("taken", 2))
    assert phases[step_2 : step_2 + 6] == [
        ("taken", 2),
        ("trained", 2),
        ("packed", 3),
        ("recorded", 3),
        ("published", 3),
        ("taken", 3),
    ]
    assert phases.index(("trained", 3)) < phases.index(("checkpointed", 4)) < phases.index(("recorded", 4))
    assert {lineage for lineage, _ in world.loaded} == {1}
    assert world.loaded == sorted(world.loaded)
    assert complete_steps(tmp_path / "checkpoints") == [4, 5]
    lines = step_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(5))
    assert max(line["age_max"] for line in lines) <= 1
    assert all(line["trajectories"] == 8 and line["ess"] > 0.5 for line in lines)
    totals = read_mark(step_directory(tmp_path / "checkpoints", 5))[0].totals
    assert (totals.steps, totals.trajectories) == (5, 40)
    assert sum(totals.ages.values()) == totals.loss_tokens == sum(line["loss_tokens"] for line in lines)
    assert_published_equals_exported(world, exported(tmp_path))
    assert status["state"] == "done"
    assert "refused/not_allowed" not in status["buffer"]["counters"], "the end is no refusal"
    with contextlib.closing(sqlite3.connect(tmp_path / "buffer" / "index.sqlite")) as db:
        checksums = db.execute("SELECT version, checksum FROM checksums ORDER BY version").fetchall()
    assert [version for version, _ in checksums] == list(range(6))
    assert checksums[-1][1] == world.manifest.checksum


def assert_published_equals_exported(world: World, export: dict[str, torch.Tensor]) -> None:
    """The bytes that the engine got last are the weights that were exported."""
    assert {tensor.name for tensor in world.manifest.tensors} == export.keys()
    for tensor in world.manifest.tensors:
        data = bytearray(world.bytes[tensor.offset : tensor.offset + tensor.num_bytes])
        assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(tensor.shape), export[tensor.name])


async def test_a_stop_ends_after_the_step_with_a_checkpoint(model_dir, tmp_path):
    async with World(tmp_path, steps=50) as world, asyncio.timeout(200):
        task: asyncio.Task[str]

        def stop_after(phase: str, step: int) -> None:
            if (phase, step) == ("trained", 2):
                task.cancel()  # as the role's process does when it is told to stop

        learner = Learner(spec(model_dir, tmp_path, checkpoint_every=100), resolve=world.resolve, on_phase=stop_after)
        world.weights_at(learner.weights_endpoint)
        task = asyncio.create_task(learner.run())
        assert await task == "interrupted"
    assert complete_steps(tmp_path / "checkpoints") == [3]


async def test_a_command_that_never_ends_ends_this_life_with_its_name(model_dir, tmp_path):
    async with World(tmp_path, steps=50) as world, asyncio.timeout(200):
        learner = Learner(spec(model_dir, tmp_path, step_timeout_s=0.001), resolve=world.resolve, heartbeat_s=0.001)
        world.weights_at(learner.weights_endpoint)
        with pytest.raises(StepHung, match=r"(train|pack|save): .* exceed learner.step_timeout_s = 0.001"):
            await learner.run()


async def test_at_staleness_0_each_step_applies_the_gradient_of_the_plain_synchronous_loop(model_dir, tmp_path):
    """Recorded batches, each from the run's own version k: the reference loop's gradient, every age 0."""
    from transformers import AutoModelForCausalLM

    settings = {"checkpoint_every": 1, "keep_checkpoints": 9}
    async with World(tmp_path, steps=3, max_staleness=0) as world, asyncio.timeout(200):
        learner = Learner(spec(model_dir, tmp_path, **settings), resolve=world.resolve, heartbeat_s=0.2)
        world.weights_at(learner.weights_endpoint)
        assert await learner.run() == "done"
        client = BufferClient(world.resolve, run=RUN, role="learner", name="learner-7")
        await client.connect()
        batches = [await client.take(step, 1.0) for step in range(3)]
        trajectories = [await client.fetch([(g.group, r) for g in b.groups for r in g.rollouts]) for b in batches]
        await client.close()
    assert [line["ages"] for line in step_lines(tmp_path)] == [
        {"0": line["loss_tokens"]} for line in step_lines(tmp_path)
    ]
    reference = AutoModelForCausalLM.from_pretrained(model_dir)
    learner_settings = spec(model_dir, tmp_path, **settings).learner
    for step, batch in enumerate(batches):
        rows = iter(trajectories[step])
        groups = [
            KeptGroup(trajectories=tuple(next(rows) for _ in group.rollouts), rewards=group.rewards)
            for group in batch.groups
        ]
        weights, _ = version_state(tmp_path, model_dir, learner_settings, step)
        reference.load_state_dict(weights, strict=False)
        expected = recorded_gradient(reference, groups)
        applied = applied_gradient(tmp_path, model_dir, learner_settings, step)
        assert relative_difference(applied, expected) < 1e-5, f"step {step}"


@contextlib.asynccontextmanager
async def learner_process(world: World, model_dir: Path, directory: Path, *, rank=0, world_size=1, port=0, kill=""):
    """A learner in a process of its own, which kills itself by SIGKILL at phase `kill`, e.g. "trained:3"."""
    arguments = [world.endpoint, model_dir, directory, rank, world_size, port, kill]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.learner_process", *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_after_a_kill_recorded_batches_are_recomputed_and_each_is_in_the_weights_once(model_dir, tmp_path):
    """Killed when step 3 is trained, version 3 published, the newest checkpoint at 2."""
    async with World(tmp_path, steps=5) as world, asyncio.timeout(300):
        async with learner_process(world, model_dir, tmp_path, kill="trained:3") as first:
            world.weights_at((await first.stdout.readline()).decode().strip())
            assert await first.wait() == -signal.SIGKILL
        assert complete_steps(tmp_path / "checkpoints") == [2]
        async with learner_process(world, model_dir, tmp_path) as second:
            world.weights_at((await second.stdout.readline()).decode().strip())
            assert await second.wait() == 0
        replayed = await replay(world, model_dir, tmp_path / "replay")
    lineages = dict.fromkeys(lineage for lineage, _ in world.loaded)
    assert list(lineages) == [1, 2]
    assert next(version for lineage, version in world.loaded if lineage == 2) == 3, "the last published version first"
    assert [line["step"] for line in step_lines(tmp_path)] == [0, 1, 2, 3, 2, 3, 4]
    assert [line["recomputed"] for line in step_lines(tmp_path)] == [False] * 4 + [True, False, False]
    totals = read_mark(step_directory(tmp_path / "checkpoints", 5))[0].totals
    assert (totals.steps, totals.trajectories) == (5, 40), "counted once"
    export = exported(tmp_path)
    assert all(torch.equal(export[name], replayed[name]) for name in export)
    assert_published_equals_exported(world, export)


async def replay(world: World, model_dir: Path, directory: Path) -> dict[str, torch.Tensor]:
    """The recorded batches once more, in one go, without publication or checkpoint."""
    client = BufferClient(world.resolve, run=RUN, role="learner", name="learner-7")
    await client.connect()
    trainer = Trainer(spec(model_dir, directory), rank=0, world=1)
    for step in range(5):
        batch = await client.take(step, 1.0)
        assert batch is not None
        trainer.train(batch, await client.fetch(trainer.share(batch)))
    trainer.export()
    await client.close()
    return exported(directory)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_two_ranks_train_a_run_and_a_dead_rank_ends_the_other(model_dir, tmp_path):
    async with World(tmp_path, steps=4) as world, asyncio.timeout(400):
        for kills in ("restored:0", ""):  # rank 1 dies once; then both start again and finish
            port = free_port()
            async with (
                learner_process(world, model_dir, tmp_path, world_size=2, port=port) as zero,
                learner_process(world, model_dir, tmp_path, rank=1, world_size=2, port=port, kill=kills) as one,
            ):
                world.weights_at((await zero.stdout.readline()).decode().strip())
                status_one = await one.wait()
                died_s = time.monotonic()
                status_zero = await zero.wait()
                if kills:
                    assert status_one == -signal.SIGKILL
                    assert status_zero == 1, "the other rank ends with an error, so that all are restarted"
                    assert time.monotonic() - died_s < 60, "well before a collective times out"
                else:
                    assert (status_zero, status_one) == (0, 0)
    lines = {line["step"]: line for line in step_lines(tmp_path)}
    assert sorted(lines) == [0, 1, 2, 3]
    assert all(line["trajectories"] == 8 for line in lines.values())
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert_published_equals_exported(world, exported(tmp_path))
