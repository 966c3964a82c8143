"""What the screen shows: one of its pages, by the keys that were pressed.

Consumes    a source of snapshots and records (sources.py); keys
Produces    `Page`s of text
Waits for   the source
Invariant   a source that cannot be read, now or for good, makes a page that says so above what was seen last; no figure
            is computed here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from launch.config import ConfigError
from launch.monitor import drill, text
from launch.monitor.advisor import Advice
from launch.monitor.glossary import help_lines
from launch.monitor.records import Call, Group, Step, Version
from launch.monitor.show import read_json
from launch.monitor.snapshot import Snapshot, read_record
from launch.monitor.sources import RunSource

SCREEN, TRAJECTORY, LEARNER, HELP, JSON = "screen", "trajectory", "learner", "help", "json"
VIEWS = {"1": "engines", "2": "sandbox", "3": "groups", "4": LEARNER, "5": "weights", "6": TRAJECTORY}
PAGES = {**VIEWS, "question_mark": HELP, "j": JSON, "escape": SCREEN, "0": SCREEN}
MOVES = {"n": "next", "p": "previous", "N": "next group", "P": "previous group"}
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What is to be seen."""

    view: str
    head: str
    """the run, in one line"""
    lines: tuple[str, ...]
    failed: str = ""
    """why the run cannot be read now"""


class Desk:
    """Keeps which page is open and what is selected there."""

    def __init__(self, source: RunSource) -> None:
        self.view = SCREEN
        self._source = source
        self._told = b""
        self._seen: tuple[Snapshot, Advice] | None = None
        self._trajectory = ""
        """query of the one that is open; "": the newest"""
        self._move = ""
        self._step: int | None = None
        """None: the newest"""
        self._last = Page(view=SCREEN, head="", lines=())

    def press(self, key: str) -> None:
        """Opens a page, moves within it; the key of the open page leads back to the screen."""
        if key in PAGES:
            self.view = SCREEN if self.view == PAGES[key] else PAGES[key]
            self._trajectory, self._step, self._move = "", None, ""
        elif key in MOVES:
            self._move = MOVES[key]

    def page(self) -> Page:
        """As it is now."""
        try:
            snapshot, advice = self._look()
            screen = text.screen(snapshot, advice)
            lines = screen[1:] if self.view == SCREEN else self._drill(snapshot)
            self._last = Page(view=self.view, head=screen[0], lines=tuple(lines))
        except (ConfigError, OSError, ValueError) as error:
            last = self._last
            return Page(view=last.view, head=last.head, lines=last.lines, failed=f"cannot be read now: {error}")
        return self._last

    def _look(self) -> tuple[Snapshot, Advice]:
        told = self._source.snapshot()
        if self._seen is None or told != self._told:
            self._told, self._seen = told, read_json(told)
        return self._seen

    def _drill(self, snapshot: Snapshot) -> list[str]:
        if self.view == HELP:
            return help_lines()
        if self.view == JSON:
            return self._told.decode().splitlines()
        if self.view == "engines":
            return list(drill.engines(snapshot))
        return self._recorded(snapshot)

    def _recorded(self, snapshot: Snapshot) -> list[str]:
        """Pages with records; where there are none, with what the snapshot knows."""
        told = self._source.records(f"view={self.view}{self._selected()}")
        missing = ["", f"no single records: {told['none']}"] if "none" in told else []
        if self.view == TRAJECTORY:
            return missing or self._read(told)
        if self.view == "sandbox":
            return [*drill.sandbox(snapshot, _records(Call, told.get("calls"))), *missing]
        if self.view == "groups":
            active, closed = (_records(Group, told.get(key)) for key in ("active", "closed"))
            pair = None if active is None or closed is None else (active, closed)
            return [*drill.groups(snapshot, pair, snapshot.run.step), *missing]
        if self.view == LEARNER:
            steps = _records(Step, told.get("steps"))
            return [*drill.learner(snapshot, steps, self._place(steps or [])), *missing]
        return [*drill.weights(snapshot, _records(Version, told.get("versions"))), *missing]

    def _selected(self) -> str:
        if self.view != TRAJECTORY:
            return ""
        return self._trajectory + (f"&move={self._move}".replace(" ", "%20") if self._move else "")

    def _read(self, told: dict[str, Any]) -> list[str]:
        self._trajectory, self._move = f"&group={told['group']}&rollout={told['rollout']}", ""
        return [*told["lines"], "", "n next rollout, p previous; N next group, P previous"]

    def _place(self, steps: list[Step]) -> int:
        """Of the selected step; one that has left the list gives way to the oldest in it."""
        numbers = [step.step for step in steps]
        place = len(steps) - 1
        if self._step is not None and steps:
            place = numbers.index(self._step) if self._step in numbers else 0
        moved = place + {"next": 1, "previous": -1}.get(self._move, 0)
        if self._move and 0 <= moved < len(steps):
            place = moved
            self._step = None if place == len(steps) - 1 else numbers[place]
        self._move = ""
        return place


def _records(kind: type[_T], plain: list[dict[str, Any]] | None) -> list[_T] | None:
    return None if plain is None else [read_record(kind, one) for one in plain]
