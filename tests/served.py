"""Runs that grow under a page that is served: for the tests of the server and of the page.

Consumes    a directory; the recorded run
Produces    the run up to some step, live or not; a server of its own
Waits for   the server's thread
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.lock import hold
from launch.monitor.fixes import Fix
from launch.monitor.snapshot import Snapshot
from launch.monitor.web import Server
from tests.recorded import ROOT


def nothing(snapshot: Snapshot, fix: Fix) -> str:
    """Speaks against any fix."""
    return ""


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    with Server(directory, 0, None, nothing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def growing(target: Path, steps: int) -> None:
    """A recorded run of which so many steps are written, and nobody has said how it ended."""
    (target / "metrics").mkdir()
    for name in ("run.json", "recipe.toml"):
        (target / name).write_bytes((ROOT / "finished" / name).read_bytes())
    grow(target, steps)


def grow(target: Path, steps: int) -> None:
    """The run goes on to so many steps: what is new is appended to its files."""
    source = ROOT / "finished" / "metrics"
    until_s = next(
        (one["unix_s"] for one in lines(source / "run.jsonl") if one.get("next_step", 0) >= steps), float("inf")
    )
    for path in source.glob("*.jsonl"):
        by_step = path.stem == "steps"
        kept = [one for one in lines(path) if (one["step"] < steps if by_step else one["unix_s"] <= until_s)]
        copy = target / "metrics" / path.name
        written = len(copy.read_text().splitlines()) if copy.exists() else 0
        with copy.open("a") as file:
            file.writelines(f"{json.dumps(one)}\n" for one in kept[written:])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def live(run: Path) -> Iterator[None]:
    """Somebody drives the run."""
    held = hold(run / "driver.lock")
    assert held is not None
    with held:
        yield
