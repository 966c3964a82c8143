"""What clients and nodes say to each other: one msgpack list per ZeroMQ message, its first element the kind.

Consumes    records of api
Produces    bytes, and records again; Malformed for anything else
Waits for   nothing: pure but for `Port`, which moves messages between a socket and an asyncio loop
Invariant   strict: types and sizes are checked on arrival, nothing is evaluated
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

from sandbox.api import Call, Limits, Result, Status

VERSION = 1
HELLO, RUN, CHECK, ACK, CANCEL, PING, BYE = "hello", "run", "check", "ack", "cancel", "ping", "bye"
END = "end"
WELCOME, RESULTS, VERDICTS, PONG, REFUSED = "welcome", "results", "verdicts", "pong", "refused"
HELLO_FIRST, CLOSING = "hello first", "closing"
"""Reasons of REFUSED that mean: the node knows nothing of what you sent it."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_CHARS = 4 << 20
MAX_ID_CHARS = 200
_RESULT_FIELDS = (
    "id", "status", "stdout", "stderr", "exception", "line", "exit_code", "signal", "truncated", "queue_s", "run_s",
    "cpu_s", "retry_after_s",
)  # fmt: skip


class Malformed(ValueError):
    """A message that is none of ours."""


def pack(*parts: Any) -> bytes:
    """One message."""
    body: bytes = msgpack.packb(parts, unicode_errors="replace")
    return body


def unpack(body: bytes) -> list[Any]:
    """The parts of a message.

    Raises:
        Malformed: not a msgpack list that begins with a kind.
    """
    try:
        parts = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(str(error)) from error
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str):
        raise Malformed("a message is a list that begins with its kind")
    return parts


def unfit(call: Call) -> str:
    """Why this text cannot be run as a program; "" when it can."""
    for name, text in (("code", call.code), ("input", call.input)):
        if len(text) > MAX_TEXT_CHARS:
            return f"{name} has {len(text)} characters, the most is {MAX_TEXT_CHARS}"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"{name} holds a lone surrogate at character {error.start}"
    if "\0" in call.code:
        return f"code holds a NUL at character {call.code.index(chr(0))}"
    return ""


def call_fields(call: Call, priority: int) -> list[Any]:
    """A call as it travels."""
    limits = call.limits
    bounds = [limits.wall_s, limits.cpu_s, limits.memory_mib, limits.output_kib] if limits else None
    return [call.id, call.code, call.input, bounds, priority, call.session, call.first]


def read_call(fields: Any, default: Limits) -> tuple[Call, int]:
    """A call and its priority.

    Raises:
        Malformed: wrong number or types of fields, or limits that are no limits.
    """
    match fields:
        case [str(name), str(code), str(stdin), bounds, int(priority), str(session), bool(first)]:
            if not 0 < len(name) <= MAX_ID_CHARS or len(session) > MAX_ID_CHARS:
                raise Malformed(f"an id has 1 to {MAX_ID_CHARS} characters")
            limits = _read_limits(bounds, default)
            return Call(id=name, code=code, input=stdin, limits=limits, session=session, first=first), priority
    raise Malformed("a call is [id, code, input, limits, priority, session, first]")


def _read_limits(bounds: Any, default: Limits) -> Limits:
    match bounds:
        case None:
            return default
        case [int() | float() as wall_s, int() | float() as cpu_s, int(memory_mib), int(output_kib)]:
            times_fit = 0 < wall_s <= 3600 and 0 < cpu_s <= 3600  # false for a NaN
            if times_fit and 1 <= memory_mib < 1 << 20 and output_kib >= 1:
                return Limits(
                    wall_s=float(wall_s), cpu_s=float(cpu_s), memory_mib=memory_mib, output_kib=min(output_kib, 1 << 20)
                )
    raise Malformed("limits are [wall_s, cpu_s, memory_mib, output_kib], each positive")


def result_fields(result: Result) -> list[Any]:
    """A result as it travels."""
    r = result
    details = [r.exception, r.line, r.exit_code, r.signal, r.truncated, r.queue_s, r.run_s, r.cpu_s, r.retry_after_s]
    return [r.id, r.status.value, r.stdout, r.stderr, *details]


def read_result(fields: Any) -> Result:
    """A result."""
    if not isinstance(fields, list) or len(fields) not in (len(_RESULT_FIELDS) - 1, len(_RESULT_FIELDS)):
        raise Malformed(f"a result is a list of {len(_RESULT_FIELDS)} fields")
    values = dict(zip(_RESULT_FIELDS, fields, strict=False))
    values["status"] = Status(values["status"])
    return Result(**values)


def set_bounds(sock: zmq.Socket[bytes]) -> None:
    """Before the socket binds or connects: later it would hold for nobody. Calls in flight bound the queues."""
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class Port:
    """A ZeroMQ socket in an asyncio loop: hands each message that arrives to a function."""

    def __init__(self, sock: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = sock
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._fd = int(sock.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, *frames: bytes) -> None:
        """Queue a message; what bounds the queue is the number of calls in flight."""
        if self._closed:
            return
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
        # The descriptor signals edges only, and sending may have consumed one.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        for _ in range(1000):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop; unsent messages are given a moment, unread ones dropped."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=200)
