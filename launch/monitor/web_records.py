"""Single records, as the page's drill-downs ask for them.

Consumes    a run directory; the query of a request, e.g. view=trajectory&group=3&rollout=1&move=next
Produces    plain values for JSON; {"none": why} where nothing is recorded
Waits for   nothing but the disk
Invariant   of a query only names from VIEWS and MOVES and whole numbers are used, and nothing else is accepted
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from launch.monitor import records, show, trajectories
from launch.monitor.records import NoRecords

NUM_CALLS, NUM_CLOSED, NUM_STEPS, NUM_VERSIONS = 20, 20, 12, 8
MAX_DIGITS = 12
Plain: TypeAlias = dict[str, Any]


class NotUnderstood(ValueError):
    """A query that no page sends."""


def details(directory: Path, query: str) -> Plain:
    """What a view shows beyond the snapshot.

    Raises:
        NotUnderstood: the query is none of the page's.
    """
    try:
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=4))
    except ValueError as error:
        raise NotUnderstood(str(error)) from None
    view = asked.pop("view", "")
    if view not in VIEWS:
        raise NotUnderstood(f"view is one of {', '.join(VIEWS)}")
    if asked and view != "trajectory":
        raise NotUnderstood(f"{view} takes nothing more")
    try:
        with records.opened(directory) as db:
            return VIEWS[view](db, directory, asked)
    except NoRecords as error:
        return {"none": str(error)}


def _groups(db: sqlite3.Connection, directory: Path, asked: Mapping[str, str]) -> Plain:
    """With the age that the oldest token may have: at the next step, or at the one that trained the group."""
    active, closed = records.groups(db, NUM_CLOSED)
    row = db.execute("SELECT value FROM meta WHERE key = 'next_step'").fetchone()
    next_step = int(row[0]) if row else 0

    def plain(group: records.Group) -> Plain:
        step = group.step if group.step is not None else next_step
        return asdict(group) | {"age": None if group.drop_reason else step - group.base}

    return {"active": [plain(group) for group in active], "closed": [plain(group) for group in closed]}


def _calls(db: sqlite3.Connection, directory: Path, asked: Mapping[str, str]) -> Plain:
    return {"calls": [asdict(call) for call in records.calls(db, directory, NUM_CALLS)]}


def _steps(db: sqlite3.Connection, directory: Path, asked: Mapping[str, str]) -> Plain:
    return {"steps": [asdict(step) for step in records.steps(db, directory, NUM_STEPS)]}


def _versions(db: sqlite3.Connection, directory: Path, asked: Mapping[str, str]) -> Plain:
    return {"versions": [asdict(version) for version in records.versions(db, NUM_VERSIONS)]}


def _trajectory(db: sqlite3.Connection, directory: Path, asked: Mapping[str, str]) -> Plain:
    """The asked one, or the newest; `move` leads from it to another."""
    if asked.keys() - {"group", "rollout", "move"}:
        raise NotUnderstood("trajectory takes group, rollout and move")
    key = (_number(asked, "group"), _number(asked, "rollout")) if "group" in asked else trajectories.newest(db)
    move = asked.get("move", "")
    if move and move not in trajectories.MOVES:
        raise NotUnderstood(f"move is one of {', '.join(trajectories.MOVES)}")
    if key is None:
        return {"none": "no turn is recorded yet"}
    key = trajectories.moved(db, key, move) if move else key
    told = trajectories.read(db, directory, key)
    if told is None:
        return {"none": f"there is no rollout {key[1]} of group {key[0]}"}
    model = str(show.facts_of(directory).settings.get("model.path", ""))
    lines = trajectories.lines(told, trajectories.decoder(directory, model))
    return {"group": key[0], "rollout": key[1], "moves": list(trajectories.MOVES), "lines": lines}


def _number(asked: Mapping[str, str], name: str) -> int:
    text = asked.get(name, "")
    digits = text.removeprefix("-")  # groups of evaluations have negative numbers
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise NotUnderstood(f"{name} is a whole number")
    return int(text)


VIEWS: Mapping[str, Callable[[sqlite3.Connection, Path, Mapping[str, str]], Plain]] = {
    "groups": _groups,
    "sandbox": _calls,
    "learner": _steps,
    "weights": _versions,
    "trajectory": _trajectory,
}
