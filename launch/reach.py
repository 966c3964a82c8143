"""How a command that is no role reaches a run that somebody else drives: through a file in the run's keys/.

Consumes    RUN/keys/buffer.json, which the driver writes and only its owner reads; RUN/keys/wire.json; RUN/driver.lock
Produces    a client of the buffer, with the run's keys where its wires have any; whether a driver works on the run
Waits for   nothing
Invariant   roles find each other through Ray (launch/links.py), never through this file; one that a dead run left
            behind leads nowhere, for a buffer of another run refuses
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from buffer.client import BufferClient
from buffer.doors import stored_keys
from launch.lock import is_held

SCHEMA = 1
"""Of buffer.json."""


def note(directory: Path, endpoint: str, *, guarded: bool) -> None:
    """Writes down where the buffer listens now, when that is news; `guarded`: it asks for the run's keys."""
    path = directory / "keys" / "buffer.json"
    text = json.dumps({"schema": SCHEMA, "endpoint": endpoint, "guarded": guarded}) + "\n"
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="ascii") == text:
            return
    scratch = path.with_name(".buffer.json.new")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(text)
    scratch.replace(path)


def buffer_client(directory: Path, *, name: str, timeout_s: float) -> BufferClient | None:
    """A client in the role of a monitor; None when nobody has written where the buffer is."""
    path = directory / "keys" / "buffer.json"
    if not path.is_file():
        return None
    guarded = json.loads(path.read_text(encoding="ascii"))["guarded"]
    run = json.loads((directory / "run.json").read_text(encoding="utf-8"))["run"]
    keys = stored_keys(directory / "keys" / "wire.json").for_clients() if guarded else None

    async def resolve() -> str:
        return str(json.loads(path.read_text(encoding="ascii"))["endpoint"])

    return BufferClient(resolve, run=run, role="monitor", name=name, request_timeout_s=timeout_s, keys=keys)


def is_driven(directory: Path) -> bool:
    """A driver holds the run's lock."""
    return is_held(directory / "driver.lock")
