"""The buffer over real sockets: leases and turns, silence, fencing, long polls, the time of a group."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.client import Fenced, LeaseOver, PeerSilent, Refused
from buffer.schema import Excluded
from tests.buffers import client, complete, finish, rows, serving, settings, turn


async def test_a_lease_wakes_up_when_a_ticket_is_issued(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        learner = await peers.learner()
        early = await peers.join("rollout", "rollout-1")
        with pytest.raises(Refused, match="acknowledge first"):
            await early.lease(1, 0, 0.0)
        engine = await peers.engine("rollout-0")
        assert len(await engine.lease(100, 0, 0.0)) == 16
        started_s = time.monotonic()
        waiting = asyncio.create_task(engine.lease(4, 0, 20.0))
        ticketless = asyncio.create_task(learner.take(0, 0.2))
        assert await ticketless is None
        await engine.exclude(Excluded(group=0, rollout=0, attempt=1, reason="sandbox"))
        for rollout in (1, 2, 3):
            await engine.exclude(Excluded(group=0, rollout=rollout, attempt=1, reason="sandbox"))
        leases = await waiting  # group 0 is dropped as failed: its ticket is free at once
        assert {lease.group for lease in leases} == {4}
        assert time.monotonic() - started_s < 5
        assert (await engine.status())["groups"]["dropped"] == {"failed": 1}


async def test_an_acknowledged_turn_is_handed_to_the_next_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        first = await peers.engine("rollout-0")
        (lease,) = await first.lease(1, 0, 1.0)
        await first.push_turn(turn(lease, 0))
        second = await peers.engine("rollout-1")
        await first.close()
        leases = {(one.group, one.rollout): one for one in await second.lease(100, 0, 1.0)}
        again = leases[lease.group, lease.rollout]
        assert again.attempt == 2
        assert again.seed == lease.seed
        assert [one.turn for one in again.turns] == [0]
        assert again.turns[0].output_ids.tolist() == turn(lease, 0).output_ids.tolist()
        await complete(second, again)
        assert rows(tmp_path, "SELECT turn, attempt, engine FROM turns WHERE group_id = 0 AND rollout = 0") == [
            (0, 1, "rollout-0"),
            (1, 2, "rollout-1"),
        ]


async def test_a_new_life_fences_the_old_one(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        old = await peers.engine("rollout-0")
        leases = await old.lease(2, 0, 1.0)
        parked = asyncio.create_task(old.lease(100, 0, 30.0))
        assert len(await parked) == 14
        parked = asyncio.create_task(old.lease(100, 0, 30.0))
        new = await peers.engine("rollout-0")
        assert new.epoch == old.epoch + 1
        with pytest.raises(Fenced, match="epoch 1 is over"):
            await old.push_turn(turn(leases[0], 0))
        with pytest.raises(Fenced):
            await parked
        again = {(one.group, one.rollout): one for one in await new.lease(100, 0, 1.0)}
        assert again[leases[0].group, leases[0].rollout].attempt == 2
        with pytest.raises(LeaseOver):
            await new.push_turn(turn(leases[0], 0))  # the attempt of the old life


async def test_what_a_failing_peer_says_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        engine = await peers.join("rollout", "rollout-0")
        await engine.failed("EngineDied: the engine's processes are gone")
        told = (await (await peers.learner()).status())["peers"]["rollout-0"]
        assert (told["state"], told["error"]) == ("failed", "EngineDied: the engine's processes are gone")


async def test_a_silent_engine_loses_its_leases_and_is_fenced(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(heartbeat_s=0.05, dead_after_s=0.4)) as peers:
        await peers.learner()
        silent = await peers.engine("rollout-0")
        await silent.lease(100, 0, 1.0)
        alive = await peers.engine("rollout-1")
        waiting = asyncio.create_task(alive.lease(100, 0, 30.0))
        while not waiting.done():
            await alive.heartbeat({"waits_for": "a lease"})
            await asyncio.wait([waiting], timeout=0.05)
        assert {one.attempt for one in await waiting} == {2}
        with pytest.raises(Fenced, match="is dead"):
            await silent.heartbeat({})
        status = await alive.status()
        assert status["peers"]["rollout-0"]["state"] == "dead"
        assert status["waits_for"]["rollout-1"] == "a lease"


async def test_keys_that_are_not_renewed_go_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(heartbeat_s=0.05, lease_s=0.3)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        leases = await engine.lease(2, 0, 1.0)
        other = await peers.engine("rollout-1")
        assert len(await other.lease(100, 0, 1.0)) == 14
        waiting = asyncio.create_task(other.lease(1, 0, 30.0))
        kept, lost = leases
        while not waiting.done():
            assert await engine.renew([(kept.group, kept.rollout)]) == []
            await asyncio.wait([waiting], timeout=0.05)
        # every other lease of rollout-1 may have expired as well; the lost one is among what is granted now
        granted = await waiting + await other.lease(100, 0, 0.5)
        assert (lost.group, lost.rollout) in {(one.group, one.rollout) for one in granted}
        assert (kept.group, kept.rollout) not in {(one.group, one.rollout) for one in granted}
        assert await engine.renew([(lost.group, lost.rollout)]) == [(lost.group, lost.rollout)]


async def test_turns_are_idempotent_and_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        (lease,) = await engine.lease(1, 0, 1.0)
        with pytest.raises(Refused, match="turn 1 came, turn 0 is the next"):
            await engine.push_turn(turn(lease, 1))
        for _ in range(3):
            await engine.push_turn(turn(lease, 0))
        with pytest.raises(Refused, match="num_turns = 2, 1 are durable"):
            await engine.finish(finish(lease, 2, 1.0))
        await asyncio.gather(engine.push_turn(turn(lease, 1)), engine.finish(finish(lease, 2, 1.0)))
        await engine.push_turn(turn(lease, 1))
        await engine.finish(finish(lease, 2, 1.0))
        with pytest.raises(Refused, match=r"turn 2 came|is done"):
            await engine.push_turn(turn(lease, 2))
        assert rows(tmp_path, "SELECT count(*), sum(num_output_tokens) FROM turns") == [(2, 10)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version_runs": ()}, r"version runs \[\] do not cover 5 tokens"),
        ({"logprobs": np.zeros(4, np.float32)}, "4 log-probs for 5 tokens"),
        ({"logprobs": np.array([-1, np.nan, 0, 0, 0], np.float32)}, "log-prob 1 is not finite"),
        ({"num_tokens": 0, "version_runs": ()}, "no token was sampled"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "0 prompt tokens in turn 0"),
        ({"version": -1}, "older than the ticket's base 0"),
    ],
)
async def test_turns_that_contradict_themselves_are_refused(
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        (lease,) = await engine.lease(1, 0, 1.0)
        with pytest.raises(Refused, match=message):
            await engine.push_turn(turn(lease, 0, **changes))


async def test_resumed_rollouts_come_in_replies_of_bounded_size(tmp_path: Path) -> None:
    """Each of 8 rollouts has 0.8 MB of durable turns; 2 MiB is the bound of a reply."""
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        first = await peers.engine("rollout-0")
        for lease in await first.lease(8, 0, 1.0):
            await first.push_turn(turn(lease, 0, num_tokens=100_000))
        second = await peers.engine("rollout-1")
        assert len(await second.lease(100, 0, 1.0)) == 8  # those of the other two groups
        await first.close()
    async with serving(tmp_path, settings()) as peers:  # the sizes outlive the buffer
        learner = await peers.learner()
        engine = await peers.engine("rollout-1", lineage=learner.epoch)
        replies = [await engine.lease(100, 0, 1.0) for _ in range(4)]
        assert [len([one for one in leases if one.turns]) for leases in replies] == [2, 2, 2, 2]


async def test_a_group_past_its_time_is_closed_or_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(heartbeat_s=0.05, group_timeout_s=0.3)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        leases = await engine.lease(8, 0, 1.0)
        for lease in leases[:2]:
            await complete(engine, lease)
        headers = await roc.next_group(5.0)
        assert headers is not None
        assert [one.rollout for one in headers.rollouts] == [0, 1]
        with pytest.raises(LeaseOver, match="the group is closed"):
            await engine.push_turn(turn(leases[2], 0))
        while not (dropped := (await engine.status())["groups"]["dropped"]):
            await roc.heartbeat({})
        assert dropped == {"timed_out": 1}


async def test_a_client_names_the_peer_that_does_not_answer() -> None:
    lonely = client("tcp://127.0.0.1:9", "rollout", "rollout-0", request_timeout_s=0.3)
    with pytest.raises(PeerSilent, match=r"buffer at tcp://127\.0\.0\.1:9 has not answered for 0\.\d s"):
        await lonely.connect()
    await lonely.close()
