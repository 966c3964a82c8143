"""Checkpoints on disk: a directory is complete and verified, or it does not count.

Consumes    what the engine writes into a directory, facts about the run
Produces    checkpoints/step_N with a COMPLETE mark: run, step, ranks, totals, and size and CRC-32 of every file
Waits for   the disk; ranks share one file system
Invariant   a directory named step_N holds everything, synced, before it gets that name; COMPLETE is its last file;
            step_N means version N: the weights after N steps; the newest `keep` are never deleted. One that was found
            damaged has no COMPLETE mark any more, so that it is not among them
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECKPOINT_SCHEMA = 1
MARK = "COMPLETE"
DAMAGED = "DAMAGED"
"""what the mark is called once the checkpoint was found damaged"""
PARTIAL = ".partial"
_READ_BYTES = 16 * 2**20


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names it, what is wrong, and what to do."""


class DamagedError(CheckpointError):
    """Its files are not those that were written: it is passed over for the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What the surviving weights were trained on, counted from version 0: a restart neither loses nor doubles it."""

    steps: int = 0
    trajectories: int = 0
    tokens: int = 0
    """of trained trajectories, prompts and observations included"""
    loss_tokens: int = 0
    ages: Mapping[int, int] = field(default_factory=dict)
    """age of a loss token in steps -> number of tokens"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What a COMPLETE mark says, files apart."""

    run: str
    step: int
    ranks: int
    zero_stage: int
    totals: Totals


FileSums = dict[str, tuple[int, int]]
"""path inside the checkpoint -> (bytes, CRC-32)"""


def step_directory(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def begin(root: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into; remains of an attempt that died are removed."""
    partial = root / f"step_{step}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def file_sums(directory: Path, *, part: int = 0, parts: int = 1, sync: bool = False) -> FileSums:
    """Size and CRC-32 of every `parts`-th file, so that ranks may share the work; with `sync` the disk has them."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MARK)
    sums: FileSums = {}
    for path in files[part::parts]:
        crc = size = 0
        with path.open("rb") as handle:
            while block := handle.read(_READ_BYTES):
                crc, size = zlib.crc32(block, crc), size + len(block)
            if sync:
                os.fsync(handle.fileno())
        sums[path.relative_to(directory).as_posix()] = (size, crc)
    return sums


def finish(root: Path, info: CheckpointInfo, sums: FileSums) -> Path:
    """Mark what `begin` opened as complete and give it its name. A checkpoint of that step is replaced."""
    partial, final = root / f"step_{info.step}{PARTIAL}", step_directory(root, info.step)
    mark = {"schema": CHECKPOINT_SCHEMA, **asdict(info), "files": sums}
    with (partial / MARK).open("w", encoding="utf-8") as handle:
        json.dump(mark, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    for directory in (path for path in partial.rglob("*") if path.is_dir()):
        _sync_directory(directory)
    _sync_directory(partial)
    if final.exists():
        _delete(final)
    partial.rename(final)
    _sync_directory(root)
    return final


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    steps = [
        int(path.name.removeprefix("step_"))
        for path in root.glob("step_*")
        if path.name.removeprefix("step_").isdigit() and (path / MARK).is_file()
    ]
    return sorted(steps)


def read_mark(directory: Path) -> tuple[CheckpointInfo, FileSums]:
    """What the COMPLETE mark of a checkpoint says.

    Raises:
        DamagedError: there is none that can be read.
        CheckpointError: it is one of another schema.
    """
    try:
        mark: dict[str, Any] = json.loads((directory / MARK).read_text(encoding="utf-8"))
        if mark["schema"] != CHECKPOINT_SCHEMA:
            raise CheckpointError(f"{directory}: schema {mark['schema']}, this version reads {CHECKPOINT_SCHEMA}")
        totals = {**mark["totals"], "ages": {int(age): int(count) for age, count in mark["totals"]["ages"].items()}}
        info = {name: mark[name] for name in ("run", "step", "ranks", "zero_stage")}
        sums = {name: (int(size), int(crc)) for name, (size, crc) in mark["files"].items()}
        return CheckpointInfo(**info, totals=Totals(**totals)), sums
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{directory / MARK} cannot be read ({error}): use another checkpoint") from error


def verify(directory: Path, announced: FileSums, found: FileSums) -> None:
    """Compare the files of a checkpoint with its mark.

    Raises:
        DamagedError: naming the first file that is missing, unannounced or different.
    """
    for name in sorted(announced.keys() | found.keys()):
        if announced.get(name) != found.get(name):
            raise DamagedError(
                f"{directory / name}: (bytes, CRC-32) = {found.get(name, 'no such file')}, the {MARK} mark says "
                f"{announced.get(name, 'no such file')}: the checkpoint is damaged"
            )


def disown(directory: Path) -> None:
    """Take the mark of a damaged checkpoint away; its files stay until the next `prune`."""
    with contextlib.suppress(FileNotFoundError):  # the mark itself was what is missing
        (directory / MARK).rename(directory / DAMAGED)
        _sync_directory(directory)


def require_same_shape(directory: Path, info: CheckpointInfo, *, run: str, ranks: int, zero_stage: int) -> None:
    """DeepSpeed reads a checkpoint back only onto as many ranks, sharded the same way.

    Raises:
        CheckpointError: naming the setting that differs.
    """
    for name, has, wants in (
        ("run", info.run, run),
        ("learner.ranks", info.ranks, ranks),
        ("learner.zero_stage", info.zero_stage, zero_stage),
    ):
        if has != wants:
            raise CheckpointError(
                f"{directory} was written with {name} = {has}, this learner has {wants}: set {name} = {has}, or start "
                "a new run from the exported model"
            )


def prune(root: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints and what attempts that died left; returns those kept."""
    steps = complete_steps(root)
    for path in root.glob("step_*"):
        if path.is_dir() and path.name not in {f"step_{step}" for step in steps[-keep:]}:
            _delete(path)
    return steps[-keep:]


def _delete(directory: Path) -> None:
    """Take the name away first: a half-deleted directory must not look complete."""
    doomed = directory.with_name(directory.name.removesuffix(PARTIAL) + f".deleted{PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
