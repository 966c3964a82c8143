"""A run's place on disk: made once, found again by a resume.

Consumes    a checked recipe
Produces    recipe.toml (resolved), run.json (schema, wire id of the run), problems.json (launch/pinned.py), the
            lock that one driver holds
Waits for   nothing
Invariant   two drivers never work in one directory; the wire id never changes, so a buffer of another run is refused
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launch.config import ConfigError, to_toml
from launch.durable import write
from launch.lock import hold
from launch.pinned import pin
from launch.tree import Recipe

SCHEMA = 1
"""Of run.json and summary.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """An opened run. The lock ends with the process, however it ends."""

    path: Path
    run: str
    resumed: bool
    lock: IO[str]

    @classmethod
    def open(cls, recipe: Recipe, fingerprint: str) -> RunDirectory:
        """Makes the directory, or finds the run that it holds.

        Raises:
            ConfigError: another driver works in it, another release wrote it, or its problems were others.
        """
        path = Path(recipe.directory).absolute()
        for name in ("logs", "metrics", "keys"):
            (path / name).mkdir(parents=True, exist_ok=True)
        (path / "keys").chmod(0o700)
        lock = _lock(path)
        try:
            return cls._open(path, recipe, fingerprint, lock)
        except ConfigError:
            lock.close()
            raise

    @classmethod
    def _open(cls, path: Path, recipe: Recipe, fingerprint: str, lock: IO[str]) -> RunDirectory:
        known = path / "run.json"
        resumed = known.exists()
        if resumed:
            stored: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
            if stored.get("schema") != SCHEMA:
                raise ConfigError(
                    f"{known}: schema {stored.get('schema')} is not {SCHEMA}: use the release that wrote it"
                )
        else:
            stored = {"schema": SCHEMA, "name": recipe.run.name, "run": uuid.uuid4().hex[:16]}
            write(known, json.dumps(stored) + "\n")
        pin(path, recipe.problems, fingerprint)
        write(path / "recipe.toml", to_toml(recipe))
        return cls(path=path, run=stored["run"], resumed=resumed, lock=lock)


def _lock(path: Path) -> IO[str]:
    lock = hold(path / "driver.lock")
    if lock is None:
        raise ConfigError(f"{path}: another driver works in this run; end it first")
    return lock
