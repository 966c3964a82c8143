"""Doors: who may speak to what listens beyond loopback. CURVE keys of a run, put to the sockets of every wire.

Consumes    a ZeroMQ socket that is about to listen or to connect; the run's keys, or None on loopback
Produces    a socket that encrypts, and accepts the holders of the run's client key alone; the key file of a run
Waits for   nothing; a thread beside each guarded socket answers who may enter
Unblocked by  the end of the socket's context, which ends that thread
Invariant   nothing listens beyond loopback without keys; the key file is its owner's alone; imports nothing of ours

One key pair for all that listen and one for all that connect, made per run: a peer proves with the one that it belongs
to the run, and knows by the other that it speaks to the run. Secrets are in no message, argument or log of ours.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

SCHEMA = 1
"""Of the key file."""
_ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks, per context, whether a peer may enter."""
_ZAP_VERSION = b"1.0"


class DoorError(ValueError):
    """A door that would stand open, or keys that are not to be trusted; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of a run, each 40 characters of Z85."""

    server_public: str
    server_secret: str = field(repr=False)
    """"" for those who only connect"""
    client_public: str
    client_secret: str = field(repr=False)

    def for_clients(self) -> Keys:
        """What those need who only connect."""
        return replace(self, server_secret="")


def make_keys() -> Keys:
    """New ones."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(
        server_public=server[0].decode(),
        server_secret=server[1].decode(),
        client_public=client[0].decode(),
        client_secret=client[1].decode(),
    )


def stored_keys(path: Path) -> Keys:
    """The keys in a file, which is made if there is none: a resumed run finds those it had.

    Raises:
        DoorError: others may read the file, or it holds no keys.
    """
    if not path.exists():
        _write(path, make_keys())
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise DoorError(f"{path}: mode {mode:o} lets others read the run's keys: remove the file, new ones are made")
    try:
        stored = json.loads(path.read_text(encoding="ascii"))
        schema, keys = stored.pop("schema"), Keys(**stored)
        whole = schema == SCHEMA and _pair(keys.server_public, keys.server_secret)
        whole = whole and _pair(keys.client_public, keys.client_secret)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DoorError(f"{path}: holds no keys of schema {SCHEMA}: remove the file, new ones are made")
    return keys


def _pair(public: str, secret: str) -> bool:
    return len(secret) == 40 and zmq.curve_public(secret.encode()) == public.encode()


def _write(path: Path, keys: Keys) -> None:
    """The whole file or none of it; never readable by others, not even for a moment."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump({"schema": SCHEMA, **asdict(keys)}, file)
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # somebody else's, made meanwhile, stays
        os.link(scratch, path)
    scratch.unlink()


def beyond_loopback(endpoint: str) -> bool:
    """Whether other hosts can reach what listens there; a name or an interface counts as reachable."""
    transport, _, address = endpoint.partition("://")
    if transport in ("ipc", "inproc"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def guard(socket: zmq.Socket[Any], bind: str, keys: Keys | None) -> None:
    """Before `socket.bind(bind)`: only holders of the run's client key will get in. One guarded socket per context.

    Raises:
        DoorError: it would listen beyond loopback without keys.
    """
    if keys is None:
        if beyond_loopback(bind):
            raise DoorError(f"bind = {bind} listens beyond loopback: give it the run's CURVE keys, or bind 127.0.0.1")
        return
    if not keys.server_secret:
        raise DoorError(f"bind = {bind}: these keys are for those who connect; what listens needs the run's own")
    # Through a shadow, so that whoever destroys the context leaves the judge's socket to the judge's thread.
    judge: zmq.Socket[bytes] = zmq.Context.shadow(socket.context).socket(zmq.REP)
    judge.setsockopt(zmq.LINGER, 0)
    try:
        judge.bind(_ZAP)
    except zmq.ZMQError as error:
        judge.close()
        raise DoorError(f"bind = {bind}: its ZeroMQ context guards another socket: give each one of its own") from error
    member = z85.decode(keys.client_public)
    threading.Thread(target=_judge, args=(judge, member), name="door", daemon=True).start()
    socket.setsockopt(zmq.ZAP_DOMAIN, b"rocstar")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in where the judge is missing
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def present(socket: zmq.Socket[Any], keys: Keys | None) -> None:
    """Before `socket.connect(...)`: shows the run's client key, and speaks to holders of its server key alone."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())


def _judge(socket: zmq.Socket[bytes], member: bytes) -> None:
    """Answers libzmq's questions (RFC 27, ZAP) until the context ends."""
    with socket, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, request, _, _, _, mechanism, *credentials = socket.recv_multipart()
            known = version == _ZAP_VERSION and mechanism == b"CURVE" and credentials == [member]
            verdict = (b"200", b"", b"member") if known else (b"400", b"not of this run", b"")
            socket.send_multipart([_ZAP_VERSION, request, *verdict, b""])
