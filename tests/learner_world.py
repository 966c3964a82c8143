"""A real buffer with a rollout peer and a filter around it, for tests of the learner's loop.

The rollout peer samples random tokens instead of running an engine; everything it says, it says over the wire.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.weights import WeightClient
from buffer.client import BufferClient, LeaseOver
from buffer.schema import Decision, Finish, Lease, Loaded, Problem, Turn, VersionRun, WeightsManifest
from buffer.server import BufferServer
from buffer.settings import BufferSettings
from tests.learner_batches import VOCAB
from tests.learner_process import RUN


class World:
    """Start it, give its `resolve` to a learner, and tell `weights_at` where that serves weights."""

    def __init__(self, directory: Path, *, steps: int, max_staleness: int = 1) -> None:
        self.settings = BufferSettings(
            steps=steps,
            max_staleness=max_staleness,
            groups_per_step=2,
            group_size=4,
            num_rollouts=4,
            evaluation_problems=0,
            evaluation_at_start=False,
            evaluation_at_end=False,
            heartbeat_s=0.2,
            keep_segments=True,
        )
        self._server = BufferServer(self.settings, directory, RUN, _problem)
        self.endpoint = ""
        self._listening, self._taken = asyncio.Event(), asyncio.Event()
        self.loaded: list[tuple[int, int]] = []
        """(lineage, version) of every version the engine took"""
        self.manifest: WeightsManifest
        self.bytes = b""
        """of the newest version"""
        self.on_phase: Callable[[str, int], None] = lambda phase, version: None
        """called when the engine has "received" a version, and when it has "acknowledged" it"""

    async def __aenter__(self) -> World:
        self.endpoint = await self._server.start()
        self._tasks = [asyncio.create_task(body()) for body in (self._engine, self._filter)]
        test = asyncio.current_task()
        for task in self._tasks:  # a peer that fails ends the test at once, not at its deadline
            task.add_done_callback(lambda done: done.cancelled() or test is None or test.cancel())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def resolve(self) -> str:
        return self.endpoint

    async def _weights(self) -> str:
        await self._listening.wait()
        return self._weights_endpoint

    def weights_at(self, endpoint: str) -> None:
        """Where the learner's present life serves weights."""
        self._weights_endpoint = endpoint
        self._listening.set()

    async def _engine(self) -> None:
        client = await self._peer("rollout", "rollout-0")
        weights = WeightClient(self._weights, answer_timeout_s=1.0)
        pulse = asyncio.create_task(self._beat(client))
        swap = asyncio.create_task(self._swap(client, weights))
        try:
            await _either(pulse, swap, asyncio.create_task(self._roll(client)))
        finally:
            weights.close()
            await client.close()

    async def _swap(self, client: BufferClient, weights: WeightClient) -> None:
        while True:
            than = self.loaded[-1] if self.loaded else (-1, -1)
            try:
                manifest = await weights.latest(than, wait_s=1.0)
                staged = None if manifest is None else await weights.receive(manifest)
            except RuntimeError:  # the learner is between two lives
                await asyncio.sleep(0.05)
                continue
            if manifest is None or staged is None:
                continue
            with staged:
                self.bytes = os.pread(staged.descriptor, sum(manifest.bucket_bytes), 0)
            self.manifest = manifest
            version = {"lineage": manifest.lineage, "version": manifest.version}
            self.on_phase("received", manifest.version)
            await client.loaded(Loaded(**version, checksum=manifest.checksum, pause_s=0.0))
            self.loaded.append((manifest.lineage, manifest.version))
            self.on_phase("acknowledged", manifest.version)
            self._taken.set()

    async def _roll(self, client: BufferClient) -> None:
        while True:
            await self._taken.wait()
            for lease in await client.lease(want=4, loaded=self.loaded[-1][1], wait_s=0.5):
                turn, finish = _rollout(lease, *self.loaded[-1])
                try:
                    await client.push_turn(turn)
                    await client.finish(finish)
                except LeaseOver:
                    continue

    async def _filter(self) -> None:
        client = await self._peer("filter", "filter-0")
        pulse = asyncio.create_task(self._beat(client))

        async def decide() -> None:
            while True:
                headers = await client.next_group(1.0)
                if headers is not None:
                    keep = tuple(sorted(rollout.rollout for rollout in headers.rollouts))
                    await client.decide(Decision(group=headers.group, keep=keep))

        try:
            await _either(pulse, asyncio.create_task(decide()))
        finally:
            await client.close()

    async def _peer(self, role: str, name: str) -> BufferClient:
        client = BufferClient(self.resolve, run=RUN, role=role, name=name)
        await client.connect()
        return client

    async def _beat(self, client: BufferClient) -> None:
        while True:
            await client.heartbeat({})
            await asyncio.sleep(0.2)


async def _either(*tasks: asyncio.Task[None]) -> None:
    """Until one of them fails; the others end with it."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _problem(number: int) -> Problem | None:
    return Problem(id=str(number), problem=f"problem {number}", answer="1")


def _rollout(lease: Lease, lineage: int, version: int) -> tuple[Turn, Finish]:
    random = np.random.default_rng(lease.seed)
    output = random.integers(0, VOCAB, int(random.integers(6, 30))).astype(np.int32)
    key = {"group": lease.group, "rollout": lease.rollout, "attempt": lease.attempt}
    prompt = random.integers(0, VOCAB, 5).astype(np.int32)
    turn = Turn(
        **key,
        turn=0,
        prompt_ids=prompt,
        output_ids=output,
        logprobs=(-6 + 0.1 * random.normal(size=output.size)).astype(np.float32),
        version_runs=(VersionRun(lineage=lineage, version=version, num_tokens=output.size),),
        observation_ids=np.zeros(0, np.int32),
    )
    finish = Finish(
        **key,
        reward=float(lease.rollout % 2),
        verdict="right" if lease.rollout % 2 else "wrong",
        answer="1" if lease.rollout % 2 else "0",
        well_formed=True,
        num_answers=1,
        num_turns=1,
        statuses=(),
        num_output_tokens=output.size,
        num_tokens=output.size + prompt.size,
        end="answer",
    )
    return turn, finish
