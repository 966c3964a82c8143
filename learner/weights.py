"""Publishing a version: buckets with checksums, served over ZeroMQ to whoever asks.

Consumes    (name, tensor) pairs of the full weights; requests of engines
Produces    Packed (manifest and buckets in host memory); answers
Waits for   requests and publications, in a thread of its own, so that training never delays an engine
Invariant   only the newest publication is held; a bucket is answered from it or as "gone", never from another; tensors
            that share memory travel once, because the engine names them once

Wire (DEALER to this ROUTER): requests are one msgpack frame ["latest", lineage, version, wait_s] or
["bucket", lineage, version, index]; answers are one msgpack frame ["manifest", record] | ["none"] | ["gone"], or
["bucket", index] followed by the raw bytes. "latest" is held back until something newer is published or wait_s passed.
Newer: a higher version, or the same version of a higher lineage. A frame that is no request is counted and dropped.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor

from buffer.codec import CodecError, encode, unpack
from buffer.doors import Keys, guard
from buffer.schema import TensorSpec, WeightsManifest

ALIGN_BYTES = 64
"""Tensors start at multiples of it, so that receivers may use them in place."""
MAX_REQUEST_BYTES = 1024
MAX_WAIT_S = 600.0
PEER_WINDOW = 64
"""Answers held for a peer that does not read; more are dropped and counted."""
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """A version ready to be published."""

    manifest: WeightsManifest
    buckets: tuple[memoryview, ...]


def pack(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    lineage: int,
    version: int,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Packed:
    """Copy the tensors, one at a time, into buckets on the host; floating ones as `dtype` (None: as they are)."""
    specs: list[TensorSpec] = []
    stream = _BucketStream(bucket_bytes)
    for name, tensor in tensors:
        wire = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        stream.align(ALIGN_BYTES)
        offset = stream.offset
        stream.write(memoryview(wire.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()))
        specs.append(
            TensorSpec(
                name=name,
                dtype=_DTYPE_NAMES[wire.dtype],
                shape=tuple(wire.shape),
                offset=offset,
                num_bytes=stream.offset - offset,
            )
        )
    buckets = stream.buckets()
    crcs = _crc32_each(buckets)
    manifest = WeightsManifest(
        lineage=lineage,
        version=version,
        bucket_bytes=tuple(len(bucket) for bucket in buckets),
        bucket_crc32=crcs,
        tensors=tuple(specs),
        checksum=manifest_checksum(crcs),
    )
    return Packed(manifest=manifest, buckets=buckets)


def manifest_checksum(bucket_crc32: Iterable[int]) -> int:
    """CRC-32 over the buckets' checksums, each as four little-endian bytes."""
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for crc in bucket_crc32))


class _BucketStream:
    """Bytes in, buckets of equal size out (the last one shorter)."""

    def __init__(self, bucket_bytes: int) -> None:
        self._size = bucket_bytes
        self._full: list[bytearray] = []
        self._open = bytearray()
        self.offset = 0

    def write(self, data: memoryview) -> None:
        self.offset += len(data)
        while data:
            room = self._size - len(self._open)
            self._open += data[:room]
            data = data[room:]
            if len(self._open) == self._size:
                self._full.append(self._open)
                self._open = bytearray()

    def align(self, to: int) -> None:
        self.write(memoryview(bytes(-self.offset % to)))

    def buckets(self) -> tuple[memoryview, ...]:
        rest = [self._open] if self._open else []
        return tuple(memoryview(bucket).toreadonly() for bucket in self._full + rest)


def _crc32_each(buckets: tuple[memoryview, ...]) -> tuple[int, ...]:
    if len(buckets) < 2:
        return tuple(zlib.crc32(bucket) for bucket in buckets)
    with ThreadPoolExecutor(max_workers=min(8, len(buckets))) as pool:  # crc32 lets other threads run
        return tuple(pool.map(zlib.crc32, buckets))


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """A peer that asked for something newer."""

    peer: bytes
    lineage: int
    version: int
    until_s: float


class WeightServer:
    """Serves the newest publication. `publish` may be called from any thread."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0", keys: Keys | None = None, max_mib_per_s: float = 0.0) -> None:
        self.failure: BaseException | None = None
        """what ended the server's thread, if anything did"""
        self._counts: dict[str, int] = {"bytes_sent": 0, "requests": 0, "malformed": 0, "undelivered": 0}
        self._packed: Packed | None = None
        self._waiting: list[_Waiting] = []
        self._bytes_per_s = max_mib_per_s * (1 << 20)
        self._closing = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an undeliverable answer is an error, not a silence
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, PEER_WINDOW)
        self._router.setsockopt(zmq.LINGER, 0)
        try:
            guard(self._router, bind, keys)
            self._router.bind(bind)
        except (ValueError, zmq.ZMQError):
            self._context.destroy()
            raise
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Cumulative: bytes_sent, requests, malformed, undelivered."""
        return dict(self._counts)

    def publish(self, packed: Packed) -> None:
        """Make `packed` the newest version and answer those who wait for it. Its publication is on record already."""
        self._packed = packed
        self._wake_up()

    def close(self) -> None:
        """Stop serving; joins the thread."""
        self._closing.set()
        self._wake_up()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    def _wake_up(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # so many wake-ups are pending that one more says nothing new

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                events = dict(poller.poll(self._poll_ms(time.monotonic())))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                while self._router in events and (frames := self._receive()) is not None:
                    self._serve(frames, time.monotonic())
                self._answer_waiting(time.monotonic())
        except BaseException as error:
            self.failure = error
        finally:
            self._router.close()
            self._context.term()

    def _poll_ms(self, now_s: float) -> int | None:
        until_s = min((waiting.until_s for waiting in self._waiting), default=None)
        return None if until_s is None else max(0, math.ceil((until_s - now_s) * 1000))

    def _receive(self) -> list[bytes] | None:
        try:
            return self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _serve(self, frames: list[bytes], now_s: float) -> None:
        self._counts["requests"] += 1
        request = _parse(frames)
        if request is None:
            self._counts["malformed"] += 1
            return
        kind, lineage, version, argument = request
        if kind == "latest":
            self._waiting = [waiting for waiting in self._waiting if waiting.peer != frames[0]]
            until_s = now_s + min(max(argument, 0.0), MAX_WAIT_S)
            self._waiting.append(_Waiting(peer=frames[0], lineage=lineage, version=version, until_s=until_s))
            return
        self._send(frames[0], *self._bucket(lineage, version, int(argument)))

    def _bucket(self, lineage: int, version: int, index: int) -> Iterator[Any]:
        packed = self._packed
        known = packed is not None and (packed.manifest.lineage, packed.manifest.version) == (lineage, version)
        if packed is None or not known or not 0 <= index < len(packed.buckets):
            return iter([msgpack.packb(["gone"])])
        return itertools.chain([msgpack.packb(["bucket", index])], [packed.buckets[index]])

    def _answer_waiting(self, now_s: float) -> None:
        packed, still = self._packed, []
        manifest = None if packed is None else packed.manifest
        for waiting in self._waiting:
            if manifest is not None and _newer(manifest, waiting):
                self._send(waiting.peer, _manifest_frame(manifest))
            elif waiting.until_s <= now_s:
                self._send(waiting.peer, msgpack.packb(["none"]))
            else:
                still.append(waiting)
        self._waiting = still

    def _send(self, *frames: Any) -> None:
        num_bytes = sum(len(frame) for frame in frames[2:])
        if self._bytes_per_s:
            self._closing.wait(num_bytes / self._bytes_per_s)
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counts["undelivered"] += 1  # the peer is gone or does not read: it asks again, or it is fenced
            return
        self._counts["bytes_sent"] += num_bytes


def _newer(manifest: WeightsManifest, than: _Waiting) -> bool:
    return (manifest.version, manifest.lineage) > (than.version, than.lineage)


def _manifest_frame(manifest: WeightsManifest) -> bytes:
    body, _ = encode(WeightsManifest, manifest)
    return msgpack.packb(["manifest", msgpack.unpackb(body)])


def _parse(frames: list[bytes]) -> tuple[str, int, int, float] | None:
    """(kind, lineage, version, wait or index), or None for anything else."""
    if len(frames) != 2:
        return None
    try:
        request = unpack(frames[1], MAX_REQUEST_BYTES)
    except CodecError:
        return None
    if not isinstance(request, list) or len(request) != 4:
        return None
    kind, lineage, version, argument = request
    if type(lineage) is not int or type(version) is not int:
        return None
    fits = type(argument) is int or (kind == "latest" and type(argument) is float and math.isfinite(argument))
    return (kind, lineage, version, float(argument)) if kind in ("latest", "bucket") and fits else None
