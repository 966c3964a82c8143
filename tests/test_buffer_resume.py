"""A run taken up again with other settings: what may change takes effect, and nothing waits for ever."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.client import BufferClient, Refused
from buffer.schema import Loaded, Problem
from tests.buffers import Peers, complete, decide_all, problem, serving, settings

HELD_OUT = [problem(100), problem(101)]


async def train(peers: Peers, steps: int, *, first: int = 0, lineage: int = 1) -> BufferClient:
    """`steps` steps of one group each, from their leases to the acknowledged version; the engine."""
    learner = await peers.learner()
    engine = await peers.engine("rollout-0", lineage=lineage, version=first)
    roc = await peers.join("filter", "filter-0")
    for step in range(first, first + steps):
        for lease in await engine.lease(4, step, 1.0):
            assert lease.kind == "train"
            await complete(engine, lease)
        await decide_all(roc)
        assert await learner.take(step, 1.0) is not None
        await learner.record_publication(lineage, step + 1)
        await engine.loaded(Loaded(lineage=lineage, version=step + 1, checksum=1, pause_s=0.0))
    return engine


async def evaluate(engine: BufferClient, version: int, count: int = 2) -> None:
    """Rollouts of the evaluation of the last version."""
    leases = await engine.lease(count, version, 1.0)
    assert [lease.kind for lease in leases] == ["eval"] * count
    for lease in leases:
        await complete(engine, lease)


def rows(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as index:
        return index.execute(sql).fetchall()


async def test_a_run_resumed_with_fewer_steps_than_it_has_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, steps=9)) as peers:
        await train(peers, 3)
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, steps=2)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0", lineage=2, version=3)
        assert await engine.heartbeat({}) == "done"


@pytest.mark.parametrize("evaluated", [0, 1, 2])
async def test_a_run_that_is_done_goes_on_with_more_steps_and_keeps_what_it_has(tmp_path: Path, evaluated: int) -> None:
    """Resumed when it is done, and in the middle of the evaluation at its end."""
    start = settings(groups_per_step=1, max_staleness=0, steps=2, evaluation_problems=2, evaluation_at_start=False)
    async with serving(tmp_path, start, heldout=HELD_OUT) as peers:
        engine = await train(peers, 2)
        if evaluated:
            await evaluate(engine, 2, evaluated)
        assert await engine.heartbeat({}) == ("done" if evaluated == 2 else "evaluating")
    before = rows(tmp_path, "SELECT step, record FROM batches ORDER BY step")
    async with serving(tmp_path, start.model_copy(update={"steps": 4}), heldout=HELD_OUT) as peers:
        engine = await train(peers, 2, first=2, lineage=2)
        await evaluate(engine, 4)
        assert await engine.heartbeat({}) == "done"
        status = await engine.status()
        assert (status["goal"], status["next_step"], status["acked"]) == ("steps", 4, 4)
    after = rows(tmp_path, "SELECT step, record FROM batches ORDER BY step")
    assert (after[:2], [step for step, _ in after]) == (before, [0, 1, 2, 3])
    assert rows(tmp_path, "SELECT phase, version FROM evaluations ORDER BY version") == [
        ("step_2_life_1", 2),
        ("end", 4),
    ]
    finished = "SELECT phase, count(*) FROM groups WHERE kind = 'eval' AND state = 'finished' GROUP BY phase"
    assert dict(rows(tmp_path, finished)) == {"end": 2} | ({"step_2_life_1": evaluated} if evaluated else {})


async def test_a_run_that_roc_ended_stays_done_whatever_steps_it_is_given(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, steps=9)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        while await engine.heartbeat({}) != "done":
            for lease in await engine.lease(4, 0, 0.2):
                await complete(engine, lease, reward=1.0)
            await decide_all(roc, drop="all_right")
    async with serving(tmp_path, settings(groups_per_step=1, steps=99)) as peers:
        monitor = await peers.join("monitor", "driver")
        status = await monitor.status()
        assert (status["state"], status["goal"], status["next_step"]) == ("done", "all_right", 0)


async def test_a_run_whose_problems_are_over_stays_done_whatever_steps_it_is_given(tmp_path: Path) -> None:
    def two(index: int) -> Problem | None:
        return problem(index) if index < 2 else None

    chosen = settings(groups_per_step=1, max_staleness=0, steps=9)
    async with serving(tmp_path, chosen, problems=two) as peers:
        engine = await train(peers, 2)
        assert await engine.heartbeat({}) == "done"
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, steps=99), problems=two) as peers:
        status = await (await peers.join("monitor", "driver")).status()
        assert (status["state"], status["goal"], status["next_step"]) == ("done", "exhausted", 2)


async def test_staleness_given_at_a_resume_counts_and_a_dial_stands_without(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(max_staleness=1)) as peers:
        await (await peers.learner()).set_dial("staleness.max_staleness", 3)
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
