"""What a slow disk and insistent peers may cost: memory is bounded, nobody is blamed for what could not be heard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from buffer.client import BufferClient, Refused
from buffer.codec import encode
from buffer.intake import MAX_HELD_REPLIES, MAX_STAGED_BYTES, Intake
from buffer.parking import Parking
from buffer.peers import Peer
from buffer.run_state import Now
from buffer.schema import Turn
from buffer.server import BufferServer
from buffer.service import PARKED, Request
from buffer.storage import Storage, Unit
from buffer.transport import MAX_LARGE_REPLIES
from buffer.wire import BODIES, MAX_REQUEST_BODY_BYTES, TakeRequest, pack_head
from tests.buffers import RUN, Peers, problem, serving, settings, turn


def test_the_gate_shuts_at_either_bound_and_tells_for_how_long() -> None:
    intake = Intake()
    assert intake.is_open(MAX_STAGED_BYTES - 1, MAX_HELD_REPLIES - 1, 1.0)
    assert not intake.is_open(MAX_STAGED_BYTES, 0, 2.0)
    assert not intake.is_open(0, MAX_HELD_REPLIES, 3.0)
    assert intake.shut_s(5.0) == 3.0
    assert intake.is_open(0, 0, 6.0)
    assert intake.shut_s(7.0) == 0.0


FLOOD = MAX_HELD_REPLIES + 300


class Disk:
    """One whose commits hang while it is told to."""

    def __init__(self) -> None:
        self.works, self.hangs = threading.Event(), threading.Event()
        self._commit = Storage.commit
        self.works.set()

    def commit(self, storage: Storage, unit: Unit) -> None:
        if not self.works.is_set():
            self.hangs.set()
        assert self.works.wait(30.0)
        self._commit(storage, unit)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(Storage, "commit", lambda storage, unit: disk.commit(storage, unit))
    yield disk
    disk.works.set()


async def beat(engine: BufferClient) -> None:
    while True:
        await engine.heartbeat({})
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_while_the_disk_hangs_a_flood_is_left_in_the_sockets_and_nobody_counts_as_silent(
    tmp_path: Path, disk: Disk
) -> None:
    server = BufferServer(settings(heartbeat_s=0.05, dead_after_s=3.0), tmp_path, RUN, problem)
    peers = Peers(await server.start())
    await peers.learner()
    engine = await peers.engine("rollout-0")
    (lease,) = await engine.lease(1, 0, 1.0)
    disk.works.clear()
    pushing = asyncio.create_task(engine.push_turn(turn(lease, 0)))
    beating = asyncio.create_task(beat(engine))
    assert await asyncio.to_thread(disk.hangs.wait, 10.0)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(peers.endpoint)
    for _ in range(FLOOD):
        await socket.send_multipart([pack_head("status", 1, 0, RUN), b"\xc0"])
    async with asyncio.timeout(20.0):
        while len(server._replies) < MAX_HELD_REPLIES:  # noqa: ASYNC110 - of the server's own loop, which this is
            await asyncio.sleep(0.01)
    await asyncio.sleep(4.0)  # beyond the time after which a silent peer is dead
    assert len(server._replies) == MAX_HELD_REPLIES
    disk.works.set()
    await pushing
    for _ in range(FLOOD):
        await asyncio.wait_for(socket.recv_multipart(), 10.0)
    assert (await engine.status())["peers"]["rollout-0"]["state"] == "alive"
    assert not beating.done()
    beating.cancel()
    await asyncio.wait([beating])
    socket.close()
    context.term()
    await peers.close()
    await server.stop()


async def test_a_peer_that_never_reads_what_it_fetches_loses_replies_and_others_get_theirs(tmp_path: Path) -> None:
    server = BufferServer(settings(), tmp_path, RUN, problem)
    peers = Peers(await server.start())
    learner = await peers.learner()
    engine = await peers.engine("rollout-0")
    (lease,) = await engine.lease(1, 0, 1.0)
    await engine.push_turn(turn(lease, 0, num_tokens=100_000))
    key = (lease.group, lease.rollout)
    body, _ = encode(BODIES["fetch"][0], (key,))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.ROUTING_ID, b"rollout-0\0never reads")):
        socket.setsockopt(option, value)
    socket.connect(peers.endpoint)
    lost = seq = 0
    async with asyncio.timeout(60.0):
        while not lost:
            await socket.send_multipart([pack_head("fetch", seq, engine.epoch, RUN), body])
            (trajectory,) = await learner.fetch([key])
            assert trajectory.sampled.sum() == 100_000
            lost = (await learner.status())["buffer"]["counters"].get("replies_lost", 0)
            seq += 1
    assert MAX_LARGE_REPLIES <= seq < 4 * MAX_LARGE_REPLIES
    assert [len(unread) for unread in server._router._unread.values() if len(unread) > 1] == [MAX_LARGE_REPLIES]
    socket.close()
    context.term()
    await peers.close()
    await server.stop()


def request(seq: int, wait_s: float) -> Request:
    peer = Peer(name="learner-0", role="learner", epoch=1, life="a life")
    return Request("take", seq, TakeRequest(step=0, wait_s=wait_s), [], peer)


def test_a_request_sent_again_while_it_waits_keeps_its_place_and_its_deadline() -> None:
    """So that it takes one timer, however often it comes."""
    parking = Parking()
    assert parking.park(request(7, 5.0), b"a", Now(0.0, 0.0)) == 5.0
    for now_s in (1.0, 4.0):
        assert parking.park(request(7, 5.0), b"b", Now(now_s, 0.0)) is None
    assert len(parking) == 1
    assert parking.ask(Now(4.9, 0.0), lambda *_: PARKED) == []
    ((parked, value),) = parking.ask(Now(5.0, 0.0), lambda *_: PARKED)
    assert (parked.route, value, len(parking)) == (b"b", None, 0)


def test_a_peer_may_have_so_many_requests_waiting() -> None:
    parking = Parking()
    for seq in range(32):
        parking.park(request(seq, 5.0), b"a", Now(0.0, 0.0))
    with pytest.raises(Exception, match="32 requests are waiting already"):
        parking.park(request(32, 5.0), b"a", Now(0.0, 0.0))


async def test_messages_of_another_run_or_without_measure_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        (lease,) = await engine.lease(1, 0, 1.0)
        vast: Turn = turn(lease, 0, observation="x" * (MAX_REQUEST_BODY_BYTES + 1))
        with pytest.raises(Refused, match=f"too_large: body of .* exceeds {MAX_REQUEST_BODY_BYTES}"):
            await engine.push_turn(vast)
        engine.run = "another"
        with pytest.raises(Refused, match="wrong_run: run 'another' is not 'run-1'"):
            await engine.push_turn(turn(lease, 0))
        engine.run = RUN
        counters = (await engine.status())["buffer"]["counters"]
        assert (counters["refused/too_large"], counters["refused/wrong_run"]) == (1, 1)
