"""Signals before the driver listens: what is imported and checked until then takes seconds.

Consumes    SIGINT, SIGTERM, SIGHUP
Produces    a line that says what is there, exit code 75
Waits for   nothing
Invariant   nothing of a run is started yet, so the process ends at once; the driver's handlers take the place of these
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 75
COMMANDS = ("run", "resume")


def listens(arguments: Sequence[str]) -> bool:
    """Whether this command line starts a run."""
    return next(iter(arguments), "") in COMMANDS


def listen(directory: Path | None = None) -> None:
    """From now on a signal ends this process with exit code 75; `directory` is the run's, once it exists."""
    words = told(directory)

    def end(number: int, frame: object) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"rocstar: {words}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    for number in SIGNALS:
        signal.signal(number, end)


def told(directory: Path | None) -> str:
    """What a person reads."""
    if directory is None:
        return "interrupted before anything was started"
    return f"interrupted before any role was started; go on with `rocstar resume {directory}`"
