"""One rank without sockets: the check before training, checkpoints on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.batch import StalenessError
from learner.checkpoint import CheckpointError, complete_steps, step_directory
from learner.settings import LearnerSettings, LossSettings, PublishSettings
from learner.trainer import Trainer, TrainerSpec
from tests.learner_batches import make_batch, make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def trainer(model_dir: Path, directory: Path, run: str = "run", **settings) -> Trainer:
    spec = TrainerSpec(
        run=run,
        model=model_dir,
        directory=directory,
        temperature=1.0,
        learner=LearnerSettings(**settings),
        loss=LossSettings(),
        publish=PublishSettings(dtype="bfloat16"),
    )
    return Trainer(spec, rank=0, world=1)


def step(trainer: Trainer, seed: int = 0) -> None:
    version = trainer.version
    batch, trajectories = make_batch(step=version, versions=(max(0, version - 1), version), seed=seed)
    report = trainer.train(batch, trajectories)
    assert report.step == version
    assert report.totals.steps == trainer.version == version + 1
    assert set(report.ages) <= {0, 1}


def packed_bytes(trainer: Trainer) -> bytes:
    packed = trainer.pack(1)
    assert packed is not None
    assert packed.manifest.version == trainer.version
    assert {tensor.dtype for tensor in packed.manifest.tensors} == {"BF16"}
    return b"".join(packed.buckets)


def test_a_batch_that_breaks_the_promise_trains_nothing(model_dir, tmp_path):
    learner = trainer(model_dir, tmp_path)
    for number in range(3):
        step(learner, number)
    before = packed_bytes(learner)
    batch, trajectories = make_batch(step=3, versions=(2, 3))
    trajectories[0].versions[trajectories[0].sampled] = 0
    with pytest.raises(StalenessError, match=r"group 0, rollout 0: base 2, deadline 4, step 3, .* version 0: age 3"):
        learner.train(batch, trajectories)
    assert learner.version == 3
    assert packed_bytes(learner) == before


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(model_dir, tmp_path, capsys):
    learner = trainer(model_dir, tmp_path)
    kept, states = [], {}
    for number in range(3):
        step(learner, number)
        kept.append(learner.save())
        states[learner.version] = packed_bytes(learner)
    assert kept == [(0, 1), (1, 2), (2, 3)], "until two are kept, a restart may begin from the model itself"
    newest = step_directory(tmp_path / "checkpoints", 3) / "engine" / "mp_rank_00_model_states.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    restored = trainer(model_dir, tmp_path)
    assert restored.restore() == 2
    assert "step_3" in capsys.readouterr().out
    assert complete_steps(tmp_path / "checkpoints") == [2], "it must not displace the good one"
    assert packed_bytes(restored) == states[2]
    step(restored, 2)
    assert packed_bytes(restored) == states[3], "the step computed again gives the same weights"
    assert restored.totals == learner.totals
    restored.save()
    assert complete_steps(tmp_path / "checkpoints") == [2, 3]
    assert trainer(model_dir, tmp_path).restore() == 3


def test_when_all_are_damaged_it_starts_from_the_model_and_says_so(model_dir, tmp_path, capsys):
    learner = trainer(model_dir, tmp_path)
    step(learner)
    learner.save()
    (step_directory(tmp_path / "checkpoints", 1) / "engine" / "mp_rank_00_model_states.pt").unlink()
    again = trainer(model_dir, tmp_path)
    assert again.restore() == 0
    assert "1 are damaged: starting again from version 0" in capsys.readouterr().out


def test_a_checkpoint_of_another_shape_or_run_is_an_error_not_damage(model_dir, tmp_path):
    learner = trainer(model_dir, tmp_path)
    step(learner)
    learner.save()
    with pytest.raises(CheckpointError, match=r"learner\.zero_stage = 0, this learner has 1"):
        trainer(model_dir, tmp_path, zero_stage=1).restore()
    with pytest.raises(CheckpointError, match="run = run"):
        trainer(model_dir, tmp_path, run="other").restore()


def test_without_a_checkpoint_training_starts_from_the_model(model_dir, tmp_path):
    learner = trainer(model_dir, tmp_path)
    assert learner.restore() == 0
    packed = learner.pack(4)
    assert packed is not None
    assert (packed.manifest.lineage, packed.manifest.version) == (4, 0)
    first = packed.manifest.tensors[0]
    from safetensors.torch import load_file

    stored = load_file(model_dir / "model.safetensors")[first.name].to(torch.bfloat16)
    data = bytearray(packed.buckets[0][first.offset : first.offset + first.num_bytes])
    assert torch.equal(torch.frombuffer(data, dtype=torch.bfloat16).reshape(first.shape), stored)


def test_a_checkpoint_of_a_later_time_than_the_buffers_record_is_passed_over(model_dir, tmp_path, capsys):
    learner = trainer(model_dir, tmp_path)
    for number in range(2):
        step(learner, number)
        learner.save()
    restored = trainer(model_dir, tmp_path)
    assert restored.restore(1) == 1
    assert "step_2 is of a later time than the buffer's record, whose next step is 1" in capsys.readouterr().out
    assert complete_steps(tmp_path / "checkpoints") == [1], "the one that the copy makes of step 2 is another"
