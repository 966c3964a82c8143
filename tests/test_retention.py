"""Payload is deleted when nothing needs it, and only then; whoever asks for what is gone is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.client import BufferClient, Refused
from buffer.schema import Lease, Loaded
from tests.buffers import decide_all, finish, problem, serving, settings, turn

LONG_TOKENS = 40_000
"""four fill a segment of one MiB"""
HELDOUT = [problem(1000 + number) for number in range(8)]


async def train(engine: BufferClient, roc: BufferClient, learner: BufferClient, step: int) -> None:
    """A step of one group, from its leases to the acknowledged version."""
    leases: list[Lease] = await engine.lease(100, step, 1.0)
    for lease in leases:
        await engine.push_turn(turn(lease, 0, num_tokens=LONG_TOKENS))
        await engine.finish(finish(lease, 1, float(lease.rollout % 2)))
    await decide_all(roc)
    assert await learner.take(step, 1.0) is not None
    await learner.record_publication(1, step + 1)
    await engine.loaded(Loaded(lineage=1, version=step + 1, checksum=1, pause_s=0.0))


async def test_a_checkpoint_during_the_last_evaluation_leaves_its_durable_turns(tmp_path: Path) -> None:
    chosen = settings(
        steps=2, groups_per_step=1, max_staleness=0, segment_mib=1, evaluation_problems=8, evaluation_at_start=False
    )
    async with serving(tmp_path, chosen, heldout=HELDOUT) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for step in range(2):
            await train(engine, roc, learner, step)
        for lease in await engine.lease(100, 2, 1.0):
            assert lease.kind == "eval"
            await engine.push_turn(turn(lease, 0, num_tokens=LONG_TOKENS))
        await learner.record_checkpoint(1)
        await learner.record_checkpoint(2)
        second = await peers.engine("rollout-1", version=2)
        await engine.close()
        again: list[Lease] = []
        while len(again) < 8:  # a reply holds a few: their turns come with them
            more = await second.lease(100, 2, 60.0)
            assert more
            again += more
        assert [len(lease.turns) for lease in again] == [1] * 8


async def test_a_batch_whose_payload_is_deleted_is_refused_and_the_buffer_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, segment_mib=1)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for step in range(3):
            await train(engine, roc, learner, step)
            await learner.record_checkpoint(step + 1)
        batch = await learner.take(0, 1.0)
        assert batch is not None
        with pytest.raises(Refused, match=r"unknown_key.*00000001\.seg is deleted: no kept checkpoint"):
            await learner.fetch([(batch.groups[0].group, 0)])
        assert (await learner.status())["next_step"] == 3


async def test_one_checkpoint_is_not_enough_for_anything_to_go(tmp_path: Path) -> None:
    """It may turn out to be damaged; then training starts again from the model itself."""
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, segment_mib=1)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for step in range(3):
            await train(engine, roc, learner, step)
        await learner.record_checkpoint(3)
        for step in range(3):
            batch = await learner.take(step, 1.0)
            assert batch is not None
            keys = [(batch.groups[0].group, rollout) for rollout in batch.groups[0].rollouts]
            assert len(await learner.fetch(keys)) == len(keys)


async def test_every_batch_since_the_oldest_kept_checkpoint_can_be_fetched_and_none_before(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, segment_mib=1)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for step in range(5):
            await train(engine, roc, learner, step)
        await learner.record_checkpoint(5, kept=(2, 5))
        for step in range(5):
            batch = await learner.take(step, 1.0)
            assert batch is not None
            keys = [(batch.groups[0].group, rollout) for rollout in batch.groups[0].rollouts]
            if step < 2:
                with pytest.raises(Refused, match="is deleted: no kept checkpoint"):
                    await learner.fetch(keys)
            else:
                assert len(await learner.fetch(keys)) == len(keys)
