"""What the kind of device decides: number format, communication, kernels. The only place that knows.

Consumes    the kind (cpu, cuda, rocm) and the dtype asked for
Produces    DeviceChoices
Waits for   nothing; `device_kind` asks torch, the rest is a pure function
State       cpu is tested; cuda and rocm (MI300X) are written from documentation and have not been run
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DeviceKind = Literal["cpu", "cuda", "rocm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoices:
    kind: DeviceKind
    dtype: torch.dtype
    """of weights and activations; with bfloat16 the optimizer keeps float32 master weights"""
    backend: str
    """of the ranks' collectives; on ROCm torch calls RCCL by NCCL's name"""
    fused_adam: bool
    """torch's own fused AdamW; DeepSpeed's would be compiled at the first start"""
    attention: str
    """transformers' name of the attention implementation"""


def device_kind() -> DeviceKind:
    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def device_choices(kind: DeviceKind, dtype: str = "auto") -> DeviceChoices:
    """The choices for a kind of device.

    Example:
        device_choices("cpu").dtype           # torch.float32
        device_choices("rocm").backend        # "nccl"
    """
    on_cpu = kind == "cpu"
    resolved = ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
    return DeviceChoices(
        kind=kind,
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[resolved],
        backend="gloo" if on_cpu else "nccl",
        fused_adam=not on_cpu,
        attention="sdpa",
    )
