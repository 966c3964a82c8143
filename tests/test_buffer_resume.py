"""A run taken up again with other settings: what may change takes effect, and nothing waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.client import Refused
from buffer.schema import Loaded
from tests.buffers import Peers, complete, decide_all, serving, settings


async def train(peers: Peers, steps: int) -> None:
    """`steps` steps of one group each, from their leases to the acknowledged version."""
    learner = await peers.learner()
    engine = await peers.engine("rollout-0")
    roc = await peers.join("filter", "filter-0")
    for step in range(steps):
        for lease in await engine.lease(4, step, 1.0):
            await complete(engine, lease)
        await decide_all(roc)
        assert await learner.take(step, 1.0) is not None
        await learner.record_publication(1, step + 1)
        await engine.loaded(Loaded(lineage=1, version=step + 1, checksum=1, pause_s=0.0))


async def test_a_run_resumed_with_fewer_steps_than_it_has_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, steps=9)) as peers:
        await train(peers, 3)
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, steps=2)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0", lineage=2, version=3)
        assert await engine.heartbeat({}) == "done"


async def test_staleness_given_at_a_resume_counts_and_a_dial_stands_without(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(max_staleness=1)) as peers:
        await (await peers.learner()).set_dial("max_staleness", 3)
    async with serving(tmp_path, settings(max_staleness=1)) as peers:
        assert (await (await peers.learner()).status())["max_staleness"] == 3
    async with serving(tmp_path, settings(max_staleness=0)) as peers:
        assert (await (await peers.learner()).status())["max_staleness"] == 0
    async with serving(tmp_path, settings(max_staleness=0)) as peers:
        assert (await (await peers.learner()).status())["max_staleness"] == 0


async def test_a_restarted_learner_publishes_nothing_older_than_what_was_published(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        first = await peers.learner()
        engine = await peers.engine("rollout-0")
        for lease in await engine.lease(100, 0, 1.0):
            await complete(engine, lease)
        await decide_all(await peers.join("filter", "filter-0"))
        assert await first.take(0, 1.0) is not None
        await first.record_publication(1, 1)
        second = await peers.join("learner", "learner-0")
        with pytest.raises(Refused, match=r"version 2\.0 can't follow 1\.1"):
            await second.record_publication(2, 0)
        await second.record_publication(2, 1)
