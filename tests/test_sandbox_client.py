"""The client and its nodes: several of them, none, one that is slow to be found; the same id twice; keys."""

# ruff: noqa: ASYNC110 - what is waited for happens in other processes

from __future__ import annotations

import asyncio

import pytest

from buffer.doors import make_keys
from sandbox import client as sandbox_client
from sandbox import node as sandbox_node
from sandbox.api import Status
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings

pytestmark = pytest.mark.slow


@pytest.fixture
async def server() -> object:
    server = SandboxServer(SandboxSettings(workers=2, wall_s=2.0, queue_bound=50))
    endpoint = await server.start()
    yield server, endpoint
    await server.stop()


async def test_with_two_nodes_the_death_of_one_costs_nothing() -> None:
    nodes = [SandboxServer(SandboxSettings(workers=1)) for _ in range(2)]
    endpoints = [await node.start() for node in nodes]
    client = SandboxClient(lambda: endpoints)
    await asyncio.gather(*(client.run("1") for _ in range(20)))
    calls = [asyncio.ensure_future(client.run(f"print({n})")) for n in range(150)]
    while sum(call.done() for call in calls) < 30:
        await asyncio.sleep(0.005)
    assert all(node.snapshot()["calls"] > 5 for node in nodes), "both work"
    await nodes[0].stop()
    results = await asyncio.gather(*calls)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(150)]
    await client.close()
    await nodes[1].stop()


async def test_without_a_node_a_call_ends_at_its_deadline_with_the_reason() -> None:
    client = SandboxClient(["tcp://127.0.0.1:9"], timeout_s=0.3)
    result = await client.run("1")
    assert result.status is Status.WORKER_LOST
    assert "no answer within 0.3 s (tcp://127.0.0.1:9 silent" in result.exception
    await client.close()


async def test_a_wait_for_the_nodes_addresses_has_an_end_and_a_name(
    server: tuple[SandboxServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked once in vain, once more by way of an error, then told."""
    monkeypatch.setattr(sandbox_client, "RESOLVE_TIMEOUT_S", 0.2)
    asked: list[int] = []

    async def resolve() -> list[str]:
        asked.append(len(asked))
        if len(asked) == 1:
            await asyncio.Event().wait()
        if len(asked) == 2:
            raise OSError("no route")
        return [server[1]]

    client = SandboxClient(resolve, timeout_s=0.5)
    lost = await client.run("1")
    assert "no node is known; their addresses were not told within 0.2 s" in lost.exception
    assert (await client.run("print(6)", timeout_s=20.0)).stdout == "6\n"
    assert asked[:3] == [0, 1, 2]
    await client.close()


async def test_the_tick_goes_on_while_addresses_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that falls silent is found although nobody tells where the nodes are."""
    monkeypatch.setattr(sandbox_node, "SILENT_S", 1.5)
    monkeypatch.setattr(sandbox_client, "_RESOLVE_EVERY", 1)
    node = SandboxServer(SandboxSettings(workers=1))
    endpoint, hang = await node.start(), False

    async def resolve() -> list[str]:
        if hang:
            await asyncio.Event().wait()
        return [endpoint]

    client = SandboxClient(resolve)
    assert (await client.run("print(1)")).stdout == "1\n"
    hang = True
    await node.stop()
    result = await client.run("print(2)", timeout_s=4.0)
    assert "silent for" in result.exception
    await client.close()


async def test_the_same_id_is_run_once(server: tuple[SandboxServer, str]) -> None:
    node, endpoint = server
    client = SandboxClient([endpoint])
    await client.run("1")
    (peer,) = client._nodes.values()
    call = asyncio.ensure_future(client.run("import time; time.sleep(0.3); print(1)"))
    await asyncio.sleep(0.05)
    (request,) = client._requests.values()
    peer.submit(request.id, request.kind, request.fields)
    peer.flush()
    assert (await call).stdout == "1\n"
    assert node.snapshot()["calls"] == 2
    await client.close()


async def test_a_bind_beyond_loopback_needs_keys() -> None:
    with pytest.raises(ValueError, match="CURVE"):
        await SandboxServer(SandboxSettings(workers=1)).start("tcp://0.0.0.0:0")


async def test_with_keys_only_their_owner_gets_in() -> None:
    keys = make_keys()
    server = SandboxServer(SandboxSettings(workers=1))
    endpoint = await server.start("tcp://127.0.0.1:0", keys=keys)
    friend = SandboxClient([endpoint], keys=keys.for_clients())
    stranger = SandboxClient([endpoint], timeout_s=0.5)
    assert (await friend.run("print(1)")).stdout == "1\n"
    assert (await stranger.run("print(1)")).status is Status.WORKER_LOST
    await asyncio.gather(friend.close(), stranger.close())
    await server.stop()
