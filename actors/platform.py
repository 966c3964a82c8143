"""What engines need on each kind of device, in one place: environment and vLLM arguments.

Consumes    a device and `RolloutSettings`
Produces    `environment(device)`, `engine_arguments(device, settings)`, `detect()`
Waits for   nothing: pure, so that the plan for hardware that is not here can be tested and printed
            (`python -m actors.platform rocm` prints the environment as shell exports)
Invariant   no other file asks which device this is
"""

import os
import sys
from collections.abc import MutableMapping
from typing import Any

from actors.settings import RolloutSettings

__all__ = ["apply", "detect", "engine_arguments", "environment", "needs_repacking"]

MIB = 1 << 20
CPU_KV_MIB = 64
CPU_BLOCK_TOKENS = 32
"""vLLM's CPU default of 128 leaves most of a short rollout's prefix out of the cache."""
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By qualified name: the CPU platform makes one more process of "uni", for 0.6 GB and a third of the speed."""

_COMMON = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several roles share the cores: let the kernel place them
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probs compiles for 3-12 s and needs g++
}
_ROCM = {
    "HIP_FORCE_DEV_KERNARG": "1",
    "SAFETENSORS_FAST_GPU": "1",
    "TORCH_BLAS_PREFER_HIPBLASLT": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",  # RCCL of ROCm 7 needs it
    "NCCL_MIN_NCHANNELS": "112",  # all XGMI links of an MI300X node
    "VLLM_ROCM_USE_AITER": "0",  # its shuffled weights did not survive reloading; check log-probs before turning it on
}


def detect() -> str:
    """The device of this host: what torch was built for and finds."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def environment(device: str, settings: RolloutSettings) -> dict[str, str]:
    """Variables to set before vLLM is imported.

    Which accelerators a process sees is not among them: Ray decides it (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES),
    and a second voice (ROCR_VISIBLE_DEVICES) makes both Ray and vLLM refuse to start.
    """
    if device == "cpu":
        return {**_COMMON, **_CPU, "OMP_NUM_THREADS": str(settings.cpu_threads)}
    return {**_COMMON, **(_ROCM if device == "rocm" else {})}


def apply(variables: dict[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set them, except where the user has: who sets a variable by hand means it."""
    for name, value in variables.items():
        environ.setdefault(name, value)


def engine_arguments(device: str, settings: RolloutSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine that depend on the device."""
    arguments: dict[str, Any] = {}
    if settings.kv_cache_mib is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_mib * MIB
    if settings.tensor_parallel > 1:
        arguments |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
    elif device == "cpu":
        arguments["distributed_executor_backend"] = UNIPROC
    if device == "cpu":
        arguments.setdefault("kv_cache_memory_bytes", CPU_KV_MIB * MIB)
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
    return arguments


def needs_repacking(device_type: str) -> bool:
    """Whether a tied output layer holds a packed copy of the embedding that a reload leaves behind (CPU kernels do)."""
    return device_type == "cpu"


if __name__ == "__main__":
    for _name, _value in environment(sys.argv[1], RolloutSettings()).items():
        print(f"export {_name}={_value}")
