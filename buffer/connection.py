"""A peer's end of the wire: sends requests until each is answered, over reconnections and restarts of the buffer.

Consumes    pending requests
Produces    (ack | nack, reply frames) for each
Waits for   replies; after a reconnection everything unanswered is sent again at once; where no reply comes for
            `RESEND_S`, the address is resolved again; a request is sent again on the same connection after silences
            that double, since a buffer that is slow would only get slower
Invariant   requests that are sent again together go in the order they were made
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from buffer.codec import decode, encode
from buffer.doors import Keys, present
from buffer.wire import NACK, Reason, Refusal, read_head

RESOLVE_TIMEOUT_S = 10.0
_ORDERED = ("turn", "finish")
RESEND_S = 2.0
"""silence on a request (a long poll: beyond its own wait) after which it is sent again for the first time"""
MAX_RESEND_S = 32.0


@dataclass(slots=True)
class Pending:
    """A request without its answer yet."""

    kind: str
    seq: int
    frames: list[bytes]
    wait_s: float
    sent_s: float = 0.0
    resend_s: float = field(default_factory=lambda: RESEND_S)
    """silence after which it is sent again"""
    reply: asyncio.Future[tuple[str, list[bytes]]] = field(default_factory=lambda: asyncio.Future())


class Connection:
    """One DEALER socket at a time, to wherever the buffer is."""

    def __init__(self, resolve: Callable[[], Awaitable[str]], name: str, keys: Keys | None = None) -> None:
        self._resolve, self._name, self._keys = resolve, name, keys
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[int, Pending] = {}
        self._buffer_life = 0
        self._lock = asyncio.Lock()
        self.endpoint = "(not resolved yet)"
        self.renew()

    def renew(self) -> None:
        """A new life of the peer: its routing id changes with it."""
        self.life = secrets.token_hex(8)
        self._drop_socket()

    async def exchange(self, pending: Pending) -> tuple[str, list[bytes]]:
        """The reply to a request."""
        self._pending[pending.seq] = pending
        try:
            if self._socket is None:
                await self._open()
            else:
                await self._send(pending)
            return await pending.reply
        finally:
            self._pending.pop(pending.seq, None)

    async def _open(self) -> None:
        """Connect to the address of now, and send everything unanswered."""
        async with self._lock:
            if self._socket is not None:
                return
            endpoint = await self._where()
            while endpoint is None:  # until the request's own deadline
                endpoint = (await asyncio.gather(self._where(), asyncio.sleep(RESEND_S / 4)))[0]
            self.endpoint = endpoint
            socket = self._context.socket(zmq.DEALER)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, 0),
                (zmq.RECONNECT_IVL, 50),
                (zmq.RECONNECT_IVL_MAX, 500),
                (zmq.HEARTBEAT_IVL, 2000),
                (zmq.HEARTBEAT_TIMEOUT, 10000),
            ):
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.ROUTING_ID, f"{self._name}\0{self.life}".encode())
            present(socket, self._keys)
            self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(self.endpoint)
            self._socket = socket
            works = (self._receive(socket), self._watch(), self._reconnected(self._monitor))
            self._tasks = [asyncio.create_task(work) for work in works]
        await self._send_all()

    async def _where(self) -> str | None:
        """The buffer's address, or None while it can't be told; `resolve` is foreign code and may fail in any way."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                return await self._resolve()
        except Exception as error:
            self.endpoint = f"(not resolved: {type(error).__name__}: {error})"
            return None

    async def _send(self, pending: Pending) -> None:
        pending.sent_s = time.monotonic()
        if self._socket is not None:
            await self._socket.send_multipart(pending.frames)

    async def _send_all(self) -> None:
        """On a new connection: what is unanswered can't have arrived there."""
        for pending in sorted(self._pending.values(), key=lambda one: one.seq):
            if not pending.reply.done():
                pending.resend_s = RESEND_S
                await self._send(pending)

    async def _send_silent(self, now_s: float) -> None:
        """What has gone unanswered for its time; next time it will be given twice that."""
        for pending in sorted(self._pending.values(), key=lambda one: one.seq):
            if not pending.reply.done() and _silent_s(pending, now_s) > pending.resend_s:
                pending.resend_s = min(2 * pending.resend_s, MAX_RESEND_S)
                await self._send(pending)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                head = read_head(frames[0])
            except Refusal as refusal:
                self._refuse_all(refusal)
                continue
            pending = self._pending.get(head.seq)
            if pending is not None and not pending.reply.done() and not self._overtook(pending, head.kind, frames):
                pending.reply.set_result((head.kind, frames[1:]))
            if head.epoch != self._buffer_life:
                known, self._buffer_life = self._buffer_life, head.epoch
                if known:  # the buffer was restarted: it has forgotten what waits
                    await self._send_all()

    def _refuse_all(self, refusal: Refusal) -> None:
        """Who answers is no buffer of this release: nothing that was asked will ever be answered there."""
        body, _ = encode(tuple[str, str], (str(refusal.reason), f"{self.endpoint} answers: {refusal.message}"))
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_result((NACK, [body]))

    async def _reconnected(self, monitor: zmq.asyncio.Socket) -> None:
        """What went into a connection that broke is lost: send it again on the next one."""
        await recv_monitor_message(monitor)
        while True:
            await recv_monitor_message(monitor)
            await self._send_all()

    def _overtook(self, pending: Pending, verdict: str, frames: list[bytes]) -> bool:
        """Refused as out of order only because an earlier request got lost: both are sent again, in order."""
        if verdict != NACK or pending.kind not in _ORDERED:
            return False
        earlier = any(p.seq < pending.seq and p.kind in _ORDERED for p in self._pending.values())
        return earlier and decode(tuple[str, str], frames[1])[0] == Reason.OUT_OF_ORDER

    async def _watch(self) -> None:
        """After a silence, look where the buffer is now and ask again."""
        while True:
            await asyncio.sleep(RESEND_S / 4)
            now_s = time.monotonic()
            if not any(_silent_s(p, now_s) > RESEND_S for p in self._pending.values()):
                continue
            known = self.endpoint
            endpoint = await self._where()
            if endpoint is None or endpoint == known:
                self.endpoint = known
                await self._send_silent(time.monotonic())
                await asyncio.sleep(RESEND_S * 3 / 4)  # to look is a request to somebody, too
            else:
                asyncio.get_running_loop().call_soon(self._reopen)
                return

    def _reopen(self) -> None:
        self._drop_socket()
        self._reopening = asyncio.create_task(self._open())

    def _drop_socket(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
        self._socket = None

    async def close(self) -> None:
        tasks = self._tasks
        self._drop_socket()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.term()


def _silent_s(pending: Pending, now_s: float) -> float:
    """How long its answer is overdue."""
    return now_s - pending.sent_s - pending.wait_s
