"""Receiving a published version: buckets over ZeroMQ into memory that the engine's workers can map.

Consumes    manifests and buckets of the learner's weight server
Produces    `Staged`: the version's verified bytes as a file without a name
Waits for   the weight server: for a newer version, then for each bucket, each wait with a deadline
Unblocked by a publication; an answer to each request
Invariant   bytes whose checksum differs are never handed on; a staged version vanishes with this process, however it
            ends, because its file was never linked anywhere
"""

import os
from dataclasses import dataclass
from types import TracebackType

from buffer.schema import WeightsManifest

__all__ = ["Staged"]


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

    def __enter__(self) -> "Staged":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)
