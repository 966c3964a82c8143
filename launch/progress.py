"""The progress of a run on the terminal: a live view, or plain lines where there is no terminal.

Consumes    the buffer's status, the roles' states, sentences of the driver
Produces    the screen; the last lines: the summary
Waits for   nothing
Invariant   every sentence is shown once, in both forms; output that takes no more (a full disk, a closed pipe) loses
            them and ends no run
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.summary import lines
from launch.tree import Recipe
from launch.view import View, view

WINDOW_S = 20.0
"""Rates are over the last so many seconds."""
PLAIN_EVERY_S = 10.0


class Progress:
    """Use as a context manager; `say` and `show` within it, `conclude` after."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._recipe, self._directory = recipe, directory
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None
        self._history: deque[tuple[float, dict[str, Any]]] = deque()
        self._started_s = self._plain_s = time.monotonic()
        self._plain_before = ""

    def __enter__(self) -> Progress:
        self.say(f"run {self._recipe.run.name} in {self._directory}")
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()

    def say(self, sentence: str) -> None:
        """One sentence with its time."""
        self._print(f"[{self._elapsed_s():6.1f}s] {sentence}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)

    def show(self, status: dict[str, Any], states: dict[str, str]) -> None:
        """The newest state of things."""
        now_s = time.monotonic()
        if not self._history or self._history[-1][1] is not status:
            self._history.append((now_s, status))
        while len(self._history) > 2 and now_s - self._history[0][0] > WINDOW_S:
            self._history.popleft()
        before_s, before = self._history[0]
        seen = view(status, before, now_s - before_s, states)
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.update(screen(seen, self._recipe.run.name, self._elapsed_s()), refresh=True)
        else:
            self._plain(seen, now_s)

    def conclude(self, summary: dict[str, Any]) -> None:
        """What became of it."""
        self._print("\n".join(lines(summary)))
        self._print(f"summary        {self._directory / 'summary.json'}")

    def _plain(self, seen: View, now_s: float) -> None:
        """A line now and then, and whenever a step was taken."""
        key = f"{seen.phase} {seen.step}"
        if key == self._plain_before and now_s - self._plain_s < PLAIN_EVERY_S:
            return
        self._plain_s, self._plain_before = now_s, key
        waiting = [f"{role.name} {role.state}" for role in seen.roles if role.state != "running"]
        self.say(", ".join([headline(seen), *waiting]))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def headline(seen: View) -> str:
    """The run in one line."""
    parts = [
        f"{seen.phase}: step {seen.step}/{seen.steps}, version {seen.version}",
        seen.evaluated,
        _figure("groups/min", seen.groups_per_min or None, "{:.0f}"),
        _figure("rollouts/s", seen.rollouts_per_s or None, "{:.0f}"),
        _figure("tokens/s", seen.tokens_per_s or None, "{:.0f}"),
        _figure("reward", seen.reward, "{:.2f}"),
        _figure("failed calls", seen.tool_error, "{:.0%}"),
        _figure("dropped", seen.dropped, "{:.0%}"),
        "" if seen.age_mean is None else f"age {seen.age_mean:.2f} (max {seen.age_max:.0f} of {seen.max_staleness})",
    ]
    return ", ".join(part for part in parts if part)


def _figure(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{form.format(value)} {name}"


def screen(seen: View, name: str, elapsed_s: float) -> Group:
    """The live view."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for role in seen.roles:
        style = {"running": "green", "failed": "red"}.get(role.state, "yellow")
        table.add_row(role.name, Text(role.state, style=style), Text(role.does, overflow="ellipsis", no_wrap=True))
    return Group(
        Text(f"{name}  {elapsed_s:.0f} s", style="bold"),
        Text(headline(seen)),
        Text(f"tickets: {seen.tickets}") if seen.tickets else Text("starting"),
        table,
    )
