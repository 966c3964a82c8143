"""Bodies of roles among real neighbours, without Ray: how they begin and how they end."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.client import BufferClient
from launch import bodies
from launch.config import parse
from launch.roles import RoleSpec
from sandbox.server import SandboxServer
from tests.buffers import RUN, Peers, client, serving, settings
from tests.test_config import LEAST

pytestmark = pytest.mark.slow


class Door:
    """What a body says of itself, as the driver would hear it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def listening(self, endpoint: str) -> None:
        self.said.append("listening")

    def stage(self, name: str) -> None:
        self.said.append(name)


class Links:
    """One buffer at a fixed address."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def buffer_client(self, run: str, *, role: str, name: str) -> BufferClient:
        return client(self._endpoint, role, name)


@pytest.fixture
async def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    async with serving(tmp_path, settings()) as made:
        monkeypatch.setattr(bodies, "_links", lambda spec: Links(made.endpoint))
        yield made


def spec(directory: Path, role: str) -> RoleSpec:
    recipe = parse(LEAST, ["sandbox.workers=1", "buffer.heartbeat_s=0.1"], "r.toml").model_dump(mode="json")
    return RoleSpec(role=role, index=0, run=RUN, life="1", directory=str(directory), recipe=recipe)


async def until_alive(peers: Peers, name: str) -> None:
    monitor = await peers.join("monitor", "driver")
    async with asyncio.timeout(30.0):
        while not (await monitor.status())["peers"].get(name, {}).get("snapshot"):  # noqa: ASYNC110 - of a peer
            await asyncio.sleep(0.05)


def state(directory: Path, name: str) -> Any:
    with closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as index:
        return index.execute("SELECT state FROM peers WHERE name = ?", (name,)).fetchone()[0]


async def test_a_sandbox_that_is_told_to_stop_says_goodbye(tmp_path: Path, peers: Peers) -> None:
    door = Door()
    body = asyncio.create_task(bodies.sandbox(spec(tmp_path, "sandbox"), door))  # type: ignore[arg-type]
    await until_alive(peers, "sandbox-0")
    assert door.said == ["listening", "running"]
    body.cancel()
    await asyncio.wait({body})
    assert body.cancelled()
    assert state(tmp_path, "sandbox-0") == "gone"


async def test_a_sandbox_that_fails_does_not_say_goodbye(
    tmp_path: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = asyncio.create_task(bodies.sandbox(spec(tmp_path, "sandbox"), Door()))  # type: ignore[arg-type]
    await until_alive(peers, "sandbox-0")

    def broken(self: SandboxServer) -> dict[str, Any]:
        raise RuntimeError("its figures are lost")

    monkeypatch.setattr(SandboxServer, "snapshot", broken)
    with pytest.raises(RuntimeError, match="its figures are lost"):
        await asyncio.wait_for(body, 10.0)
    assert state(tmp_path, "sandbox-0") == "failed"
