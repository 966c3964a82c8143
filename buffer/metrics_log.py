"""metrics/NAME.jsonl: one line per role and second, the cumulative snapshot with its time of day; run.jsonl: where the
run stands (buffer/report.py).

Consumes    snapshots that came with heartbeats
Produces    lines; figures that JSON has no word for become null
Waits for   the disk, in a reading thread
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def append(directory: Path, snapshots: Iterable[tuple[str, dict[str, Any]]], unix_s: float) -> None:
    """One line to the file of each (name, snapshot)."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, snapshot in snapshots:
        line = _line({"unix_s": unix_s} | snapshot)
        with (directory / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:  # there is one that JSON has no word for
        return json.dumps(_plain(record), separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
