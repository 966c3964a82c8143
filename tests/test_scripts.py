"""The node scripts, dry: what they would run and with which environment, MI300X among them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LAUNCH = Path(__file__).parents[1] / "launch"


@functools.cache
def dry(role: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if "VISIBLE_DEVICES" not in key} | variables
    return subprocess.run(
        ["bash", str(LAUNCH / f"{role}.sh"), *arguments, "--dry-run"], capture_output=True, text=True, env=environment
    )


def mi300x(role: str) -> tuple[dict[str, str], str]:
    """(environment, command) of a node with MI300X."""
    count = () if role in ("head", "buffer") else ("--count", "8")
    done = dry(role, "--address", "10.0.0.1:6379", "--device", "rocm", "--token", "/secret/token", *count)
    assert done.returncode == 0, done.stderr
    *exports, command = done.stdout.splitlines()
    pairs = (line.removeprefix("export ").split("=", 1) for line in exports)
    return {name: value.strip("'") for name, value in pairs}, command.replace("'", "")


def test_every_role_has_a_script_that_offers_its_resource() -> None:
    offers = {"buffer": {"buffer": 1, "filter": 1}} | {role: {role: 8} for role in ("sandbox", "rollout", "learner")}
    for role, offer in offers.items():
        command = mi300x(role)[1]
        for part in (f"--resources={json.dumps(offer)}", "--address=10.0.0.1:6379", "--block"):
            assert part in command


def test_the_head_offers_nothing_and_has_neither_dashboard_nor_autoscaler() -> None:
    command = mi300x("head")[1]
    for part in ("--head", "--port=6379", "--include-dashboard=false", "--no-monitor", "--resources={}"):
        assert part in command
    assert mi300x("head")[0]["DASHBOARD_METRIC_PORT"] == "65536"


def test_tokens_are_asked_for_on_every_node() -> None:
    for role in ("head", "buffer", "sandbox", "rollout", "learner"):
        variables = mi300x(role)[0]
        assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN_PATH"]) == ("token", "/secret/token")


def test_an_mi300x_node_gets_rocms_settings() -> None:
    for role in ("rollout", "learner"):
        variables = mi300x(role)[0]
        assert variables["HSA_NO_SCRATCH_RECLAIM"] == "1"
        assert variables["HIP_FORCE_DEV_KERNARG"] == "1"
        assert variables["TORCH_BLAS_PREFER_HIPBLASLT"] == "1"
        assert variables["NCCL_MIN_NCHANNELS"] == "112"
        assert variables["VLLM_ROCM_USE_AITER"] == "0"
        assert not [name for name in variables if "VISIBLE_DEVICES" in name]  # Ray says which accelerators are seen


def test_nodes_without_accelerator_work_offer_none() -> None:
    for role in ("head", "buffer", "sandbox"):
        assert "--num-gpus=0" in mi300x(role)[1]
    assert "--num-gpus" not in mi300x("rollout")[1]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0"}, "unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, "unset ROCR_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "disagree"),
    ],
)
def test_two_voices_about_accelerators_are_refused(variables: dict[str, str], words: str) -> None:
    done = dry("rollout", "--address", "10.0.0.1:6379", **variables)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_node_without_an_address_or_of_no_role_is_refused() -> None:
    assert "--address HOST:PORT is missing" in dry("rollout").stderr
    assert "a run has one buffer" in dry("buffer", "--address", "h:1", "--count", "2").stderr


def test_every_script_is_valid_bash() -> None:
    for script in [*LAUNCH.glob("*.sh"), LAUNCH.parent / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_set_up_refuses_an_unsupported_python(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 3.9\n")
    fake.chmod(0o755)
    copy = tmp_path / "clone"
    (copy / "launch").mkdir(parents=True)
    (copy / "launch" / "setup.sh").write_text((LAUNCH / "setup.sh").read_text())
    done = subprocess.run(
        ["bash", str(copy / "launch" / "setup.sh")],
        env=os.environ | {"PYTHON": str(fake)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Python 3.9 is not supported" in done.stderr
