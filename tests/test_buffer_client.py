"""A peer's end of the wire against something that is no buffer of this release, or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import pytest
import zmq
import zmq.asyncio

from buffer import connection
from buffer.client import PeerSilent, Refused
from buffer.schema import SCHEMA
from tests.buffers import RUN, client


@asynccontextmanager
async def router() -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A socket that a client takes for a buffer, and its address."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        socket.close()
        context.term()


async def test_a_buffer_of_another_schema_is_named_at_once() -> None:
    async with router() as (socket, endpoint):
        peer = client(endpoint, "rollout", "rollout-0")
        connecting = asyncio.create_task(peer.connect())
        route, *_ = await socket.recv_multipart()
        await socket.send_multipart([route, msgpack.packb((SCHEMA + 1, "nack", -1, 1, RUN)), b""])
        words = f"wrong_schema: {endpoint} answers: schema {SCHEMA + 1} is not {SCHEMA}: both sides must be of one"
        with pytest.raises(Refused, match=words):
            await connecting
        await peer.close()


@pytest.mark.slow
async def test_what_goes_unanswered_is_sent_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RESEND_S", 0.04)
    async with router() as (socket, endpoint):
        peer = client(endpoint, "monitor", "monitor-0", request_timeout_s=2.0)
        with pytest.raises(PeerSilent):
            await peer.status()
        await peer.close()
        count = 0
        while await socket.poll(100):
            await socket.recv_multipart()
            count += 1
    assert 2 <= count <= 7, "after 0.04, 0.08, 0.16, ... seconds: with equal steps it would be about 40 times"
