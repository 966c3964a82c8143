"""Environment variables of Ray and of role processes, in one place.

Consumes    a recipe, a role; the device files of the host that asks
Produces    variables; a refusal where two voices would say which accelerators are seen
Waits for   nothing
Invariant   ROCm's own settings stand in actors/platform.py; nothing here or there sets a *_VISIBLE_DEVICES: Ray does
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from actors import platform
from launch.config import ConfigError
from launch.tree import Recipe

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_maximum_startup_concurrency": "64",  # as many as cores by default: one that hangs would hold up all
    "RAY_worker_register_timeout_seconds": "30",  # then a process that died while it started is followed by another
    "RAY_enable_metrics_collection": "0",  # Ray would serve them to everybody; ours go another way
    "SPT_NOENV": "1",  # keeps the environment of renamed processes readable, which is how the warden knows them
}
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps a Ray of one node on 127.0.0.1; with it no node can join, so nodes of a cluster do without."""


def role_environment(role: str, scratch: Path) -> dict[str, str]:
    """What a role's process is started with, on whatever host; roles that share a host's cores take one thread each.

    `scratch` is for the temporary files of libraries, some of which leave them behind.
    """
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    if role in ("rollout", "learner"):
        variables["HF_HUB_OFFLINE"] = "1"  # the model is a folder; only the buffer may have a data set to fetch
    return variables


def device_environment(recipe: Recipe, role: str, here: str) -> dict[str, str]:
    """What a role's process sets before it imports torch or vLLM; `here` is the device of the host it runs on, which
    "auto" means.
    """
    device = here if recipe.rollout.device == "auto" else recipe.rollout.device
    variables = platform.environment(device, recipe.rollout) if role in ("rollout", "learner") else {}
    if role == "learner" and device == "cpu":
        variables |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return variables


def detect_device() -> str:
    """This host's accelerators by their device files, without importing torch."""
    if os.path.exists("/dev/kfd"):
        return "rocm"
    return "cuda" if os.path.exists("/dev/nvidia0") else "cpu"


def refuse_two_masks(environ: Mapping[str, str]) -> None:
    """One voice says which accelerators are seen; with two, Ray and vLLM refuse to start in the middle of a run."""
    if "ROCR_VISIBLE_DEVICES" in environ:
        raise ConfigError(
            f"ROCR_VISIBLE_DEVICES = {environ['ROCR_VISIBLE_DEVICES']} is set: Ray chooses accelerators by "
            "HIP_VISIBLE_DEVICES, and both at once refuse to work; unset ROCR_VISIBLE_DEVICES"
        )
    hip, cuda = environ.get("HIP_VISIBLE_DEVICES"), environ.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        raise ConfigError(
            f"HIP_VISIBLE_DEVICES = {hip} and CUDA_VISIBLE_DEVICES = {cuda} disagree: unset CUDA_VISIBLE_DEVICES"
        )
