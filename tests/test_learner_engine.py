"""DeepSpeed gives the gradient of one big batch, whatever the micro-batches, the ZeRO stage and the ranks."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.batch import batch_advantages, build_micro_batches, plan_step
from learner.device import device_choices
from learner.engine import NonFiniteGradient, TrainEngine, gradient_of, learning_rate
from learner.export import export_model
from learner.model import load_model, num_score_chunks
from learner.ranks import Ranks
from learner.settings import LearnerSettings
from tests.learner_batches import VOCAB, make_batch, make_model, make_untied_model, relative_difference
from tests.learner_rank import LOSS, RANK_STAGES, copied, engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks(rank=0, world=1, backend="gloo", timeout_s=60)


def scoring_model(model_dir, temperature=1.0):
    return load_model(
        model_dir,
        dtype=torch.float32,
        attention="sdpa",
        temperature=temperature,
        activation_checkpointing=False,
    )


def micro_batches(batch, trajectories, budget):
    plan = plan_step(batch, 1, budget)
    return build_micro_batches(plan, 0, trajectories, batch_advantages(batch, LOSS)), plan.num_loss_tokens


@pytest.fixture(scope="module")
def one_big_batch(model_dir):
    """The gradient by plain torch of all trajectories in one pass."""
    batch, trajectories = make_batch()
    micros, num_loss_tokens = micro_batches(batch, trajectories, 10**9)
    assert len(micros) == 1
    return gradient_of(scoring_model(model_dir), micros, num_loss_tokens, LOSS)


@pytest.mark.parametrize("stage", STAGES)
def test_unequal_micro_batches_give_the_gradient_of_one_big_batch(model_dir, ranks, one_big_batch, stage):
    batch, trajectories = make_batch()
    micros, num_loss_tokens = micro_batches(batch, trajectories, 130)
    assert len({micro.mask_M.size for micro in micros}) > 3, "micro-batches of unequal length"
    trainer = engine(model_dir, ranks, zero_stage=stage)
    trainer.accumulate(micros, num_loss_tokens, LOSS)
    assert relative_difference(trainer.gradient(), one_big_batch) < 1e-5
    norm = sum(float(value.double().pow(2).sum()) for value in one_big_batch.values()) ** 0.5
    assert trainer.step(1e-3) == pytest.approx(norm, rel=1e-5)


def test_the_last_micro_batch_alone_would_be_noticed(model_dir, one_big_batch):
    """The failure that others shipped: several backward passes, the last one's gradient kept."""
    micros, num_loss_tokens = micro_batches(*make_batch(), 130)
    last = gradient_of(scoring_model(model_dir), micros[-1:], num_loss_tokens, LOSS)
    assert relative_difference(last, one_big_batch) > 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_after_a_restart_are_those_without_one(model_dir, ranks, tmp_path, stage):
    micros, num_loss_tokens = micro_batches(*make_batch(), 400)
    straight = engine(model_dir, ranks, zero_stage=stage)
    straight.accumulate(micros, num_loss_tokens, LOSS)
    straight.step(1e-3)
    straight.save(tmp_path)
    resumed = engine(model_dir, ranks, zero_stage=stage)
    resumed.load(tmp_path)
    for trainer in (straight, resumed):
        trainer.accumulate(micros, num_loss_tokens, LOSS)
        trainer.step(1e-3)
    for (name, one), (other_name, other) in zip(copied(straight), copied(resumed), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name


@pytest.mark.parametrize("stage", STAGES)
def test_weights_before_the_first_forward_are_the_models_own_and_tied_ones_come_once(model_dir, ranks, stage):
    from safetensors.torch import load_file

    stored = load_file(model_dir / "model.safetensors")
    weights = dict(copied(engine(model_dir, ranks, zero_stage=stage)))
    assert weights.keys() == stored.keys()
    assert "lm_head.weight" not in weights
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


@pytest.mark.parametrize("stage", [0, 3])
def test_another_architecture_with_its_own_output_layer_trains_as_well(ranks, tmp_path, stage):
    from safetensors.torch import load_file

    directory = make_untied_model(tmp_path)
    big, num_loss_tokens = micro_batches(*make_batch(), 10**9)
    expected = gradient_of(scoring_model(directory), big, num_loss_tokens, LOSS)
    small, _ = micro_batches(*make_batch(), 130)
    trainer = engine(directory, ranks, zero_stage=stage, activation_checkpointing=stage == 3)
    stored = load_file(directory / "model.safetensors")
    weights = dict(copied(trainer))
    assert weights.keys() == stored.keys()
    assert "lm_head.weight" in weights
    trainer.accumulate(small, num_loss_tokens, LOSS)
    assert relative_difference(trainer.gradient(), expected) < 1e-5


def test_the_applied_gradient_can_be_read_from_adams_moments(model_dir, ranks, one_big_batch):
    """So that two checkpoints tell what a step applied: (m' - beta1 m) / (1 - beta1), clipped."""
    trainer = engine(model_dir, ranks, max_grad_norm=0.05)
    micros, num_loss_tokens = micro_batches(*make_batch(), 400)
    before = trainer.moments()
    trainer.accumulate(micros, num_loss_tokens, LOSS)
    norm = trainer.step(1e-3)
    after = trainer.moments()
    assert norm > 0.05, "clipped"
    scale = (norm + 1e-6) / 0.05
    applied = {name: (after[name] - 0.9 * before[name]) / 0.1 * scale for name in after}
    assert relative_difference(applied, one_big_batch) < 1e-5


def test_scoring_in_chunks_changes_nothing(model_dir):
    model = scoring_model(model_dir, temperature=0.7)
    micros, _ = micro_batches(*make_batch(), 10**9)
    ids, index, targets = (torch.from_numpy(a) for a in (micros[0].ids_BT, micros[0].index_M, micros[0].targets_M))
    gradients = []
    for chunks in (1, 3, len(targets) + 2):
        model.zero_grad()
        logp, entropy = model(ids, index, targets, chunks)
        (logp * torch.linspace(0, 1, len(logp))).sum().backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        logits = model.hf(input_ids=ids).logits.reshape(-1, VOCAB)[index] / 0.7
        expected = torch.log_softmax(logits, -1)
        torch.testing.assert_close(logp, expected.gather(1, targets[:, None])[:, 0], atol=2e-6, rtol=0)
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
    for other in gradients[1:]:
        assert relative_difference(other, gradients[0]) < 1e-5


def test_chunks_bound_the_logits():
    assert num_score_chunks(1, 460) == 1
    assert num_score_chunks(8192, 152_064) == 19
    assert -(-8192 // 19) * 152_064 * 4 <= 256 * 2**20 * 1.01


def test_padding_does_not_reach_the_log_probs(model_dir):
    model = scoring_model(model_dir)
    batch, trajectories = make_batch(num_groups=1, group_size=2, shortest=20, longest=60)
    together, _ = micro_batches(batch, trajectories, 10**9)
    apart, _ = micro_batches(batch, trajectories, 1)
    assert (len(together), len(apart)) == (1, 2)

    def logps(micros):
        return torch.cat(
            [model(*(torch.from_numpy(a) for a in (m.ids_BT, m.index_M, m.targets_M)), 1)[0] for m in micros]
        )

    torch.testing.assert_close(logps(together), logps(apart), atol=2e-6, rtol=0)


def test_a_gradient_that_is_not_finite_is_not_kept(model_dir, ranks):
    batch, trajectories = make_batch()
    micros, num_loss_tokens = micro_batches(batch, trajectories, 10**9)
    micros[0].advantage_M[3] = float("nan")
    trainer = engine(model_dir, ranks)
    trainer.accumulate(micros, num_loss_tokens, LOSS)
    with pytest.raises(NonFiniteGradient, match=r"nan.*logprob_diff_max"):
        trainer.step(1e-3)
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in trainer.weights())


def test_bfloat16_keeps_float32_masters_and_agrees_roughly(model_dir, ranks, one_big_batch):
    micros, num_loss_tokens = micro_batches(*make_batch(), 10**9)
    settings = LearnerSettings(dtype="bfloat16")
    trainer = TrainEngine(settings, model_dir, ranks=ranks, device=device_choices("cpu", "bfloat16"), temperature=1.0)
    trainer.accumulate(micros, num_loss_tokens, LOSS)
    norm = sum(float(value.double().pow(2).sum()) for value in one_big_batch.values()) ** 0.5
    assert trainer.step(1e-3) == pytest.approx(norm, rel=0.05)
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}


@pytest.mark.parametrize("shard_bytes", [2**30, 40_000])
def test_the_export_is_the_model_in_hugging_face_format(model_dir, ranks, tmp_path, shard_bytes):
    from transformers import AutoModelForCausalLM

    micros, num_loss_tokens = micro_batches(*make_batch(), 10**9)
    trainer = engine(model_dir, ranks)
    trainer.accumulate(micros, num_loss_tokens, LOSS)
    trainer.step(1e-3)
    for _ in range(2):  # a second export replaces the first
        export_model(trainer.weights(), model_dir, tmp_path / "export", shard_bytes=shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, tensor in trainer.weights():
        assert torch.equal(loaded[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "model.safetensors").exists() == (shard_bytes == 2**30)


def test_the_learning_rate_rises_and_stays():
    settings = LearnerSettings(lr=1.0, warmup_steps=3)
    assert [learning_rate(settings, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(LearnerSettings(lr=1.0), 0) == 1.0


def test_two_ranks_with_unequal_shares_give_the_same_gradient(model_dir, one_big_batch, tmp_path):
    """ZeRO 0, 2 and 3; one rank has a micro-batch more, the other a filler."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.learner_rank", str(rank), str(port), str(model_dir), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    zero, one = (pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2))
    assert sorted([zero["fillers"], one["fillers"]]) == [0, 1]
    norm = sum(float(value.double().pow(2).sum()) for value in one_big_batch.values()) ** 0.5
    for stage in RANK_STAGES:
        for result in (zero[stage], one[stage]):
            assert relative_difference(result["gradient"], one_big_batch) < 1e-5, f"ZeRO {stage}"
            assert result["norm"] == pytest.approx(norm, rel=1e-5)
        for name, tensor in zero[stage]["weights"].items():
            assert torch.equal(tensor, one[stage]["weights"][name]), f"ZeRO {stage}: {name}"
