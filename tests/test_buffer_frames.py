"""The buffer among hostile and broken peers: a real process, random frames, floods."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from buffer.codec import encode
from buffer.schema import Lease, Turn
from buffer.wire import ACK, BODIES, NACK, pack_head, read_head
from tests.buffers import RUN, Maker, Peers, problem, turn
from tests.records import values

pytestmark = pytest.mark.slow

ENDING = ("bye", "failed")
"""kinds that end the peer's life"""


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def hostile(dice: random.Random, epoch: int) -> list[bytes]:
    """A message that is random, or nearly right."""
    one = encode(Turn, turn(Lease(**_LEASE), 0))
    good = [pack_head(dice.choice(["turn", "finish", "lease", "take", "x"]), 1, epoch, RUN), *one]
    choice = dice.randrange(7)
    if choice == 0:
        return [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 5))]
    if choice == 1:
        return [pack_head("turn", 1, epoch, "another run"), *one]
    if choice == 2:
        return [msgpack.packb((9, "turn", 1, epoch, RUN)), *one]
    if choice == 3:
        return good[: dice.randrange(1, 4)]
    at = dice.randrange(3)
    if choice == 4:
        good[at] = good[at][: dice.randrange(len(good[at]))]
        return good
    frame = bytearray(good[at])
    frame[dice.randrange(len(frame))] = dice.randrange(256)
    good[at] = bytes(frame)
    return good


_LEASE: dict[str, Any] = {
    "group": 0,
    "rollout": 0,
    "attempt": 1,
    "kind": "train",
    "base": 0,
    "deadline": 1,
    "seed": 1,
    "problem": problem(0),
}


async def test_random_frames_are_refused_counted_and_leave_no_memory_behind(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer(dead_after_s=600.0)  # the engine says nothing while the frames come
    peers = Peers(await buffer.start())
    await peers.learner()
    engine = await peers.engine("rollout-0")
    dice = random.Random(7)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, b"rollout-0\0someone else")
    socket.connect(peers.endpoint)
    before = 0.0
    for number in range(2000):
        for _ in range(50):
            await socket.send_multipart(hostile(dice, engine.epoch))
        for _ in range(50):
            await socket.recv_multipart()
        if number == 100:
            before = rss_mib(buffer.child.pid)
    assert rss_mib(buffer.child.pid) - before < 20
    counters = (await engine.status())["buffer"]["counters"]
    refused = {key.split("/")[1]: count for key, count in counters.items() if key.startswith("refused/")}
    assert set(refused) >= {"malformed", "wrong_run", "wrong_schema", "unknown_kind", "fenced"}
    assert sum(refused.values()) > 90_000
    assert len(await engine.lease(100, 0, 1.0)) > 0
    socket.close()
    context.term()
    await peers.close()
    await buffer.kill()


async def test_a_peer_that_floods_and_never_reads_stops_nobody(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer()
    peers = Peers(await buffer.start())
    await peers.learner()
    engine = await peers.engine("rollout-0")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.SNDHWM, 100)):
        socket.setsockopt(option, value)
    socket.connect(peers.endpoint)
    sent = num_lost = 0
    async with asyncio.timeout(120):
        while sent <= 500 or not num_lost:
            for _ in range(100):
                try:
                    socket.send_multipart([pack_head("status", 1, 0, RUN), b"\xc0"], zmq.NOBLOCK)
                    sent += 1
                except zmq.Again:
                    break
            async with asyncio.timeout(30):
                await engine.heartbeat({})
            num_lost = (await engine.status())["buffer"]["counters"].get("replies_lost", 0)
    assert rss_mib(buffer.child.pid) < 200
    socket.close()
    context.term()
    await peers.close()
    await buffer.kill()


def dealer(context: zmq.Context[Any], endpoint: str, route: bytes) -> zmq.Socket[Any]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, route)
    socket.connect(endpoint)
    return socket


def told(socket: zmq.Socket[Any]) -> Counter[str]:
    """Replies that are there, by kind: ack, or the reason of a nack."""
    out: Counter[str] = Counter()
    while socket.poll(0):
        head, body, *_ = socket.recv_multipart()
        out[msgpack.unpackb(body)[0] if read_head(head).kind == NACK else ACK] += 1
    return out


MESSAGES = st.one_of(
    *(st.tuples(st.just(kind), values(body)) for kind, (body, _) in BODIES.items() if kind not in ENDING)
)


async def test_ten_thousand_well_formed_messages_of_any_content_do_no_harm(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer(dead_after_s=600.0)
    peers = Peers(await buffer.start())
    speakers = {"learner-0": await peers.learner(), "rollout-0": await peers.engine("rollout-0")}
    speakers["filter-0"] = await peers.join("filter", "filter-0")
    await speakers["rollout-0"].lease(4, 0, 1.0)
    context: zmq.Context[Any] = zmq.Context()
    sockets = {name: dealer(context, peers.endpoint, f"{name}\0someone else".encode()) for name in speakers}
    replies: Counter[str] = Counter()
    sent, before = 0, rss_mib(buffer.child.pid)

    @examples(max_examples=10_000, deadline=None, database=None, phases=[Phase.generate])
    @given(st.sampled_from(sorted(sockets)), MESSAGES)
    def law(name: str, message: tuple[str, Any]) -> None:
        nonlocal sent
        kind, value = message
        frames = encode(BODIES[kind][0], value)
        sockets[name].send_multipart([pack_head(kind, sent, speakers[name].epoch, RUN), *frames])
        sent += 1
        if sent % 50 == 0:
            replies.update(told(sockets[name]))

    await asyncio.to_thread(law)
    assert sent >= 10_000
    counters = (await peers.join("monitor", "monitor-0")).status
    refused = {
        key: count for key, count in (await counters())["buffer"]["counters"].items() if key.startswith("refused/")
    }
    for socket in sockets.values():
        replies.update(told(socket))
    assert {f"refused/{reason}": count for reason, count in replies.items() if reason != ACK} == refused
    assert replies[ACK] > 500
    assert rss_mib(buffer.child.pid) - before < 20
    for socket in sockets.values():
        socket.close()
    context.term()
    await peers.close()
