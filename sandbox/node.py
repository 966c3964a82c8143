"""A sandbox node, as a client sees it: its socket, its window, what it has in flight.

Consumes    requests to send; the node's messages
Produces    outcomes
Waits for   WELCOME, and a sign of life every few seconds while something is in flight
Unblocked by SILENT_S without one: the socket is made anew and the requests go elsewhere
Invariant   at most `window` requests in flight
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq

from buffer.doors import Keys, present
from sandbox import wire
from sandbox.api import Result, Verdict

SILENT_S = 6.0


class Node:
    """One node."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        tenant: str,
        keys: Keys | None,
        *,
        on_outcome: Callable[[Node, str, Result | Verdict], None],
        on_open: Callable[[], None],
        on_silent: Callable[[Node], None],
    ) -> None:
        self.alive = False
        """Whether it welcomed us and was heard lately."""
        self._context, self._endpoint, self._tenant, self._keys = context, endpoint, tenant, keys
        self._on_outcome, self._on_open, self._on_silent = on_outcome, on_open, on_silent
        self._workers, self._window = 1, 0
        self._in_flight: set[str] = set()
        self._outbox: dict[str, list[Any]] = {}
        self._port = self._connect()

    def _connect(self) -> wire.Port:
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        wire.set_bounds(sock)
        present(sock, self._keys)
        port = wire.Port(sock, self._on_message)
        sock.connect(self._endpoint)
        self._heard_s = time.monotonic()
        port.send(wire.pack(wire.HELLO, wire.VERSION, self._tenant))
        return port

    def describe(self) -> str:
        """For messages to people."""
        state = "alive" if self.alive else f"silent for {time.monotonic() - self._heard_s:.1f} s"
        return f"{self._endpoint} {state}, {len(self._in_flight)} in flight"

    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        return self.alive and len(self._in_flight) < self._window

    def load(self) -> float:
        """Requests in flight per worker."""
        return len(self._in_flight) / self._workers

    def submit(self, name: str, kind: str, fields: list[Any]) -> None:
        """Send a request with the next flush."""
        self._in_flight.add(name)
        self._outbox.setdefault(kind, []).append(fields)

    def forget(self, name: str, *, cancel: bool) -> None:
        """A request is settled (the node may drop its result) or given up (`cancel`)."""
        self._in_flight.discard(name)
        self._outbox.setdefault(wire.CANCEL if cancel else wire.ACK, []).append(name)
        self._on_open()

    def end_session(self, session: str) -> None:
        """Tell the node that a session is through."""
        self._outbox.setdefault(wire.END, []).append(session)
        self._on_open()

    def take_all(self) -> list[str]:
        """Everything in flight, which from now on is not."""
        names = sorted(self._in_flight)
        self._in_flight.clear()
        self._outbox.clear()
        return names

    def flush(self) -> None:
        """Send what gathered: acknowledgements first, so that a retry is not taken for a repetition."""
        if not self.alive:
            return
        for kind in (wire.ACK, wire.CANCEL, wire.END, wire.RUN, wire.CHECK):
            items = self._outbox.pop(kind, None)
            if items:
                self._port.send(wire.pack(kind, items))

    def tick(self) -> None:
        """Once a second: a sign of life is asked for; without one for too long the connection is made anew."""
        self.flush()
        if time.monotonic() - self._heard_s < SILENT_S:
            self._port.send(wire.pack(wire.PING) if self.alive else self._hello())
            return
        self.alive = False
        self._on_silent(self)
        self._port.close()
        self._port = self._connect()

    def _hello(self) -> bytes:
        return wire.pack(wire.HELLO, wire.VERSION, self._tenant)

    def _on_message(self, frames: list[bytes]) -> None:
        self._heard_s = time.monotonic()
        kind, *parts = wire.unpack(frames[0])
        if kind == wire.WELCOME:
            _, self._workers, self._window = parts
            self._workers = max(1, self._workers)
            self.alive = True
            self._on_open()
        elif kind == wire.PONG:
            self._window = parts[0]
        elif kind == wire.RESULTS:
            self._window = parts[1]
            for fields in parts[0]:
                self._on_outcome(self, fields[0], wire.read_result(fields))
        elif kind == wire.VERDICTS:
            self._window = parts[1]
            for name, verdict in parts[0]:
                self._on_outcome(self, name, Verdict(verdict))
        elif kind == wire.REFUSED and parts[0] in (wire.HELLO_FIRST, wire.CLOSING):
            self.alive = False
            self._on_silent(self)
            if parts[0] == wire.HELLO_FIRST:
                self._port.send(self._hello())

    def close(self) -> None:
        """Say goodbye and disconnect."""
        if self.alive:
            self.flush()
            self._port.send(wire.pack(wire.BYE))
        self.alive = False
        self._port.close()
