"""`rocstar copy RUN COPY`: a copy of a run that can be resumed, taken while the run goes on or not.

Consumes    a run directory
Produces    another, in whose buffer/ the index is absent: it is made anew from spare/ at the first resume
Waits for   the disk
Invariant   snapshots of the index are copied before segments, its journal after them: so whatever the run deletes
            meanwhile, the journal leads from a snapshot to what the segments hold. Then checkpoints: unless the run
            makes two more before they are copied, one of them is as new as the index counts on
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.config import ConfigError
from launch.reach import is_driven

_SKIPPED = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.old", "driver.lock", "buffer.json")


def copy(source: Path, target: Path) -> None:
    """Copies the run.

    Raises:
        ConfigError: the copy would be written over something.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: name a place that does not")
    if target.absolute().is_relative_to(source.absolute()):
        raise ConfigError(f"{target} lies in {source}: name a place outside of it")
    if (source / "buffer" / "index.sqlite").exists() and not (source / "buffer" / "spare" / "PLACE").exists():
        raise ConfigError(f"{source}: has no buffer/spare/ yet; resume it once, or, while it does not go on, use cp -r")
    target.mkdir(parents=True)
    buffer = Path("buffer")
    for folder, suffix in (
        (buffer / "spare", "PLACE"),
        (buffer / "spare", ".sqlite"),
        (buffer / "segments", ".seg"),
        (buffer / "spare", ".log"),
        (Path("checkpoints"), ""),
        (Path(), ""),
    ):
        for path in _files(source / folder):
            if path.name.endswith(suffix):
                _copy_file(path, target / path.relative_to(source))


def _files(folder: Path) -> Iterator[Path]:
    """All there are below; a folder that is deleted meanwhile has none."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(place, name) for name in sorted(names))


def rebuild_index(directory: Path) -> str:
    """The index of a run that is not going on, made anew; what was done, in words.

    Raises:
        ConfigError: a driver works in the directory, or there is nothing to make it from.
    """
    from buffer.index import IndexFault
    from buffer.spare import rebuild

    if is_driven(directory):
        raise ConfigError(f"{directory}: a driver works in this run; end it first")
    try:
        return rebuild(directory / "buffer")
    except (IndexFault, OSError) as error:
        raise ConfigError(str(error)) from error


def _copy_file(path: Path, target: Path) -> None:
    """Once; a file that was deleted meanwhile is none that the copy needs."""
    if path.name in _SKIPPED or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(path, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)
