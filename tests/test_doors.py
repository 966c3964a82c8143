"""Doors beyond loopback: between two network namespaces, only holders of the run's keys get anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import zmq

from actors.weights import WeightClient, WeightsError
from buffer.client import PeerSilent
from buffer.doors import DoorError, Keys, beyond_loopback, guard, make_keys, stored_keys
from buffer.server import BufferServer
from launch.roles import RoleSpec
from learner.ranks import meeting_place
from learner.weights import WeightServer, pack
from sandbox.api import Status
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.buffers import RUN, client, problem, settings
from tests.hosts import NEEDS_ROOT, Host, Network, is_root

pytestmark = pytest.mark.slow

WAIT_S = 1.0
"""How long a peer that gets nothing is watched."""
PATIENCE_S = 20.0
GREETING_BYTES = 64
OURS = make_keys()
PEERS: dict[str, Keys | None] = {
    "without keys": None,
    "with another run's keys": make_keys(),
    "with our server's key and its own": replace(make_keys(), server_public=OURS.server_public),
    "with our key, expecting another server": replace(OURS, server_public=make_keys().server_public),
}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if not is_root():
        pytest.skip(NEEDS_ROOT)
    with Network("server", "peers") as network:
        yield network


@pytest.fixture
def there(network: Network) -> Iterator[Host]:
    """The host of servers; the test itself is on that of the peers."""
    with network["peers"].entered():
        yield network["server"]


async def outcomes(get: Callable[[Keys | None, float], Awaitable[bool]]) -> dict[str, bool]:
    """Whether each peer got something: the unwelcome ones at once, then one that belongs to the run."""
    got = await asyncio.gather(*(get(keys, WAIT_S) for keys in PEERS.values()))
    return dict(zip(PEERS, got, strict=True)) | {"of the run": await get(OURS.for_clients(), PATIENCE_S)}


EXPECTED = dict.fromkeys(PEERS, False) | {"of the run": True}


async def test_the_buffer_answers_those_of_its_run_alone(there: Host, tmp_path: Path) -> None:
    with there.entered():
        server = BufferServer(settings(), tmp_path, RUN, problem)
        endpoint = await server.start(f"tcp://{there.address}:0", OURS)

    async def get(keys: Keys | None, wait_s: float) -> bool:
        peer = client(endpoint, "monitor", "monitor-0", keys=keys, request_timeout_s=wait_s)
        try:
            return bool((await peer.status())["run"] == RUN)
        except PeerSilent:
            return False
        finally:
            await peer.close()

    assert await outcomes(get) == EXPECTED
    await server.stop()
    assert "door" not in {thread.name for thread in threading.enumerate()}


async def test_weights_go_to_those_of_the_run_alone(there: Host) -> None:
    with there.entered():
        server = WeightServer(f"tcp://{there.address}:0", OURS)
    version = pack([("a", torch.ones(100))], lineage=1, version=3, bucket_bytes=64)
    server.publish(version)

    async def resolve() -> str:
        return server.endpoint

    async def get(keys: Keys | None, wait_s: float) -> bool:
        peer = WeightClient(resolve, answer_timeout_s=wait_s, keys=keys)
        try:
            manifest = await peer.latest((-1, -1), wait_s=0.0)
            assert manifest is not None
            staged = await peer.receive(manifest)
            assert staged is not None
            staged.close()
            return manifest.version == 3
        except WeightsError:
            return False
        finally:
            peer.close()

    assert await outcomes(get) == EXPECTED
    assert server.counts["requests"] == 1 + len(version.buckets)
    server.close()


async def test_the_sandbox_runs_the_programs_of_its_run_alone(there: Host) -> None:
    server = SandboxServer(SandboxSettings(workers=1, spare=False))
    with there.entered():
        endpoint = await server.start(f"tcp://{there.address}:0", keys=OURS)

    async def get(keys: Keys | None, wait_s: float) -> bool:
        with zmq.Context() as context:
            peer = SandboxClient([endpoint], timeout_s=wait_s, keys=keys, context=context)
            result = await peer.run("print(6 * 7)")
            await peer.close()
        assert result.stdout == "42\n" or result.status is Status.WORKER_LOST
        return result.stdout == "42\n"

    assert await outcomes(get) == EXPECTED
    assert server.snapshot()["calls"] == 1
    await server.stop()


async def test_a_peer_that_speaks_no_curve_gets_a_greeting_and_no_more(there: Host) -> None:
    with there.entered():
        server = WeightServer(f"tcp://{there.address}:0", OURS)
    port = int(server.endpoint.rpartition(":")[2])
    reader, writer = await asyncio.open_connection(there.address, port)
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00")
    got = await asyncio.wait_for(reader.readexactly(GREETING_BYTES), PATIENCE_S)
    assert got[12:32].rstrip(bytes(1)) == b"CURVE"
    writer.write(b"NULL" + bytes(48) + b"\x04\x05READY" * 1000)
    with contextlib.suppress(ConnectionResetError):  # one way of being hung up on
        async with asyncio.timeout(PATIENCE_S):
            while some := await reader.read(1 << 16):
                got += some
    assert len(got) == GREETING_BYTES
    writer.close()
    server.close()


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.77.0.2:0", "tcp://127.evil.example:0"])
async def test_listening_beyond_loopback_without_keys_is_refused(bind: str, tmp_path: Path) -> None:
    refusal = "listens beyond loopback: give it the run's CURVE keys"
    buffer = BufferServer(settings(), tmp_path, RUN, problem)
    with pytest.raises(DoorError, match=refusal):
        await buffer.start(bind)
    with pytest.raises(DoorError, match=refusal):
        WeightServer(bind)
    with pytest.raises(DoorError, match=refusal):
        await SandboxServer(SandboxSettings(workers=1)).start(bind)
    with pytest.raises(DoorError, match="for those who connect"):
        WeightServer(bind, OURS.for_clients())


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:0", "tcp://127.9.9.9:7", "tcp://localhost:1", "tcp://[::1]:0", "ipc://x"]
)
def test_loopback_needs_no_keys(bind: str) -> None:
    assert not beyond_loopback(bind)


def test_the_learners_ranks_meet_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with ThreadPoolExecutor(2) as pool:
        wait = timedelta(seconds=PATIENCE_S)
        first, second = pool.map(lambda rank: meeting_place(rank, 2, wait), range(2))
    second.set("said", "here")
    assert first.get("said") == b"here"
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_context_guards_one_socket() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as first, context.socket(zmq.ROUTER) as second:
        guard(first, "tcp://127.0.0.1:0", OURS)
        with pytest.raises(DoorError, match="give each one of its own"):
            guard(second, "tcp://127.0.0.1:0", OURS)


def test_the_key_file_is_its_owners_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    keys = stored_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert stored_keys(path) == keys
    assert [file.name for file in tmp_path.iterdir()] == ["wire.json"]
    path.chmod(0o640)
    with pytest.raises(DoorError, match="mode 640 lets others read"):
        stored_keys(path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", "half", "swapped", "later"])
def test_a_file_without_whole_keys_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    stored_keys(path)
    text = path.read_text()
    record = json.loads(text)
    made = {
        "half": text[: len(text) // 2],
        "swapped": json.dumps(record | {"client_secret": record["server_secret"]}),
        "later": json.dumps(record | {"schema": 2}),
    }
    path.write_text(made.get(damage, damage))
    with pytest.raises(DoorError, match="holds no keys of schema 1: remove the file"):
        stored_keys(path)


def test_secrets_are_in_no_text_about_keys_or_roles() -> None:
    spec = RoleSpec(role="buffer", index=0, run="r", life="l", directory="/d", recipe={}, keys=asdict(OURS))
    assert spec.wire_keys == OURS
    for secret in (OURS.server_secret, OURS.client_secret):
        assert secret not in repr(OURS) + repr(spec)
    assert OURS.for_clients().server_secret == ""
