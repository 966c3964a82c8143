"""The RoC filter against a real buffer: what it decides, what another decides after its death, how it ends."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.roc import select
from actors.roc_filter import RocFilter
from buffer.client import BufferClient, Fenced
from buffer.schema import Decision, Excluded, Finish, Lease, Loaded, Problem, Turn, VersionRun
from buffer.server import BufferServer
from buffer.settings import BufferSettings
from tests.audit import audit
from tests.roc_groups import PAPER, finish, headers

RUN, SEED, G = "roc-filter", 7, 4
RIGHT = "1110010110010010"
"""of two groups of 2 G rollouts, group 0 first"""


class World:
    """A buffer, its learner and one engine, all played by the test; the filter is real."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        settings = BufferSettings(
            steps=1,
            max_staleness=0,
            groups_per_step=2,
            group_size=G,
            num_rollouts=2 * G,
            evaluation_problems=0,
            dead_after_s=600.0,  # the engine says nothing while the filter works, however long that takes
            lease_s=600.0,
        )
        self.server = BufferServer(settings, directory, RUN, _problem)
        self.endpoint = ""

    async def resolve(self) -> str:
        return self.endpoint

    def client(self, role: str, name: str) -> BufferClient:
        return BufferClient(self.resolve, run=RUN, role=role, name=name)

    def filter(self) -> RocFilter:
        return RocFilter(PAPER, SEED, self.resolve, "filter-0", run=RUN, heartbeat_s=0.05)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.directory}/buffer/index.sqlite?mode=ro", uri=True)) as db:
            return db.execute(sql).fetchall()


def _problem(index: int) -> Problem:
    return Problem(id=f"p{index}", problem=f"{index} + 1 = ?", answer=str(index + 1))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.endpoint = await world.server.start()
    yield world
    await world.server.stop()


@asynccontextmanager
async def roles(world: World) -> AsyncIterator[tuple[BufferClient, BufferClient]]:
    """The learner has published version 0, the engine has loaded it."""
    learner, engine = world.client("learner", "learner-0"), world.client("rollout", "rollout-0")
    lineage = (await learner.connect()).epoch
    await learner.record_publication(lineage, 0)
    await engine.connect()
    await engine.loaded(Loaded(lineage=lineage, version=0, checksum=1, pause_s=0.0))
    try:
        async with asyncio.timeout(120):
            yield learner, engine
    finally:
        await engine.close()
        await learner.close()


def score(group: int, rollout: int, rights: str) -> Finish:
    """Rollouts of odd numbers fail their one call."""
    right = float(rights[2 * G * group + rollout])
    answer = str(group + 1) if right else "0"
    return replace(finish(rollout, right, (_status(rollout),), num_turns=1, answer=answer), group=group)


def _status(rollout: int) -> str:
    return "error" if rollout % 2 else "ok"


def choice(group: int, rights: str, excluded: Set[int] = frozenset()) -> Decision:
    """What the pure function decides."""
    present = [score(group, rollout, rights) for rollout in range(2 * G) if rollout not in excluded]
    return select(headers(present, G, group=group), PAPER, SEED)


async def roll_out(engine: BufferClient, rights: str, excluded: Set[int] = frozenset(), **fields: Any) -> None:
    """Finish every rollout of both groups; those in `excluded` (of group 0) could not be finished."""
    leases: list[Lease] = []
    while len(leases) < len(rights):
        leases += await engine.lease(len(rights) - len(leases), 0, 5.0)
    for lease in leases:
        key = {"group": lease.group, "rollout": lease.rollout, "attempt": lease.attempt}
        if lease.group == 0 and lease.rollout in excluded:
            await engine.exclude(Excluded(**key, reason="sandbox"))
            continue
        await engine.push_turn(
            Turn(
                **key,
                turn=0,
                prompt_ids=np.arange(2, dtype=np.int32),
                output_ids=np.arange(3, dtype=np.int32),
                logprobs=np.full(3, -1.0, np.float32),
                version_runs=(VersionRun(lineage=1, version=0, num_tokens=3),),
                observation_ids=np.empty(0, np.int32),
                status=_status(lease.rollout),
            )
        )
        scored = score(lease.group, lease.rollout, rights)
        await engine.finish(replace(scored, attempt=lease.attempt, num_output_tokens=3, num_tokens=5, **fields))


async def test_decides_as_the_pure_function_does_and_ends_with_the_run(world: World) -> None:
    async with roles(world) as (learner, engine):
        role = asyncio.create_task(world.filter().run())
        await roll_out(engine, RIGHT)
        assert await learner.take(0, 60.0) is not None
        await learner.record_publication(learner.epoch, 1)
        await engine.loaded(Loaded(lineage=learner.epoch, version=1, checksum=2, pause_s=0.0))
        await role  # the heartbeat says that the run is done
    for group, kept, p_err, p_format in world.rows("SELECT group_id, kept, p_err, p_format FROM groups"):
        whole = choice(group, RIGHT)
        assert [json.loads(text) for text in (kept, p_err, p_format)] == [
            list(whole.keep),
            list(whole.p_err),
            list(whole.p_format),
        ]
    assert world.rows("SELECT state FROM peers WHERE role = 'filter'") == [("gone",)]
    assert list(audit(world.directory).lines()) == []


async def test_the_life_after_a_death_decides_what_the_dead_one_would_have(world: World) -> None:
    async with roles(world) as (learner, engine):
        dead = world.client("filter", "filter-0")
        await dead.connect()
        await roll_out(engine, RIGHT)
        group = await dead.next_group(60.0)
        assert group is not None
        decision = select(group, PAPER, SEED)  # and then it dies, undecided
        role = asyncio.create_task(world.filter().run())
        batch = await learner.take(0, 60.0)
        assert batch is not None
        assert [one.rollouts for one in batch.groups if one.group == group.group] == [decision.keep]
        with pytest.raises(Fenced):
            await dead.decide(decision)
        await dead.close()
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)


async def test_excluded_rollouts_are_counted_and_the_rest_is_halved(world: World) -> None:
    async with roles(world) as (learner, engine):
        role = asyncio.create_task(world.filter().run())
        await roll_out(engine, RIGHT, excluded={1, 4})
        batch = await learner.take(0, 60.0)
        assert batch is not None
        assert [group.rollouts for group in batch.groups] == [choice(0, RIGHT, {1, 4}).keep, choice(1, RIGHT).keep]
        assert [len(group.rollouts) for group in batch.groups] == [3, 4]
        told: dict[str, float] = {}
        while told.get("rollouts_seen") != 14:
            told = (await learner.status())["peers"]["filter-0"]["snapshot"].get("counters", {})
            await asyncio.sleep(0.02)
        assert (told["rollouts_absent"], told["rollouts_kept"], told["groups_kept"]) == (2, 7, 2)
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)
    assert world.rows("SELECT rollout, excluded_reason FROM rollouts WHERE state = 'excluded'") == [
        (1, "sandbox"),
        (4, "sandbox"),
    ]


async def test_a_dropped_group_frees_its_ticket_at_once(world: World) -> None:
    async with roles(world) as (_, engine):
        role = asyncio.create_task(world.filter().run())
        await roll_out(engine, "1" * 2 * G + "0" * 2 * G)
        # S = 0: without the released tickets nothing could be leased before a step is trained
        assert {lease.group for lease in await engine.lease(4 * G, 0, 60.0)} <= {2, 3}
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)
    assert world.rows("SELECT group_id, drop_reason FROM groups WHERE state = 'dropped' ORDER BY group_id") == [
        (0, "all_right"),
        (1, "all_wrong"),
    ]


async def test_an_end_by_an_error_is_told_as_one(world: World) -> None:
    async with roles(world) as (_, engine):
        role = asyncio.create_task(world.filter().run())
        await roll_out(engine, RIGHT, statuses=("gibberish",))
        with pytest.raises(ValueError, match="gibberish"):
            await role
    assert world.rows("SELECT state FROM peers WHERE role = 'filter'") == [("failed",)]
