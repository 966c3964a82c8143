"""Receiving a published version: buckets over ZeroMQ into memory that the engine's workers can map.

Consumes    manifests and buckets of the learner's weight server
Produces    `Staged`: the version's verified bytes as a file without a name
Waits for   the weight server: for its address, a newer version, then each bucket, each wait with a deadline
Unblocked by a publication; an answer to each request; the end of the connection
Invariant   bytes whose checksum differs are never handed on; a staged version vanishes with this process, however it
            ends, because its file was never linked anywhere
"""

import asyncio
import os
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from buffer.codec import CodecError, decode, unpack
from buffer.doors import Keys, present
from buffer.schema import WeightsManifest

__all__ = ["Staged", "WeightClient", "WeightsError"]

BUCKETS_AHEAD = 3
"""Buckets asked for before the first has come, so that the network never waits for a question."""
MAX_BUCKET_BYTES = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A version's buckets, end to end, in a memory file. Use as a context manager: leaving it frees the memory.

    Unlike a file in /dev/shm it has no name to leave behind and is not bounded by that mount's size (64 MiB in a
    container by default).
    """

    manifest: WeightsManifest
    descriptor: int

    @classmethod
    def create(cls, manifest: WeightsManifest) -> "Staged":
        """Empty memory of the manifest's size."""
        descriptor = os.memfd_create(f"rocstar-weights-{manifest.lineage}.{manifest.version}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, sum(manifest.bucket_bytes))
        return cls(manifest=manifest, descriptor=descriptor)

    @property
    def path(self) -> str:
        """Where processes of the same user on this host open it, as long as it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def write(self, index: int, bucket: bytes | memoryview) -> None:
        """Put bucket `index` in its place."""
        offset, view = sum(self.manifest.bucket_bytes[:index]), memoryview(bucket)
        while view:
            written = os.pwrite(self.descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def close(self) -> None:
        """Free the memory."""
        os.close(self.descriptor)

    def __enter__(self) -> "Staged":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WeightsError(RuntimeError):
    """A version could not be had; the receiver asks again. Names the server, what was asked and how long."""


class WeightClient:
    """Asks the learner's weight server, one question at a time.

    Example:
        manifest = await client.latest((1, 4), wait_s=20.0)
        if manifest is not None and (staged := await client.receive(manifest)) is not None:
            with staged: ...
    """

    def __init__(
        self, resolve: Callable[[], Awaitable[str]], *, answer_timeout_s: float = 10.0, keys: Keys | None = None
    ) -> None:
        """`resolve` gives the server's present endpoint; it is asked again whenever the server was silent."""
        self._resolve, self._keys = resolve, keys
        self._answer_timeout_s = answer_timeout_s
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._hang_up: zmq.asyncio.Socket
        self._endpoint = ""

    async def latest(self, than: tuple[int, int], *, wait_s: float) -> WeightsManifest | None:
        """What the newest version consists of, if it is newer than (lineage, version); else None after `wait_s`.

        Raises:
            WeightsError: the server is silent or its answer is no manifest.
        """
        await self._ask("latest", than[0], than[1], wait_s)
        frames = await self._answer("whether there is a newer version", wait_s + self._answer_timeout_s)
        match _head(frames):
            case ["none"]:
                return None
            case ["manifest", record]:
                return self._manifest(record)
        raise self._confused(frames)

    async def receive(self, manifest: WeightsManifest) -> Staged | None:
        """All buckets of a version, verified; None when a newer one has taken its place meanwhile.

        Raises:
            WeightsError: the server is silent, or a bucket differs from its checksum.
        """
        staged = Staged.create(manifest)
        try:
            whole = await self._receive_buckets(manifest, staged)
        except BaseException:
            staged.close()
            self.close()  # other buckets are still under way
            raise
        if whole:
            return staged
        staged.close()
        return None

    def close(self) -> None:
        """Drop the connection; what was asked and not answered is forgotten."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._hang_up.close(linger=0)
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _receive_buckets(self, manifest: WeightsManifest, staged: Staged) -> bool:
        num_buckets = len(manifest.bucket_bytes)
        for index in range(min(BUCKETS_AHEAD, num_buckets)):
            await self._ask("bucket", manifest.lineage, manifest.version, index)
        for index in range(num_buckets):
            what = f"bucket {index + 1} of {num_buckets} of version {manifest.lineage}.{manifest.version}"
            frames = await self._answer(what, self._answer_timeout_s)
            match _head(frames):
                case ["gone"]:
                    self.close()
                    return False
                case ["bucket", int(got)] if got == index and len(frames) == 2:
                    await asyncio.to_thread(_keep, frames[1], index, staged, what)
                case _:
                    raise self._confused(frames)
            if index + BUCKETS_AHEAD < num_buckets:
                await self._ask("bucket", manifest.lineage, manifest.version, index + BUCKETS_AHEAD)
        return True

    async def _ask(self, *request: object) -> None:
        if self._socket is None:
            self._endpoint = await self._where()
            self._context = self._context or zmq.asyncio.Context()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUCKET_BYTES)
            self._socket.setsockopt(zmq.LINGER, 0)
            present(self._socket, self._keys)
            self._hang_up = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(self._endpoint)
        await self._socket.send(msgpack.packb(request))

    async def _where(self) -> str:
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                return await self._resolve()
        except TimeoutError as error:
            raise WeightsError(
                f"the weight server's address was not told for {self._answer_timeout_s:g} s: is learner-0 running?"
            ) from error

    async def _answer(self, what: str, timeout_s: float) -> list[Any]:
        assert self._socket is not None
        answer = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        hang_up = asyncio.ensure_future(self._hang_up.recv_multipart())  # a server that died says no more than that
        try:
            await asyncio.wait({answer, hang_up}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            how = "hung up" if hang_up.done() else f"was silent for {timeout_s} s"
        finally:
            answer.cancel()
            hang_up.cancel()
        self.close()  # a late answer must not be taken for the next one's
        raise WeightsError(f"the weight server {self._endpoint} {how}: {what}")

    def _manifest(self, record: object) -> WeightsManifest:
        try:
            manifest: WeightsManifest = decode(WeightsManifest, msgpack.packb(record))
        except CodecError as error:
            self.close()
            raise WeightsError(f"the weight server {self._endpoint} sent a manifest that is none: {error}") from error
        return manifest

    def _confused(self, frames: list[Any]) -> WeightsError:
        self.close()
        return WeightsError(f"the weight server {self._endpoint} answered {bytes(frames[0])[:80]!r}")


def _head(frames: list[Any]) -> object:
    try:
        return unpack(frames[0].buffer)
    except CodecError:
        return None


def _keep(frame: Any, index: int, staged: Staged, what: str) -> None:
    """In a thread: checksums and copies of large buckets would hold up the event loop."""
    data, manifest = frame.buffer, staged.manifest
    if len(data) != manifest.bucket_bytes[index] or zlib.crc32(data) != manifest.bucket_crc32[index]:
        raise WeightsError(
            f"{what}: {len(data)} bytes with crc32 {zlib.crc32(data)}, the manifest says "
            f"{manifest.bucket_bytes[index]} bytes with crc32 {manifest.bucket_crc32[index]}"
        )
    staged.write(index, data)
