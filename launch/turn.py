"""`rocstar set RUN TABLE.KEY=VALUE`: turns a live dial of a running training.

Consumes    a run directory that somebody drives; one change as typed
Produces    the change, durable in the run's record; a line that says what holds from which step on
Waits for   the buffer's answer, at most ANSWER_S
Invariant   a change is checked like a recipe, with the dials that are turned already put over it, before it is sent;
            what is not live is refused with the reason
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer.client import BufferClient, PeerSilent, Refused
from buffer.wire import NEWEST, Turned, value_at
from launch.config import ConfigError, dials, live_dials, parse, read_toml, set_value
from launch.preflight import FIXED
from launch.reach import buffer_client, is_driven

ANSWER_S = 20.0
NAME = "monitor-set"


def turn(directory: Path, change: str) -> str:
    """Does it.

    Raises:
        ConfigError: not live, not a value it may have, nobody drives the run, the buffer does not answer.
    """
    name = change.partition("=")[0].strip()
    stored = read_toml(directory / "recipe.toml")
    if name not in dials():
        parse(stored, [change], str(directory))  # says what it should have been
    _refuse_fixed(name, directory)
    if not is_driven(directory):
        raise ConfigError(f"{directory}: nobody drives this run; use `rocstar resume {directory} --set {change}`")
    client = buffer_client(directory, name=NAME, timeout_s=ANSWER_S)
    if client is None:
        raise ConfigError(f"{directory}: the run has no buffer yet; try again when it has started")
    return asyncio.run(_send(client, stored, change, name, directory))


def _refuse_fixed(name: str, directory: Path) -> None:
    if name in live_dials():
        return
    if name in FIXED or name.partition(".")[0] in FIXED or name == "roc.mode":
        raise ConfigError(f"{name} is fixed for a run: batches and tickets on record are of its size or order")
    raise ConfigError(
        f"{name} is not live, it is read once, when its role starts: stop the run and go on with `rocstar resume "
        f"{directory} --set ...`; live are {', '.join(live_dials())}"
    )


async def _send(client: BufferClient, stored: dict[str, Any], change: str, name: str, directory: Path) -> str:
    try:
        await client.connect()
        records = await client.dials()
        before = value_at(records, name, NEWEST)
        value = _checked(stored, records, change, name, str(directory))
        await client.set_dial(name, value)
        step = (await client.dials())[-1].step
        return f"{name} = {value:g} from step {step} on (was {'unknown' if before is None else f'{before:g}'})"
    except Refused as refused:
        raise ConfigError(refused.message) from refused
    except PeerSilent as silence:
        raise ConfigError(f"{directory}: {silence}") from silence
    finally:
        await client.close()


def _checked(stored: dict[str, Any], records: Sequence[Turned], change: str, name: str, source: str) -> float:
    """The value, once the whole tree holds with it and with what was turned before."""
    tree: dict[str, Any] = json.loads(json.dumps(stored, default=str))
    for dial in live_dials():
        turned = value_at(records, dial, NEWEST)
        if turned is not None and dial != name:
            set_value(tree, f"{dial}={int(turned) if turned == int(turned) else turned!r}")
    value: Any = parse(tree, [change], source)
    for part in name.split("."):
        value = getattr(value, part)
    return float(value)
