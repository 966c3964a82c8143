"""The messages between the buffer and its peers: kinds, their bodies, and why one is refused.

Consumes    frames [head, body, payload], the payload frame only where there are arrays
Produces    Head and the record of a kind; `Refusal` with a counted reason for anything else
Imports     schema and codec only

head = msgpack [schema, kind, seq, epoch, run]. Requests: `seq` is the peer's own count, `epoch` its life as told by
Welcome (0 in HELLO). Each request gets one reply of the same seq: ACK (body: the kind's answer) or NACK (body: reason,
message); the reply's `epoch` is the buffer's own life, so that a peer notices a restart and sends again what is open.
A peer's ZeroMQ routing id is its name, a NUL and a token of this life: replies find it again after a reconnection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from buffer.codec import CodecError, decode, encode, unpack
from buffer.schema import (
    SCHEMA,
    Batch,
    Decision,
    Excluded,
    Finish,
    GroupHeaders,
    Lease,
    Loaded,
    RolloutKey,
    Trajectory,
    Turn,
    Welcome,
)

ACK, NACK = "ack", "nack"
MAX_HEAD_BYTES = 512
_HEAD_TYPES = (int, str, int, int, str)
MAX_REQUEST_BODY_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 16 << 20
"""of one frame; ZeroMQ cuts the connection of a peer that sends more"""


class Reason(StrEnum):
    """Why a request is refused."""

    FENCED = "fenced"
    """this life of the peer is over"""
    LEASE_OVER = "lease_over"
    """the rollout is in other hands, or its group is closed; the peer drops it and goes on"""
    WRONG_RUN = "wrong_run"
    WRONG_SCHEMA = "wrong_schema"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_KIND = "unknown_kind"
    UNKNOWN_KEY = "unknown_key"
    OUT_OF_ORDER = "out_of_order"
    NOT_ALLOWED = "not_allowed"
    WRONG_WEIGHTS = "wrong_weights"
    """what an engine has loaded is not what the learner published"""


class Refusal(Exception):
    """A request that is answered with NACK."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A life of a peer begins."""

    role: str
    name: str
    life: str
    """random token of this life: a HELLO sent twice is one life"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """An engine that has loaded version `loaded` wants up to `want` rollouts."""

    want: int
    loaded: int
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRequest:
    """The learner wants the batch of `step`."""

    step: int
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Written before the first byte of a version is sent."""

    lineage: int
    version: int
    checksum: int | None
    """of its manifest: acknowledgements must say the same; None: they are not compared"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Checkpoint `version` is complete; `kept` are those on disk now: batches before the oldest may go."""

    version: int
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """A setting to be changed while the run goes on: its dotted name, e.g. staleness.max_staleness."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turned:
    """A setting as it is on record."""

    name: str
    value: float
    step: int
    """first step it holds for"""


NEWEST = 1 << 60
"""a step after every record"""


def value_at(turned: Iterable[Turned], name: str, step: int) -> float | None:
    """A dial's value for a step: that of its last record up to it; None when there is none."""
    known = [one.value for one in turned if one.name == name and one.step <= step]
    return known[-1] if known else None


BODIES: dict[str, tuple[Any, Any]] = {
    "hello": (Hello, Welcome),
    "lease": (LeaseRequest, tuple[Lease, ...]),
    "turn": (Turn, None),
    "finish": (Finish, None),
    "exclude": (Excluded, None),
    "renew": (tuple[RolloutKey, ...], tuple[RolloutKey, ...]),
    "loaded": (Loaded, None),
    "next_group": (float, GroupHeaders | None),
    "decide": (Decision, None),
    "take": (TakeRequest, Batch | None),
    "fetch": (tuple[RolloutKey, ...], tuple[Trajectory, ...]),
    "publication": (Publication, None),
    "checkpoint": (Checkpoint, None),
    "heartbeat": (dict[str, Any], str),
    "status": (None, dict[str, Any]),
    "dial": (Dial, None),
    "dials": (None, tuple[Turned, ...]),
    "failed": (str, None),
    "bye": (None, None),
}
"""kind -> (type of the request's body, type of the answer's body)"""


@dataclass(frozen=True, slots=True)
class Head:
    """Of every message."""

    kind: str
    seq: int
    epoch: int
    run: str


def pack_head(kind: str, seq: int, epoch: int, run: str) -> bytes:
    out: bytes = msgpack.packb((SCHEMA, kind, seq, epoch, run))
    return out


def read_head(frame: bytes) -> Head:
    """The head that `frame` holds.

    Raises:
        Refusal: another schema, or no head at all.
    """
    try:
        plain = unpack(frame, MAX_HEAD_BYTES)
    except CodecError as error:
        raise Refusal(Reason.MALFORMED, f"head: {error}") from error
    if type(plain) is list and plain and type(plain[0]) is int and plain[0] != SCHEMA:
        raise Refusal(Reason.WRONG_SCHEMA, f"schema {plain[0]} is not {SCHEMA}: both sides must be of one release")
    if type(plain) is not list or tuple(map(type, plain)) != _HEAD_TYPES:
        raise Refusal(Reason.MALFORMED, "head is not [schema, kind, seq, epoch, run]")
    return Head(*plain[1:])


def read_body(kind: str, frames: list[bytes]) -> Any:
    """The record of a request from [body, payload].

    Raises:
        Refusal: of an unknown kind, too large, or not this kind's record.
    """
    if kind not in BODIES:
        raise Refusal(Reason.UNKNOWN_KIND, f"{kind[:40]!r} is none of {', '.join(BODIES)}")
    if not 1 <= len(frames) <= 2:
        raise Refusal(Reason.MALFORMED, f"{kind} has {len(frames) + 1} frames, 2 or 3 are expected")
    if len(frames[0]) > MAX_REQUEST_BODY_BYTES:
        raise Refusal(Reason.TOO_LARGE, f"body of {len(frames[0])} bytes exceeds {MAX_REQUEST_BODY_BYTES}")
    try:
        return decode(BODIES[kind][0], frames[0], frames[1] if len(frames) == 2 else b"")
    except CodecError as error:
        raise Refusal(Reason.MALFORMED, f"{kind}: {error}") from error


def reply_frames(kind: str, value: Any) -> list[bytes]:
    """[ack | nack, body, payload] of the answer to a request of `kind`; a Refusal is a nack."""
    if isinstance(value, Refusal):
        return [NACK.encode(), encode(tuple[str, str], (str(value.reason), value.message))[0]]
    body, payload = encode(BODIES[kind][1], value)
    return [ACK.encode(), body, payload] if payload else [ACK.encode(), body]


def name_of(route: bytes) -> str:
    """The peer's name in a routing id: NAME NUL TOKEN."""
    return route.split(b"\0", 1)[0].decode("ascii", "replace")
