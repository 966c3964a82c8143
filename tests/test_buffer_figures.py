"""The buffer over real sockets: its dials, its figures, what it counts."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from buffer.client import Refused
from buffer.schema import Loaded
from tests.buffers import complete, decide_all, rows, serving, settings


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


@pytest.mark.slow
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


@pytest.mark.slow
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
