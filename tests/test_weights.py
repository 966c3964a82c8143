"""Versions on their way to an engine: staging, and what each kind of device needs."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest
import torch
import zmq
import zmq.asyncio

from actors import platform
from actors.engine import Engine
from actors.settings import RolloutSettings, WeightsSettings
from actors.version_follower import VersionFollower
from actors.weights import BUCKETS_AHEAD, Staged, WeightClient, WeightsError
from buffer.meters import Meters
from buffer.schema import Loaded, WeightsManifest
from learner.weights import Packed, WeightServer, pack


def test_a_staged_version_has_no_name_that_could_be_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    manifest = WeightsManifest(lineage=1, version=2, bucket_bytes=(3, 4), bucket_crc32=(0, 0), tensors=(), checksum=0)
    with Staged.create(manifest) as staged:
        staged.write(1, b"defg")
        staged.write(0, memoryview(b"abc"))
        assert set(os.listdir("/dev/shm")) == before
        path = staged.path
        with open(path, "rb") as file:
            assert file.read() == b"abcdefg"
    assert not os.path.exists(path)


def test_the_plan_for_each_device_can_be_read_without_it() -> None:
    cpu = platform.environment("cpu", RolloutSettings(cpu_threads=3))
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1"
    rocm = platform.environment("rocm", RolloutSettings())
    assert rocm["VLLM_ROCM_USE_AITER"] == "0"
    assert "ROCR_VISIBLE_DEVICES" not in rocm
    assert "TORCHDYNAMO_DISABLE" not in rocm
    assert platform.engine_arguments("rocm", RolloutSettings()) == {}
    two = platform.engine_arguments("cpu", RolloutSettings(tensor_parallel=2, kv_cache_mib=8))
    assert two["distributed_executor_backend"] == "mp"
    assert two["kv_cache_memory_bytes"] == 8 << 20
    mine = {"OMP_NUM_THREADS": "7"}
    platform.apply(cpu, mine)
    assert mine["OMP_NUM_THREADS"] == "7"


def packed(lineage: int, version: int, fill: float = 1.0) -> Packed:
    """Three tensors in buckets of 1000 bytes."""
    shapes = {"a": (40, 10), "b": (7,), "c": (600,)}
    tensors = ((name, torch.full(shape, fill)) for name, shape in shapes.items())
    return pack(tensors, lineage=lineage, version=version, bucket_bytes=1000)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    made = WeightServer()
    yield made
    made.close()
    assert made.failure is None


@pytest.fixture
async def client(server: WeightServer) -> AsyncIterator[WeightClient]:
    async def resolve() -> str:
        return server.endpoint

    made = WeightClient(resolve, answer_timeout_s=5.0)
    yield made
    made.close()


def content(staged: Staged) -> bytes:
    with open(staged.path, "rb") as file:
        return file.read()


async def test_a_published_version_arrives_whole(server: WeightServer, client: WeightClient) -> None:
    version = packed(1, 4)
    server.publish(version)
    manifest = await client.latest((-1, -1), wait_s=1.0)
    assert manifest == version.manifest
    assert manifest is not None
    assert len(manifest.bucket_bytes) > BUCKETS_AHEAD
    staged = await client.receive(manifest)
    assert staged is not None
    with staged:
        assert content(staged) == b"".join(version.buckets)


async def test_a_waiting_client_is_answered_by_the_publication(server: WeightServer, client: WeightClient) -> None:
    server.publish(packed(1, 4))
    asked = asyncio.create_task(client.latest((1, 4), wait_s=30.0))
    done, _ = await asyncio.wait({asked}, timeout=0.05)
    assert not done
    server.publish(packed(2, 4))
    manifest = await asked
    assert manifest is not None
    assert (manifest.lineage, manifest.version) == (2, 4)
    assert await client.latest((2, 4), wait_s=0.0) is None


async def test_a_version_replaced_meanwhile_is_gone_and_the_newer_one_can_be_had(
    server: WeightServer, client: WeightClient
) -> None:
    server.publish(packed(1, 4))
    old = await client.latest((-1, -1), wait_s=1.0)
    server.publish(packed(1, 5, fill=2.0))
    assert old is not None
    assert await client.receive(old) is None
    new = await client.latest((-1, -1), wait_s=1.0)
    assert new is not None
    staged = await client.receive(new)
    assert staged is not None
    staged.close()


async def test_bytes_that_differ_from_their_checksum_are_not_handed_on(
    server: WeightServer, client: WeightClient
) -> None:
    version = packed(1, 4)
    broken = (memoryview(bytes(len(version.buckets[0]))), *version.buckets[1:])
    server.publish(Packed(manifest=version.manifest, buckets=broken))
    manifest = await client.latest((-1, -1), wait_s=1.0)
    assert manifest is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsError, match=r"bucket 1 of 5 of version 1\.4: .* crc32"):
        await client.receive(manifest)
    client.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


class Ahead:
    """An engine that has a version of the learner's second life."""

    loaded = (2, 5)

    async def swap(self, staged: Staged) -> float:
        raise AssertionError(f"{staged.manifest.lineage}.{staged.manifest.version} was loaded")


async def test_a_version_of_a_life_of_the_learner_that_is_over_is_not_loaded(
    server: WeightServer, client: WeightClient
) -> None:
    refused, meters = asyncio.Event(), Meters("rollout", "rollout-0", 0.0)

    async def acknowledge(loaded: Loaded) -> None:
        raise AssertionError(f"{loaded} was acknowledged")

    def changed() -> None:
        if not follower.found and meters.snapshot(0.0)["counters"].get("weights_failed"):
            refused.set()

    follower = VersionFollower(
        cast(Engine, Ahead()), client, WeightsSettings(), meters, acknowledge=acknowledge, changed=changed
    )
    server.publish(packed(1, 6))
    following, told = asyncio.create_task(follower.run()), asyncio.create_task(refused.wait())
    await asyncio.wait([following, told], timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
    assert refused.is_set()
    assert not following.done()
    following.cancel()
    await asyncio.wait([following])


async def test_a_wait_for_the_servers_address_has_an_end_and_says_whose() -> None:
    async def resolve() -> str:
        await asyncio.Event().wait()
        raise AssertionError("nobody tells")

    client = WeightClient(resolve, answer_timeout_s=0.1)
    with pytest.raises(WeightsError, match=r"address was not told for 0\.1 s: is learner-0 running"):
        await client.latest((-1, -1), wait_s=0.0)
    client.close()


async def test_a_server_that_ends_is_left_at_once_and_its_successor_found() -> None:
    first, second = WeightServer("tcp://127.0.0.1:0"), WeightServer("tcp://127.0.0.1:0")
    endpoints = [first.endpoint, second.endpoint]

    async def resolve() -> str:
        return endpoints.pop(0)

    client = WeightClient(resolve)
    asking = asyncio.create_task(client.latest((-1, -1), wait_s=60.0))
    while not first.counts["requests"]:  # noqa: ASYNC110 - its own thread counts
        await asyncio.sleep(0.01)
    first.close()
    async with asyncio.timeout(10.0):
        with pytest.raises(WeightsError, match=r"hung up: whether there is a newer version"):
            await asking
        second.publish(packed(1, 0))
        assert await client.latest((-1, -1), wait_s=5.0) is not None
    client.close()
    second.close()


async def test_a_silent_server_is_named_and_its_successor_found(server: WeightServer) -> None:
    context = zmq.asyncio.Context()
    silent = context.socket(zmq.ROUTER)
    endpoints = [f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}", server.endpoint]

    async def resolve() -> str:
        return endpoints.pop(0)

    client = WeightClient(resolve, answer_timeout_s=0.2)
    with pytest.raises(WeightsError, match=r"tcp://127\.0\.0\.1:\d+ was silent for 0.2 s: whether there is"):
        await client.latest((-1, -1), wait_s=0.0)
    server.publish(packed(1, 0))
    assert await client.latest((-1, -1), wait_s=5.0) is not None
    client.close()
    silent.close(linger=0)
    context.term()
