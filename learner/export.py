"""A version in Hugging Face format: what any engine or library loads by its directory.

Consumes    full weights, the directory of the model that training started from
Produces    config, tokenizer and whatever else lay beside the old weights; the new weights as safetensors
Waits for   nothing
Invariant   the directory appears whole or not at all; tied weights are written once, as their model names them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

SHARD_BYTES = 4 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_model(
    weights: Iterable[tuple[str, Tensor]], model: Path, target: Path | None, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `weights` and the rest of `model` to `target`; with None (ranks other than 0) only exhaust them."""
    if target is None:
        for _ in weights:
            continue
        return
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy(path, scratch / path.name)
    _write_shards(weights, scratch, shard_bytes)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


def _write_shards(weights: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int) -> None:
    """Shards of at most `shard_bytes` (one tensor at least), written as they fill; a single one needs no index."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(held, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in weights:
        copy = tensor.detach().cpu().clone().contiguous()
        num_bytes = copy.numel() * copy.element_size()
        if held and size + num_bytes > shard_bytes:
            flush()
            size = 0
        held[name] = copy
        size, total = size + num_bytes, total + num_bytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
