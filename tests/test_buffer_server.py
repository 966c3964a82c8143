"""The buffer over real sockets: leases, groups, batches, fencing, long polls, the order of a run."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.client import BufferClient, Fenced, LeaseOver, PeerSilent, Refused
from buffer.schema import Batch, Decision, Excluded, Loaded
from tests.buffers import Peers, client, complete, decide_all, finish, problem, serving, settings, turn


def rows(directory: Path, sql: str) -> list[tuple]:  # type: ignore[type-arg]
    with sqlite3.connect(directory / "buffer" / "index.sqlite") as db:
        return db.execute(sql).fetchall()


async def filled(peers: Peers) -> tuple[BufferClient, BufferClient, BufferClient]:
    """Learner, one engine, RoC; B = 4 groups of 4 rollouts leased and completed, all kept."""
    learner = await peers.learner()
    engine = await peers.engine("rollout-0")
    roc = await peers.join("filter", "filter-0")
    for lease in await engine.lease(100, 0, 1.0):
        await complete(engine, lease)
    assert await decide_all(roc) == 4
    return learner, engine, roc


async def test_a_step_from_lease_to_trajectories(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        learner, engine, _ = await filled(peers)
        assert await engine.lease(1, 0, 0.0) == []  # B tickets are active
        batch = await learner.take(0, 1.0)
        assert batch is not None
        assert [group.group for group in batch.groups] == [0, 1]
        assert batch.groups[0].rewards == (0.0, 1.0)
        assert batch.groups[0].num_tokens == (15, 15)  # the last observation is not trained
        assert batch.groups[0].num_output_tokens == (10, 10)
        keys = [(group.group, rollout) for group in batch.groups for rollout in group.rollouts]
        trajectories = await learner.fetch(keys)
        assert [(one.group, one.rollout) for one in trajectories] == keys
        assert trajectories[3].ids.tolist()[3:8] == list(range(1001100, 1001105))
        assert trajectories[3].versions.tolist() == [-1] * 3 + [0] * 5 + [-1] * 2 + [0] * 5
        assert await learner.take(0, 0.0) == batch
        await learner.record_publication(learner.epoch, 1)
        await engine.loaded(Loaded(lineage=1, version=1, checksum=1, pause_s=0.0))
        leases = await engine.lease(100, 1, 1.0)  # step 0's tickets are released
        assert {(lease.group, lease.base, lease.deadline) for lease in leases} == {(4, 1, 2), (5, 1, 2)}
        assert len({lease.seed for lease in leases}) == 8
        status = await learner.status()
        assert status["ages"]["total"]["mean"] == 0
        assert status["tickets"]["active"] == 4


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


async def test_with_s_0_a_batch_that_is_all_dropped_does_not_block(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(max_staleness=0)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for _ in range(2):
            for lease in await engine.lease(100, 0, 1.0):
                await complete(engine, lease, reward=1.0)
            assert await decide_all(roc, drop="all_wrong") == 2
        for lease in await engine.lease(100, 0, 1.0):
            await complete(engine, lease)
        taken = asyncio.create_task(learner.take(0, 10.0))
        assert await decide_all(roc) == 2
        batch = await taken
        assert batch is not None
        assert [group.group for group in batch.groups] == [4, 5]
        assert await engine.lease(1, 0, 0.0) == []
        assert (await learner.status())["groups"]["dropped"] == {"all_wrong": 4}


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


async def test_roc_is_given_a_group_once_and_again_after_its_death(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        waiting = asyncio.create_task(roc.next_group(20.0))
        for lease in await engine.lease(8, 0, 1.0):
            await complete(engine, lease)
        headers = await waiting
        assert headers is not None
        assert [one.reward for one in headers.rollouts] == [0.0, 1.0, 0.0, 1.0]
        second = await peers.join("filter", "filter-1")
        other = await second.next_group(1.0)
        assert other is not None
        assert other.group != headers.group
        assert await roc.next_group(0.0) == headers  # it has not decided yet
        await roc.close()
        await second.decide(Decision(group=other.group, keep=(0, 1)))
        assert await second.next_group(1.0) == headers
        with pytest.raises(Refused, match="exactly one"):
            await second.decide(Decision(group=headers.group, keep=()))
        with pytest.raises(Refused, match="ascending numbers among the finished"):
            await second.decide(Decision(group=headers.group, keep=(0, 9)))
        for _ in range(2):
            await second.decide(Decision(group=headers.group, keep=(0, 1)))
        assert rows(tmp_path, "SELECT state, kept FROM groups WHERE group_id < 2") == [("finished", "[0,1]")] * 2


async def test_the_learner_answers_for_lineage_and_order(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        learner, engine, _ = await filled(peers)
        with pytest.raises(Refused, match=r"can't follow 1\.0 before step 0 is taken"):
            await learner.record_publication(1, 1)
        with pytest.raises(Refused, match=r"version 1\.1 is not on record as published"):
            await engine.loaded(Loaded(lineage=1, version=1, checksum=1, pause_s=0.0))
        assert await learner.take(0, 1.0) is not None
        with pytest.raises(Refused, match="lineage 7 is not its own"):
            await learner.record_publication(7, 1)
        await learner.record_publication(1, 1)
        again = await peers.learner()  # restarted: it publishes what was published, under its own lineage
        assert again.epoch == 2
        with pytest.raises(Fenced):
            await learner.record_publication(1, 1)
        with pytest.raises(Refused, match="step -1 has no recorded batch"):
            await again.take(-1, 0.0)
        assert await again.take(100, 0.0) is None  # past the goal: its heartbeat tells the end
        await engine.loaded(Loaded(lineage=2, version=1, checksum=1, pause_s=0.0))
        assert (await again.status())["acked"] == 1


async def test_only_rank_0_of_the_learner_serves_versions(tmp_path: Path) -> None:
    """Ranks count their lives apart: another rank of the same epoch neither publishes nor keeps deadlines running."""
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, ack_timeout_s=0.3)) as peers:
        learner = await peers.learner()
        rank = await peers.join("learner", "learner-1")
        engine = await peers.engine("rollout-0")
        assert rank.epoch == learner.epoch == 1
        for lease in await engine.lease(4, 0, 1.0):
            await complete(engine, lease)
        await decide_all(await peers.join("filter", "filter-0"))
        assert await learner.take(0, 1.0) is not None
        with pytest.raises(Refused, match="lineage 1 is not its own"):
            await rank.record_publication(1, 1)
        with pytest.raises(Refused, match="learner-0 alone does"):
            await rank.record_checkpoint(1)
        await learner.record_publication(1, 1)
        await learner.close()
        for _ in range(20):  # twice the time to acknowledge, with nobody to load the version from
            await rank.heartbeat({})
            await engine.heartbeat({})
            await asyncio.sleep(0.03)
        assert (await engine.status())["peers"]["rollout-0"]["state"] == "alive"


async def test_an_engine_that_does_not_acknowledge_is_fenced_while_rank_0_serves(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, ack_timeout_s=0.3)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        for lease in await engine.lease(4, 0, 1.0):
            await complete(engine, lease)
        await decide_all(await peers.join("filter", "filter-0"))
        assert await learner.take(0, 1.0) is not None
        await learner.record_publication(1, 1)

        async def beat() -> None:
            while True:
                await learner.heartbeat({})
                await engine.heartbeat({})

        with pytest.raises(Fenced):
            await asyncio.wait_for(beat(), 10.0)


async def test_only_the_weights_that_were_published_are_acknowledged(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        learner = await peers.join("learner", "learner-0")
        await learner.record_publication(1, 0, 17)
        await learner.record_publication(1, 0, 17)  # sent again
        with pytest.raises(Refused, match=r"wrong_weights: version 1\.0 is on record with checksum 17, now it has 18"):
            await learner.record_publication(1, 0, 18)
    async with serving(tmp_path, settings()) as peers:  # the checksum outlives the buffer
        engine = await peers.join("rollout", "rollout-0")
        with pytest.raises(Refused, match=r"wrong_weights: rollout-0: version 1\.0 .* checksum 1, .* with 17"):
            await engine.loaded(Loaded(lineage=1, version=0, checksum=1, pause_s=0.0))
        with pytest.raises(Refused, match="acknowledge first"):
            await engine.lease(1, 0, 0.0)
        await engine.loaded(Loaded(lineage=1, version=0, checksum=17, pause_s=0.0))
        assert len(await engine.lease(1, 0, 1.0)) == 1


async def test_evaluation_training_last_version_evaluation_done(tmp_path: Path) -> None:
    chosen = settings(steps=1, groups_per_step=1, max_staleness=0, evaluation_problems=3)
    async with serving(tmp_path, chosen, heldout=[problem(1000 + i) for i in range(5)]) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        leases = sorted(await engine.lease(100, 0, 1.0), key=lambda one: -one.group)
        assert [(one.kind, one.base, one.deadline, one.problem.id) for one in leases] == [
            ("eval", 0, -1, f"p{1000 + i}") for i in range(3)
        ]
        assert await engine.heartbeat({}) == "evaluating"
        assert await engine.lease(1, 0, 0.0) == []
        for lease in leases[:2]:
            await complete(engine, lease)
        await engine.exclude(Excluded(group=leases[2].group, rollout=0, attempt=1, reason="sandbox"))
        for lease in await engine.lease(100, 0, 1.0):
            assert lease.kind == "train"
            await complete(engine, lease)
        assert await engine.heartbeat({}) == "running"
        await decide_all(roc)
        assert await learner.take(0, 1.0) is not None
        assert await engine.lease(1, 0, 0.0) == []
        await learner.record_publication(1, 1)
        await engine.loaded(Loaded(lineage=1, version=1, checksum=1, pause_s=0.0))
        leases = await engine.lease(100, 1, 1.0)
        assert [(one.kind, one.base) for one in leases] == [("eval", 1)] * 3
        with pytest.raises(Refused, match=r"evaluation of version 1|older than"):
            await engine.push_turn(turn(leases[0], 0, version=0))
        for lease in leases:
            await complete(engine, lease, reward=1.0)
        assert await engine.heartbeat({}) == "done"
        sql = "SELECT phase, sum(reward) FROM rollouts JOIN groups USING (group_id) WHERE kind = 'eval' GROUP BY phase"
        assert rows(tmp_path, sql) == [("end", 3.0), ("start", 0.0)]


async def test_the_goal_is_reached_early_when_everything_is_right(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=1)) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for _ in range(10):
            for lease in await engine.lease(4, 0, 0.2):
                await complete(engine, lease, reward=1.0)
            await decide_all(roc, drop="all_right")
            if await engine.heartbeat({}) == "done":
                break
        status = await engine.status()
        assert status["groups"]["dropped"] == {"all_right": 5}
        assert status["state"] == "done"


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


async def test_a_dial_is_turned_and_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        assert len(await engine.lease(100, 0, 1.0)) == 16
        await engine.set_dial("staleness.max_staleness", 2)
        assert {one.deadline for one in await engine.lease(100, 0, 1.0)} == {2}
        with pytest.raises(Refused, match=r"'groups.groups_per_step' is not live: staleness.max_staleness, "):
            await engine.set_dial("groups.groups_per_step", 4)
        with pytest.raises(Refused, match="a whole number from 0 to 1000"):
            await engine.set_dial("staleness.max_staleness", 1e300)
        sql = "SELECT value, step FROM dials WHERE name = 'staleness.max_staleness'"
        assert rows(tmp_path, sql) == [(1.0, 0), (2.0, 0)]


async def test_staleness_stays_0_where_the_loss_does_not_correct_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(max_staleness=0, uncorrected=True)) as peers:
        monitor = await peers.join("monitor", "monitor-0")
        with pytest.raises(Refused, match=r'max_staleness = 2 with loss\.correction = "none"'):
            await monitor.set_dial("staleness.max_staleness", 2)
        await monitor.set_dial("staleness.max_staleness", 0)
        assert (await monitor.status())["max_staleness"] == 0


async def test_an_exhausted_source_gives_a_short_batch_and_ends_the_run(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(), problems=lambda i: problem(i) if i < 3 else None) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        for lease in await engine.lease(100, 0, 1.0):
            await complete(engine, lease)
        await decide_all(roc)
        sizes = []
        for step in range(2):
            batch = await learner.take(step, 1.0)
            assert batch is not None
            sizes.append(len(batch.groups))
        assert sizes == [2, 1]
        await learner.record_publication(1, 2)
        await engine.loaded(Loaded(lineage=1, version=2, checksum=1, pause_s=0.0))
        assert await learner.heartbeat({}) == "done"


async def test_segments_go_when_no_kept_checkpoint_needs_them(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=0, segment_mib=1)) as peers:
        learner = await peers.learner()
        engine = await peers.engine("rollout-0")
        roc = await peers.join("filter", "filter-0")
        batches: list[Batch] = []
        for step in range(4):
            for lease in await engine.lease(100, step, 1.0):
                await engine.push_turn(turn(lease, 0, num_tokens=40_000))
                await engine.finish(finish(lease, 1, float(lease.rollout % 2)))
            await decide_all(roc)
            batch = await learner.take(step, 1.0)
            assert batch is not None
            batches.append(batch)
            await learner.record_publication(1, step + 1)
            await learner.record_checkpoint(step + 1)
            await engine.loaded(Loaded(lineage=1, version=step + 1, checksum=1, pause_s=0.0))
        # checkpoints 3 and 4 are kept: step 3 can be trained again, steps 0 to 2 are gone
        assert len(await learner.fetch([(batches[3].groups[0].group, 0)])) == 1
        names = sorted(int(path.stem) for path in (tmp_path / "buffer" / "segments").glob("*.seg"))
        assert names[0] == rows(tmp_path, "SELECT min(segment) FROM turns WHERE group_id = 3")[0][0]
        assert rows(tmp_path, "SELECT version FROM checkpoints WHERE kept") == [(3,), (4,)]


async def test_snapshots_are_written_once_a_second(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        engine = await peers.join("rollout", "rollout-0")
        path = tmp_path / "metrics" / "rollout-0.jsonl"
        started_s = time.monotonic()
        while not path.exists() or len(path.read_text().splitlines()) < 2:
            await engine.heartbeat({"role": "rollout", "counters": {"turns": 3}, "gauges": {"x": float("nan")}})
            await asyncio.sleep(0.05)
        assert 1.0 < time.monotonic() - started_s < 5.0
        line = json.loads(path.read_text().splitlines()[-1])
        assert line["counters"] == {"turns": 3}
        assert line["gauges"] == {"x": None}
        assert json.loads((tmp_path / "metrics" / "buffer-0.jsonl").read_text().splitlines()[-1])["unix_s"] > 0


async def test_what_a_peer_left_waiting_at_its_bye_is_no_refusal(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        leaver, monitor = await peers.join("filter", "filter-0"), await peers.join("monitor", "monitor-0")
        waiting = asyncio.create_task(leaver.next_group(20.0))
        await leaver.heartbeat({})  # sent after it
        await leaver.close()
        waiting.cancel()
        counters = (await monitor.status())["buffer"]["counters"]
        assert counters["peers_gone/filter"] == 1
        assert not [name for name in counters if name.startswith("refused/") or name == "replies_lost"]


async def test_a_client_names_the_peer_that_does_not_answer() -> None:
    lonely = client("tcp://127.0.0.1:9", "rollout", "rollout-0", request_timeout_s=0.3)
    with pytest.raises(PeerSilent, match=r"buffer at tcp://127\.0\.0\.1:9 has not answered for 0\.\d s"):
        await lonely.connect()
    await lonely.close()


async def test_a_refusal_by_a_reading_thread_is_counted_as_every_other(tmp_path: Path) -> None:
    async with serving(tmp_path, settings()) as peers:
        learner = await peers.learner()
        with pytest.raises(Refused, match="has no durable turn"):
            await learner.fetch([(77, 0)])
        with pytest.raises(Refused, match="is not live"):
            await learner.set_dial("none", 1)
        counters = (await learner.status())["buffer"]["counters"]
        refused = {name: count for name, count in counters.items() if name.startswith("refused/")}
        assert refused == {"refused/unknown_key": 1, "refused/not_allowed": 1}


async def test_figures_that_cannot_be_written_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("in the way of the folder")
    async with serving(tmp_path, settings()) as peers:
        learner = await peers.learner()
        async with asyncio.timeout(10.0):
            while True:
                counters = (await learner.status())["buffer"]["counters"]
                if counters.get("metrics_failed/FileExistsError"):
                    break
                await learner.heartbeat({})
        await peers.engine("rollout-0")


async def test_publish_lag_ends_when_the_slowest_engine_has_the_version(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(groups_per_step=1, max_staleness=1)) as peers:
        learner, roc = await peers.learner(), await peers.join("filter", "filter-0")
        quick, slow = await peers.engine("rollout-0"), await peers.engine("rollout-1")

        async def lags(name: str) -> tuple[int, float]:
            histogram = (await learner.status())["buffer"]["histograms"].get(name, {"counts": [], "sum": 0.0})
            return sum(histogram["counts"]), histogram["sum"]

        for lease in await quick.lease(8, 0, 1.0):
            await complete(quick, lease)
        await decide_all(roc)
        for step in range(2):
            assert await learner.take(step, 1.0) is not None
            await learner.record_publication(1, step + 1)
        await quick.loaded(Loaded(lineage=1, version=2, checksum=1, pause_s=0.0))
        assert await lags("publish_lag_s") == (0, 0.0)
        await slow.loaded(Loaded(lineage=1, version=1, checksum=1, pause_s=0.0))
        first, first_s = await lags("publish_lag_s")
        assert (first, first_s > 0.0) == (1, True)
        assert await lags("publish_lag_versions") == (1, 1.0)  # version 2 was out by then
        await slow.close()
        assert (await lags("publish_lag_s"))[0] == 2
        assert await lags("publish_lag_versions") == (2, 1.0)
