"""Moments of a run: where it stood and every role's cumulative figures.

Consumes    RUN/metrics/*.jsonl, which the buffer writes once a second; or statuses of a live buffer
Produces    `Reading`s in the order of time, and the learner's steps
Waits for   nothing but the disk
Invariant   files are read from their ends, as far back as asked, also while they grow: a line that is not whole yet is
            left out
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 16
MAX_BYTES = 256 << 20
"""of one file, from its end"""
KEPT_LINES = 2048
NOT_ROLES = ("run", "steps")
"""files in metrics/ that hold no role's snapshots"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One moment."""

    unix_s: float
    standing: Mapping[str, Any]
    """as in metrics/run.jsonl: phase, steps, tickets, groups, peers, ..."""
    roles: Mapping[str, Mapping[str, Any]]
    """name -> snapshot of buffer/meters.py, with `unix_s` of its own"""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What there is to measure."""

    readings: tuple[Reading, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    """lines of metrics/steps.jsonl, the last of each step"""
    live: bool = False
    """a driver works on the run now"""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """of a run that has ended"""


def from_status(status: Mapping[str, Any], unix_s: float) -> Reading:
    """What `BufferClient.status()` told at that moment."""
    peers = {name: dict(peer) for name, peer in status.get("peers", {}).items()}
    told = {name: peer.pop("snapshot", None) for name, peer in peers.items()} | {"buffer-0": status.get("buffer")}
    roles = {
        name: {**snapshot, "unix_s": unix_s - peers.get(name, {}).get("heartbeat_age_s", 0.0)}
        for name, snapshot in told.items()
        if snapshot
    }
    standing = {key: value for key, value in status.items() if key not in ("buffer", "peers")} | {"peers": peers}
    return Reading(unix_s=unix_s, standing=standing, roles=roles)


def read_directory(directory: Path, since_s: float | None = None) -> History:
    """A run directory's last `since_s` seconds, or all of it; without figures it is empty."""
    metrics = directory / "metrics"
    standings = list(tail(metrics / "run.jsonl", since_s))
    roles = {
        path.stem: list(tail(path, since_s))
        for path in sorted(metrics.glob("*.jsonl"))
        if path.stem not in NOT_ROLES and path.stem.rpartition("-")[2].isdigit()
    }
    return History(readings=tuple(_merge(standings, roles)), steps=_steps(metrics / "steps.jsonl"))


def _merge(standings: list[dict[str, Any]], roles: Mapping[str, list[dict[str, Any]]]) -> Iterator[Reading]:
    """A reading per standing, with what each role had said by then."""
    at = dict.fromkeys(roles, 0)
    latest: dict[str, dict[str, Any]] = {}
    for standing in standings:
        for name, lines in roles.items():
            while at[name] < len(lines) and lines[at[name]]["unix_s"] <= standing["unix_s"]:
                latest[name] = lines[at[name]]
                at[name] += 1
        yield Reading(unix_s=standing["unix_s"], standing=standing, roles=dict(latest))


def _steps(path: Path) -> tuple[Mapping[str, Any], ...]:
    last = {line["step"]: line for line in tail(path, None)}
    return tuple(last[step] for step in sorted(last))


def tail(path: Path, since_s: float | None) -> Iterable[dict[str, Any]]:
    """The file's lines of its last `since_s` seconds (by their `unix_s`), oldest first; None: all."""
    lines: list[dict[str, Any]] = []
    last_s: float | None = None
    for text in _backwards(path):
        line = _parse(text)
        if line is None:
            continue
        if since_s is not None:
            last_s = line["unix_s"] if last_s is None else last_s
            if line["unix_s"] < last_s - since_s:
                break
        lines.append(line)
    return reversed(lines)


@functools.lru_cache(KEPT_LINES)
def _parse(text: bytes) -> dict[str, Any] | None:
    """None for what is no whole record: the line that is being written, or was when its writer was killed.

    Who looks once a second finds nearly the same lines again; they are read-only.
    """
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _backwards(path: Path) -> Iterator[bytes]:
    """Lines from the last to the first."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        position = end = file.seek(0, 2)
        rest = b""
        while position > 0 and end - position < MAX_BYTES:
            size = min(BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            parts = (file.read(size) + rest).split(b"\n")
            rest = parts[0]
            yield from reversed(parts[1:])
        if position == 0:
            yield rest
