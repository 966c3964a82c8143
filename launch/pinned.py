"""The problems of a run are those it began with: a record beside the run, compared whenever they are read again.

Consumes    the `[problems]` table with absolute paths, the fingerprint of the stream that it gives
Produces    RUN/problems.json (schema, settings, fingerprint), or `ConfigError`
Waits for   nothing
Invariant   written once, before the buffer's first row; a run that holds rows never goes on with other problems
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.problems import ProblemSettings
from launch.config import ConfigError
from launch.durable import write

SCHEMA = 1


def pin(directory: Path, settings: ProblemSettings, fingerprint: str) -> None:
    """Records the problems of a run that is new, compares those of one that is not.

    Raises:
        ConfigError: they are not those that the run began with.
    """
    began = (directory / "buffer").exists()  # one that never got so far may be started anew with others
    if began and (directory / "problems.json").exists():
        check(directory, settings, fingerprint)
        return
    record = {"schema": SCHEMA, "settings": settings.model_dump(mode="json"), "fingerprint": fingerprint}
    write(directory / "problems.json", json.dumps(record) + "\n")


def check(directory: Path, settings: ProblemSettings, fingerprint: str) -> None:
    """Compares with the record.

    Raises:
        ConfigError: names what differs.
    """
    path = directory / "problems.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: schema {record.get('schema')} is not {SCHEMA}: use the release that wrote it")
    for key, value in settings.model_dump(mode="json").items():
        had = record["settings"].get(key)
        if value != had:
            raise ConfigError(
                f"problems.{key} = {value!r}, the run in {directory} began with {had!r}: it is fixed for a run; put it "
                "back, or start another run in another run.directory"
            )
    if fingerprint != record["fingerprint"]:
        field = "families" if settings.path is None else "path"
        raise ConfigError(
            f"problems.{field} = {_named(settings)} gives problems with fingerprint {fingerprint}, the run in "
            f"{directory} began with {record['fingerprint']}: a run goes on with the problems it began with; restore "
            f"{'the release of reasoning-gym' if settings.path is None else 'the content'}, or start another run in "
            "another run.directory"
        )


def _named(settings: ProblemSettings) -> str:
    return settings.path or ", ".join(family.name for family in settings.families)
