"""What an engine's worker processes can do beyond vLLM's own: load a version from memory, say how full they are.

Consumes    the path of a file that holds a version's buckets end to end, and where each tensor lies in it
Produces    the version in the model; occupancy
Waits for   nothing; the caller has paused the engine
Invariant   after `load_version` every parameter is the version's: one that is missing, unknown or of another shape
            raises, and then the engine must not be used any more

Imported by vLLM inside its worker processes, which mix the class into their worker (`worker_extension_cls`).
"""

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from actors.platform import needs_repacking

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

TensorPlace = tuple[str, str, Sequence[int], int]
"""(Hugging Face name, dtype as in safetensors, shape, offset in bytes)"""


class WorkerExtension:
    """Methods called through the engine's `collective_rpc`."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        device: torch.device

    def load_version(self, path: str, places: Sequence[TensorPlace]) -> None:
        """Load all tensors of a version; each worker takes its own part of them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_tensors(_map(path), places))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        missing = set() if loaded is None else expected - loaded
        if missing:
            raise ValueError(
                f"{len(missing)} of the model's {len(expected)} parameters were not in the version, first "
                f"{min(missing)}: the learner's model and rollout's model differ; give both the same one"
            )
        _repack_tied_output(model, self.device.type)

    def occupancy(self) -> tuple[int, int]:
        """Requests in the running batch, and the KV blocks they hold (shared ones once)."""
        requests = self.model_runner.requests
        running = [requests[name] for name in self.model_runner.input_batch.req_ids if name in requests]
        blocks: set[int] = set()
        for request in running:
            for group in request.block_ids:
                blocks.update(group)
        return len(running), len(blocks)


def _map(path: str) -> mmap.mmap:
    """The file as memory. A private mapping may be written without touching the file, as torch.frombuffer wants it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def _tensors(view: mmap.mmap, places: Sequence[TensorPlace]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views of the mapped file."""
    for name, dtype, shape, offset in places:
        flat = torch.frombuffer(view, dtype=TORCH_DTYPES[dtype], count=math.prod(shape), offset=offset)
        yield name, flat.view(*shape)


def _repack_tied_output(model: torch.nn.Module, device_type: str) -> None:
    """Renew the packed copy that CPU kernels keep of a tied embedding: a reload renews only the embedding itself."""
    if not needs_repacking(device_type):
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
