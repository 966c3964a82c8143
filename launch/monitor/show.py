"""`rocstar monitor RUN`: the one screen, printed once, or the snapshot as JSON.

Consumes    a run directory: live, finished, interrupted or empty; of a live one also the buffer, when it can be reached
Produces    the snapshot and its advice
Waits for   the buffer's answer, at most ASK_S
Invariant   a run that cannot be asked is shown from its files
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from buffer.client import PeerSilent, Refused
from launch.config import ConfigError, read_toml, validate
from launch.monitor import advisor
from launch.monitor.advisor import Advice, advise
from launch.monitor.fixes import Fix
from launch.monitor.measure import WINDOW_S, Facts, measure
from launch.monitor.readings import History, from_status, read_directory
from launch.monitor.snapshot import Snapshot, from_json, to_json
from launch.reach import buffer_client, is_driven
from launch.tree import Recipe

ASK_S = 5.0
BETWEEN_S = 2.0
"""from the first question to the second, where only the buffer can tell"""


def look(
    directory: Path, window_s: float | None = None, against: Callable[[Snapshot, Fix], str] = lambda snapshot, fix: ""
) -> tuple[Snapshot, Advice]:
    """The run as it is; `against` is told each fix (advisor.py).

    Raises:
        ConfigError: there is no such directory, or its recipe is of another release.
    """
    facts = facts_of(directory)
    live = is_driven(directory)
    since_s = max(window_s or WINDOW_S, WINDOW_S) + 10.0 if live else None
    history = read_directory(directory, since_s)
    readings = history.readings
    if live:
        readings = asyncio.run(_asked(directory, readings))
    history = History(readings=readings, steps=history.steps, live=live, summary=_summary(directory, live))
    snapshot = measure(history, facts, window_s)
    return snapshot, advise(snapshot, against)


def as_json(snapshot: Snapshot, advice: Advice) -> str:
    """One object: the snapshot's fields, and `advice`."""
    return json.dumps(to_json(snapshot) | {"advice": advisor.to_json(advice)}, indent=1)


def read_json(told: bytes | str) -> tuple[Snapshot, Advice]:
    """What `as_json` wrote.

    Raises:
        ValueError: it is none, or of another schema.
    """
    plain = json.loads(told)
    return from_json(plain), advisor.from_json(plain["advice"])


def facts_of(directory: Path) -> Facts:
    """Name and settings; of a directory that holds no run, its own name."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is no directory")
    known, recipe = directory / "run.json", directory / "recipe.toml"
    if not (known.is_file() and recipe.is_file()):
        return Facts(name=directory.name)
    name = json.loads(known.read_text(encoding="utf-8"))["name"]
    return Facts(name=name, settings=dict(flat(validate(Recipe, read_toml(recipe), str(recipe)))))


def flat(model: BaseModel, prefix: str = "") -> Mapping[str, Any]:
    """Every setting by its dotted name."""
    out: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            out |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool) or value is None:
            out[prefix + name] = value
    return out


def _summary(directory: Path, live: bool) -> Mapping[str, Any]:
    path = directory / "summary.json"
    if live or not path.is_file():
        return {}
    told: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


async def _asked(directory: Path, readings: tuple[Any, ...]) -> tuple[Any, ...]:
    """With what the buffer says now; where its files are on another host, twice, so that there are rates."""
    client = buffer_client(directory, name="monitor-look", timeout_s=ASK_S)
    if client is None:
        return readings
    try:
        if not readings:
            readings = (from_status(await client.status(), time.time()),)
            await asyncio.sleep(BETWEEN_S)
        return (*readings, from_status(await client.status(), time.time()))
    except (PeerSilent, Refused):
        return readings
    finally:
        await client.close()
