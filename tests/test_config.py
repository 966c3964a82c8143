"""The tree of settings: which dials there are, what is refused and in which words."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import needed, ranks_apart
from launch.config import ConfigError, dials, load, parse, to_toml
from launch.derive import Shape, derive
from launch.environment import device_environment, role_environment
from launch.preflight import check_fixed

DIALS = """
buffer.dead_after_s buffer.group_timeout_s buffer.heartbeat_s buffer.keep_segments buffer.lease_s buffer.port
buffer.segment_mib
chat.cut_mark chat.generation_prefix chat.list_tools chat.max_observation_tokens chat.observation_close
chat.observation_open chat.observation_role chat.system chat.tool_name chat.user
evaluation.at_end evaluation.at_start
groups.group_size groups.groups_per_step
learner.activation_checkpointing learner.beta1 learner.beta2 learner.checkpoint_every learner.dtype
learner.keep_checkpoints learner.lr learner.max_grad_norm learner.micro_batch_tokens learner.rank_timeout_s
learner.ranks learner.step_timeout_s learner.warmup_steps learner.weight_decay learner.zero_stage
loss.advantage_std loss.clip_high loss.clip_low loss.correction loss.dual_clip loss.tis_cap loss.tis_mode
metrics.prometheus_port metrics.tensorboard
model.path
problems.columns problems.epochs problems.families problems.num_heldout problems.path problems.source problems.split
problems.subset
roc.epsilon roc.min_per_side roc.mode
rollout.concurrency rollout.cpu_threads rollout.device rollout.dtype rollout.engines rollout.kv_cache_mib
rollout.max_length rollout.max_new_tokens rollout.max_turns rollout.temperature rollout.tensor_parallel
run.directory run.drain_s run.max_restarts run.name run.seed run.start_timeout_s run.steps
sandbox.cpu_s sandbox.isolation sandbox.memory_mib sandbox.nodes sandbox.output_kib sandbox.preamble sandbox.profile
sandbox.queue_bound sandbox.sessions sandbox.spare sandbox.wall_s sandbox.workers
staleness.max_staleness
weights.ack_timeout_s weights.bucket_mib weights.kv weights.max_mib_per_s
"""
"""A new dial is a decision: it is added here, or it is derived."""

LEAST: dict[str, Any] = {"model": {"path": "m"}, "problems": {"families": [{"name": "products"}]}}
TINY = Shape(
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    hidden_size=128,
    mlp_size=384,
    vocabulary=640,
    max_length_tokens=512,
    tied=True,
)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(LEAST, overrides, "r.toml")
    return str(caught.value)


def test_the_dials_are_these() -> None:
    assert sorted(dials()) == sorted(DIALS.split())


def test_a_recipe_read_back_is_equal() -> None:
    recipe = parse(LEAST, ["chat.cut_mark='é \"x\"\\n'", "rollout.kv_cache_mib=64", "run.name=7up"], "r.toml")
    assert parse(tomllib.loads(to_toml(recipe)), [], "again") == recipe


def test_overrides_are_toml_values_or_texts() -> None:
    recipe = parse(LEAST, ["roc.mode=off", 'run.name="a"', "evaluation.at_end=false", "learner.lr=1"], "r.toml")
    assert (recipe.roc.mode, recipe.run.name, recipe.evaluation.at_end, recipe.learner.lr) == ("off", "a", False, 1.0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.concurency=3", "rollout.concurency is no setting: did you mean rollout.concurrency?"),
        ("staleness.steps=3", "staleness.steps is no setting: did you mean run.steps?"),
        ("max_staleness=3", "max_staleness is no setting: did you mean staleness.max_staleness?"),
        ("learnr.lr=1", "learnr is no setting: did you mean learner?"),
        ("staleness.max_staleness='2'", 'staleness.max_staleness = "2" must be a valid integer'),
        ("staleness.max_staleness=-1", "staleness.max_staleness = -1 must be greater than or equal to 0"),
        ("run.steps=true", "run.steps = true must be a valid integer"),
        ("roc.mode=papr", "roc.mode = \"papr\" must be 'paper', 'released' or 'off'"),
        ("run=3", "run = 3 must be an object"),
        ("problems.families=[]", "problems.families is empty"),
    ],
)
def test_a_wrong_key_type_or_value_is_named(override: str, words: str) -> None:
    assert f"r.toml: {words}" in refusal(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("groups.group_size=3", "groups.group_size = 3 is below 2 * roc.min_per_side = 4"),
        ("learner.ranks=65", "learner.ranks = 65 exceeds the 64 trajectories of a step"),
        ("loss.correction=none", 'loss.correction = "none" with staleness.max_staleness = 1'),
        ("rollout.max_new_tokens=2000", "rollout.max_new_tokens = 2000 exceeds rollout.max_length = 1024"),
        ("buffer.dead_after_s=1", "buffer.dead_after_s = 1.0 must exceed 2 * heartbeat_s"),
        ("buffer.lease_s=5", "buffer.lease_s = 5 must exceed buffer.dead_after_s = 10"),
        ("buffer.group_timeout_s=50", "buffer.group_timeout_s = 50 must exceed buffer.lease_s = 60"),
        ("chat.max_observation_tokens=1024", "chat.max_observation_tokens = 1024 leaves no room"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(override: str, words: str) -> None:
    assert words in refusal(override)


def test_a_group_of_one_is_refused_without_roc() -> None:
    assert "groups.group_size = 1" in refusal("roc.mode=off", "groups.group_size=1")


def test_all_faults_are_told_at_once() -> None:
    assert len(refusal("run.steps=0", "rollout.engines=0", "foo.bar=1").splitlines()) == 3


def test_a_missing_table_is_named() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        parse({"problems": LEAST["problems"]}, [], "r.toml")


def test_no_toml_and_no_file_are_told_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[run]\nsteps = = 3\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML: .*line 2"):
        load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: .*bad\.toml"):
        load(tmp_path / "none.toml")


def test_a_step_follows_from_the_dials() -> None:
    recipe = parse(
        LEAST,
        ["staleness.max_staleness=2", "groups.groups_per_step=8", "groups.group_size=4", "rollout.dtype=float32"],
        "r.toml",
    )
    derived = derive(recipe, TINY, "cpu")
    assert (derived.tickets, derived.rollouts_in_flight) == (24, 192)
    assert (derived.rollouts_per_step, derived.trajectories_per_step) == (64, 32)
    assert derived.tokens_per_step_max == 32 * 1024
    assert derived.kv_tokens_per_engine == (64 << 20) // (2 * 4 * 2 * 32 * 4)
    off = parse(LEAST, ["roc.mode=off"], "r.toml")
    assert off.num_rollouts == 8


def test_the_learners_memory_follows_the_zero_stage() -> None:
    sizes = [
        derive(
            parse(LEAST, [f"learner.zero_stage={stage}", "learner.ranks=4", "learner.dtype=bfloat16"], "r.toml"),
            TINY,
            "cpu",
        ).learner_state_bytes
        / TINY.num_parameters
        for stage in range(4)
    ]
    assert sizes == pytest.approx([16, 7, 5.5, 4], rel=1e-5)


def test_only_roles_that_load_the_model_are_kept_from_the_network(tmp_path: Path) -> None:
    recipe = parse(LEAST, [], "r.toml")
    offline = {role: "HF_HUB_OFFLINE" in role_environment(role, tmp_path) for role in needed(recipe)}
    assert [role for role, is_offline in offline.items() if is_offline] == ["rollout", "learner"]


def test_auto_means_the_device_of_the_host_on_which_a_role_runs(tmp_path: Path) -> None:
    """The driver's host says nothing about others: what it gives every role is the same for any device."""
    auto, fixed = parse(LEAST, [], "r.toml"), parse(LEAST, ["rollout.device=cpu", "rollout.cpu_threads=3"], "r.toml")
    given = {**role_environment("rollout", tmp_path), **role_environment("learner", tmp_path)}
    assert not [name for name in given if name.startswith(("VLLM", "HIP", "HSA", "NCCL", "TORCH", "DS_"))]
    rocm = device_environment(auto, "rollout", "rocm")
    assert rocm["VLLM_ROCM_USE_AITER"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in rocm
    assert "DS_ACCELERATOR" not in device_environment(auto, "learner", "cuda")
    assert device_environment(auto, "learner", "cpu")["DS_ACCELERATOR"] == "cpu"
    assert device_environment(fixed, "rollout", "rocm")["OMP_NUM_THREADS"] == "3"
    assert device_environment(fixed, "learner", "rocm")["DS_ACCELERATOR"] == "cpu"
    assert device_environment(auto, "sandbox", "cpu") == {}


def test_ranks_on_several_hosts_are_refused_when_the_nodes_have_joined() -> None:
    assert ranks_apart(2, {"10.0.0.1": 2, "10.0.0.2": 0}) == ""
    assert ranks_apart(1, {"10.0.0.1": 1, "10.0.0.2": 1}) == ""
    told = ranks_apart(2, {"10.0.0.2": 1, "10.0.0.1": 2})
    assert told.startswith("learner.ranks = 2, offered by 2 hosts (10.0.0.1: 2, 10.0.0.2: 1), 1 is allowed: ")
    assert "bash launch/learner.sh --count 2" in told


def test_nothing_is_claimed_of_a_kv_cache_on_hosts_that_are_not_known_yet() -> None:
    auto = parse(LEAST, [], "r.toml")
    assert derive(auto, TINY, "auto").kv_tokens_per_engine is None
    assert derive(auto, TINY, "cpu").kv_tokens_per_engine is not None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("groups.group_size=4", "groups.group_size = 4, the run in runs/run has 8: it is fixed for a run"),
        ("roc.mode=off", "num_rollouts = 8, the run in runs/run has 16"),
        ("problems.num_heldout=3", "problems = .*num_heldout=3"),
    ],
)
def test_a_resume_changes_nothing_that_the_record_depends_on(override: str, words: str) -> None:
    before = parse(LEAST, [], "r.toml")
    check_fixed(before, parse(LEAST, ["run.steps=7", "staleness.max_staleness=2", "learner.lr=0.1"], "r.toml"))
    with pytest.raises(ConfigError, match=words):
        check_fixed(before, parse(LEAST, [override], "r.toml"))


def test_the_buffer_is_given_the_runs_figures() -> None:
    settings = parse(LEAST, ["run.steps=7", "problems.num_heldout=0"], "r.toml").buffer_settings()
    assert (settings.steps, settings.num_rollouts, settings.evaluation_at_start) == (7, 16, False)
    assert not settings.uncorrected
    assert parse(LEAST, ["loss.correction=none", "staleness.max_staleness=0"], "r.toml").buffer_settings().uncorrected
