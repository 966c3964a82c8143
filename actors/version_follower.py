"""Keeps an engine at the learner's newest version.

Consumes    publications, as the weight client finds them
Produces    loaded versions, each acknowledged once it is loaded whole; figures of receiving and pausing
Waits for   a newer version; its buckets; the engine's pause; the buffer's word that the acknowledgement is durable
Unblocked by a publication
Invariant   buckets are received and verified while the engine generates; versions may be skipped, never gone back from;
            nothing of a lineage below the engine's is loaded
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from actors.engine import Engine
from actors.rollout_figures import count_swap
from actors.settings import WeightsSettings
from actors.weights import Staged, WeightClient, WeightsError
from buffer.meters import Meters
from buffer.schema import Loaded, WeightsManifest

__all__ = ["VersionFollower"]

WAIT_S = 10.0
"""Of one question for a newer version."""
RETRY_S = 0.5
"""Before the weight server is asked again after it failed."""


class VersionFollower:
    """Use `await VersionFollower(...).run()` next to what uses the engine."""

    def __init__(
        self,
        engine: Engine,
        client: WeightClient,
        settings: WeightsSettings,
        meters: Meters,
        *,
        acknowledge: Callable[[Loaded], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        """`acknowledge` returns when the buffer knows; `changed` is called when what is public here has."""
        self._engine, self._client, self.settings, self._meters = engine, client, settings, meters
        self._acknowledge, self._changed = acknowledge, changed
        self.swapping = False
        """the engine is paused for a version"""
        self.found = False
        """a version is there to be loaded, or has been"""
        self.acknowledged = asyncio.Event()
        """the engine has a version, and the buffer knows"""

    async def run(self) -> NoReturn:
        """Loads each version that is the newest when it is asked for."""
        while True:
            try:
                manifest = await self._client.latest(self._engine.loaded, wait_s=WAIT_S)
                if manifest is not None:
                    self._find(True)
                    await self._take(manifest)
            except WeightsError as error:
                self._meters.count("weights_failed")
                self._find(self.acknowledged.is_set())
                print(error, flush=True)
                await asyncio.sleep(RETRY_S)

    async def _take(self, manifest: WeightsManifest) -> None:
        if manifest.lineage < self._engine.loaded[0]:
            raise WeightsError(
                f"version {manifest.lineage}.{manifest.version} comes from a life of the learner that is over, "
                f"{self._engine.loaded[0]} is the present one"
            )
        started_s = time.monotonic()
        staged = await self._receive(manifest)
        if staged is None:
            return
        with staged:
            received_s = time.monotonic()
            self._swap(True)
            pause_s = await self._engine.swap(staged)
            self._swap(False)
        count_swap(self._meters, self._engine.loaded, received_s - started_s, pause_s)
        await self._acknowledge(
            Loaded(lineage=manifest.lineage, version=manifest.version, checksum=manifest.checksum, pause_s=pause_s)
        )
        self.acknowledged.set()
        self._changed()

    async def _receive(self, manifest: WeightsManifest) -> Staged | None:
        limit_s = self.settings.ack_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._client.receive(manifest)
        except TimeoutError as error:
            raise WeightsError(
                f"version {manifest.lineage}.{manifest.version} did not arrive within weights.ack_timeout_s = {limit_s}"
            ) from error

    def _find(self, found: bool) -> None:
        self.found = found
        self._changed()

    def _swap(self, swapping: bool) -> None:
        self.swapping = swapping
        self._changed()
