"""The buffer over real sockets: groups, batches, versions, evaluations, the order of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from buffer.client import BufferClient, Fenced, Refused
from buffer.schema import Batch, Decision, Excluded, Loaded
from tests.buffers import Peers, complete, decide_all, finish, problem, rows, serving, settings, turn


async def filled(peers: Peers) -> tuple[BufferClient, BufferClient, BufferClient]:
    """Learner, one engine, RoC; B = 4 groups of 4 rollouts leased and completed, all kept."""
    learner = await peers.learner()
    engine = await peers.engine("rollout-0")
    roc = await peers.join("filter", "filter-0")
    for lease in await engine.lease(100, 0, 1.0):
        await complete(engine, lease)
    assert await decide_all(roc) == 4
    return learner, engine, roc


@pytest.mark.parametrize("name", ["run", "100% #1? a"])
async def test_a_step_from_lease_to_trajectories(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path / name, settings()) as peers:
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
