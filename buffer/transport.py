"""The buffer's ROUTER socket: frames in, frames out, bounded, never blocking.

Consumes    frames of any peer, whatever they are
Produces    (route, frames) one at a time; replies by route
Waits for   nothing: `receive` and `send` return at once; the loop waits on `fileno`
Invariant   memory is bounded per peer by the high-water marks, MAX_MESSAGE_BYTES and MAX_LARGE_REPLIES; a peer that
            does not read loses replies (it asks again), and never stops the buffer. High-water marks are a safety net
            here: what paces peers is their window of unacknowledged requests
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from buffer.doors import DoorError, Keys, guard
from buffer.wire import MAX_MESSAGE_BYTES

RECEIVE_MESSAGES = 32
SEND_MESSAGES = 512
LARGE_BYTES = 64 << 10
MAX_LARGE_REPLIES = 32
"""of LARGE_BYTES or more that a peer may have unread"""
_LINGER_MS = 500


class Router:
    """A bound ROUTER socket with its own context."""

    def __init__(self, bind: str, keys: Keys | None = None) -> None:
        """Listen on `bind`; port 0 chooses a free one, see `endpoint`.

        Raises:
            DoorError: it is beyond loopback, and there are no keys.
            OSError: the address can't be bound; the message names it.
        """
        self._unread: dict[bytes, list[zmq.MessageTracker]] = {}
        """large replies by route that are not on their way yet"""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RCVHWM, RECEIVE_MESSAGES),
            (zmq.SNDHWM, SEND_MESSAGES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            self._socket.setsockopt(option, value)
        try:
            guard(self._socket, bind, keys)
            self._socket.bind(bind)
        except DoorError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                error.errno, f"{bind} can't be bound: {error.strerror}; choose another buffer.port"
            ) from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.fileno = int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message, or None. After any `send`, receive until None before waiting on `fileno` again."""
        try:
            route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return route, frames

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Whether the reply went into the peer's queue; else it is gone or does not read."""
        large = len(frames[-1]) >= LARGE_BYTES
        if large:
            left = {route: [one for one in some if not one.done] for route, some in self._unread.items()}
            self._unread = {route: some for route, some in left.items() if some}
            if len(self._unread.get(route, ())) >= MAX_LARGE_REPLIES:
                return False
        try:
            sent = self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=not large, track=large)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        if sent is not None:
            self._unread.setdefault(route, []).append(sent)
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()
