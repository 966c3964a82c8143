"""The screen in a terminal: `rocstar monitor RUN`, a thin shell (Textual) around desk.py.

Consumes    keys; pages of the desk
Produces    the open page, drawn anew about once a second and at each key
Waits for   the source, in a thread of its own: keys and scrolling never wait for it
Invariant   nothing of a run is changed; only the thread touches the desk

A page that is larger than the terminal scrolls, both ways.
"""

from __future__ import annotations

import asyncio
import queue
import re
import threading
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.message import Message
from textual.widgets import Footer, Static

from launch.monitor.desk import Desk, Page

EVERY_S = 1.0
STOP = "stop"
REST_S = 10.0
STYLES = (
    (r"^---- [A-Z][A-Z ,']*", "bold cyan"),
    (r"^VERDICT.*", "bold"),
    (r"^FIX \d.*", "green"),
    (r"<- limit$", "bold yellow"),
    (r"(?<!\S)#+(?=[\s.x=!]|$)", "green"),
    (r"(?<=[# ])\.{2,}", "dim"),
    (r"x{3,}", "red"),
    (r"={3,}", "magenta"),
    (r"^(WARN).*", "yellow"),
    (r"^(ERROR).*", "bold red"),
)


class Drawn(Message):
    """A page is ready."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page


class MonitorApp(App[None]):
    """One page at a time, under a line that says which run it is."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { dock: top; height: 1; background: $primary; color: $text; text-wrap: nowrap; }
    #failed { dock: top; height: auto; background: $error; color: $text; display: none; }
    #body { overflow: auto auto; }
    #text { width: auto; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "desk('question_mark')", "help", key_display="?"),
        Binding("1", "desk('1')", "engines"),
        Binding("2", "desk('2')", "calls"),
        Binding("3", "desk('3')", "groups"),
        Binding("4", "desk('4')", "step"),
        Binding("5", "desk('5')", "weights"),
        Binding("6", "desk('6')", "text"),
        Binding("j", "desk('j')", "json"),
        Binding("escape,0", "desk('escape')", "back", show=False),
        *(Binding(key, f"desk('{key}')", show=False) for key in "npNP"),
    ]

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.animation_level = "none"
        self._desk = desk
        self._keys: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="monitor-look", daemon=True)
        self.shown = Page(view="", head="", lines=())
        self._redrawn = asyncio.Event()

    async def until(self, seen: Callable[[Page], bool]) -> Page:
        """For who drives it without a terminal: waits for such a page."""
        while not seen(self.shown):
            self._redrawn.clear()
            await self._redrawn.wait()
        return self.shown

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield Static("", id="failed", markup=False)
        with ScrollableContainer(id="body"):
            yield Static("the run is being read", id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#body").focus()
        self._thread.start()

    def on_unmount(self) -> None:
        self._keys.put(STOP)

    def rest(self) -> None:
        """Waits for the last look to end: it may be asking a buffer."""
        self._thread.join(REST_S)

    def action_desk(self, key: str) -> None:
        self._keys.put(key)

    def _watch(self) -> None:
        """Of the thread: a page after each key, and when none came for a while."""
        while True:
            self.post_message(Drawn(self._desk.page()))
            try:
                key = self._keys.get(timeout=EVERY_S)
            except queue.Empty:
                continue
            if key == STOP:
                return
            self._desk.press(key)

    def on_drawn(self, drawn: Drawn) -> None:
        page, before = drawn.page, self.shown
        if page == before:
            return
        self.query_one("#head", Static).update(page.head)
        failed = self.query_one("#failed", Static)
        failed.update(page.failed)
        failed.display = bool(page.failed)
        self.query_one("#text", Static).update(painted(page.lines))
        if page.view != before.view:
            self.query_one("#body").scroll_home(animate=False)
        self.shown = page
        self._redrawn.set()


def show(desk: Desk) -> None:
    """Until `q`."""
    app = MonitorApp(desk)
    app.run()
    app.rest()


def painted(lines: tuple[str, ...]) -> Text:
    """With colours, which only repeat what the text says."""
    out = Text(no_wrap=True, overflow="ignore", end="")
    for line in lines:
        shown = Text(line, end="")
        for pattern, style in STYLES:
            shown.highlight_regex(re.compile(pattern), style)
        out.append_text(shown)
        out.append("\n")
    return out
