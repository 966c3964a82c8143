"""Live dials: what is refused, from which step a change holds, what stands at a resume, who obeys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.live import NEWEST, obey
from actors.scheduler import KvScheduler
from actors.settings import RolloutSettings, WeightsSettings
from buffer.client import Refused
from buffer.dials import LIVE
from buffer.schema import Loaded
from buffer.wire import Turned, value_at
from launch.bodies import live_limits
from launch.config import ConfigError, live_dials, parse
from launch.monitor.show import look
from launch.reach import note
from launch.run_directory import RunDirectory
from launch.status import describe
from launch.turn import turn
from sandbox.api import Status
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.buffers import Process, client, complete, decide_all, serving, settings
from tests.test_config import LEAST

LR = {"learner.lr": 1e-3, "rollout.concurrency": 64, "sandbox.wall_s": 4.0, "sandbox.cpu_s": 4.0}


def turned(*values: tuple[float, int], name: str = "rollout.concurrency") -> list[Turned]:
    return [Turned(name=name, value=value, step=step) for value, step in values]


def test_a_record_holds_from_its_step_on() -> None:
    records = turned((64, 0), (32, 4), (128, 4), (8, 9))
    assert [value_at(records, "rollout.concurrency", step) for step in (0, 3, 4, 8, 9, 100)] == [64, 64, 128, 128, 8, 8]
    assert value_at(records, "learner.lr", 5) is None


def test_an_engine_obeys_from_the_swap_to_that_step_on() -> None:
    rollout, weights = RolloutSettings(concurrency=64), WeightsSettings()
    records = [*turned((64, 0), (16, 4)), *turned((120, 0), (7, 4), name="weights.ack_timeout_s")]
    assert obey(records, 3, rollout, weights) == (rollout, weights)
    changed = obey(records, 4, rollout, weights)
    assert (changed[0].concurrency, changed[1].ack_timeout_s) == (16, 7.0)
    assert obey(records, NEWEST, rollout, weights) == changed
    assert obey([], NEWEST, rollout, weights) == (rollout, weights)


def test_a_sandbox_node_obeys_at_once() -> None:
    records = [*turned((4, 0), (1, 7), name="sandbox.wall_s"), *turned((4, 0), name="sandbox.cpu_s")]
    assert live_limits(SandboxSettings(), records) == {"wall_s": 1.0, "cpu_s": 4.0}
    assert live_limits(SandboxSettings(wall_s=2.0), []) == {"wall_s": 2.0, "cpu_s": 4.0}


def test_fewer_slots_stop_nobody_and_take_nobody() -> None:
    scheduler = KvScheduler(capacity_tokens=10_000, max_length=100, concurrency=4)
    for key in range(4):
        scheduler.admit(key, 10)
    scheduler.allow(2)
    assert (scheduler.running, scheduler.room()) == (4, 0)
    for key in range(3):
        scheduler.release(key, completed=True)
    assert scheduler.room() == 1
    scheduler.allow(8)
    assert scheduler.room() == 7


async def test_a_change_is_on_record_with_the_next_step_and_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(), live=LR) as peers:
        learner = await peers.learner()
        engine, roc = await peers.engine("rollout-0"), await peers.join("filter", "filter-0")
        monitor = await peers.join("monitor", "monitor-set")
        for lease in await engine.lease(100, 0, 1.0):
            await complete(engine, lease)
        await decide_all(roc)
        await learner.take(0, 1.0)
        await monitor.set_dial("learner.lr", 5e-4)
        records = await learner.dials()
        assert [value_at(records, "learner.lr", step) for step in (0, 1)] == [1e-3, 5e-4]
        assert (await monitor.status())["dials"] == [{"name": "learner.lr", "value": 5e-4, "step": 1}]
        await engine.loaded(Loaded(lineage=1, version=0, checksum=1, pause_s=0.0))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("groups.groups_per_step", 4, "'groups.groups_per_step' is not live"),
        ("learner.lr", 0, r"learner.lr = 0 must be a number above 0"),
        ("rollout.concurrency", 1.5, "a whole number from 1 to"),
        ("sandbox.wall_s", 4000.0, "a number above 0, at most 3600"),
        ("staleness.max_staleness", -1, "a whole number from 0 to 1000"),
        ("buffer.lease_s", -1.0, "buffer.lease_s = -1 must be a number above 0"),
    ],
)
async def test_what_cannot_be_is_refused(tmp_path: Path, name: str, value: float, words: str) -> None:
    async with serving(tmp_path, settings(), live=LR) as peers:
        monitor = await peers.join("monitor", "monitor-set")
        before = await monitor.dials()
        with pytest.raises(Refused, match=words):
            await monitor.set_dial(name, value)
        assert await monitor.dials() == before


async def test_the_buffer_obeys_its_own_time_outs(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(lease_s=60.0, group_timeout_s=600.0)) as peers:
        await peers.learner()
        monitor = await peers.join("monitor", "monitor-set")
        engine = await peers.engine("rollout-0")
        assert await engine.lease(1, 0, 1.0)
        await monitor.set_dial("buffer.group_timeout_s", 0.2)
        while not (await engine.status())["groups"]["dropped"].get("timed_out"):
            await engine.heartbeat({})


async def test_a_dial_stands_at_a_resume_unless_the_recipe_was_changed(tmp_path: Path) -> None:
    async def lr(live: dict[str, float], turn: float | None = None) -> float | None:
        async with serving(tmp_path, settings(), live=live) as peers:
            monitor = await peers.join("monitor", "monitor-set")
            if turn is not None:
                await monitor.set_dial("learner.lr", turn)
            return value_at(await monitor.dials(), "learner.lr", 0)

    assert await lr(LR, turn=5e-4) == 5e-4
    assert await lr(LR) == 5e-4
    assert await lr(LR | {"learner.lr": 2e-3}) == 2e-3
    assert await lr(LR | {"learner.lr": 2e-3}) == 2e-3


@pytest.mark.slow
async def test_a_turned_dial_outlives_a_killed_buffer(tmp_path: Path) -> None:
    process = Process(tmp_path, settings())
    endpoint = await process.start()
    monitor = client(endpoint, "monitor", "monitor-set")
    await monitor.connect()
    await monitor.set_dial("staleness.max_staleness", 4)
    await process.kill()
    await process.start()
    assert (await monitor.status())["max_staleness"] == 4
    again = client(endpoint, "monitor", "monitor-set")
    await again.connect()
    assert value_at(await again.dials(), "staleness.max_staleness", 0) == 4
    await again.close()
    await monitor.close()
    await process.kill()


def test_the_marks_in_the_tree_and_the_buffers_table_name_the_same() -> None:
    assert sorted(live_dials()) == sorted(LIVE)


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Path]:
    """A run's directory, with the lock that its driver would hold."""
    opened = RunDirectory.open(parse(LEAST, [f"run.directory={tmp_path / 'run'}"], "r.toml"), "f")
    yield opened.path
    opened.lock.close()


async def set_dial(directory: Path, change: str) -> str:
    return await asyncio.to_thread(turn, directory, change)


@pytest.mark.slow
async def test_the_command_turns_a_dial_of_a_running_buffer(driven: Path) -> None:
    run = json.loads((driven / "run.json").read_text())["run"]
    async with serving(driven, settings(), live=LR, run=run) as peers:
        note(driven, peers.endpoint, guarded=False)
        said = await set_dial(driven, "staleness.max_staleness=2")
        assert said == "staleness.max_staleness = 2 from step 0 on (was 1)"
        assert await set_dial(driven, "learner.lr=2e-3") == "learner.lr = 0.002 from step 0 on (was 0.001)"
        with pytest.raises(ConfigError, match=r"group_timeout_s = 30 must exceed .*lease_s = 60"):
            await set_dial(driven, "buffer.group_timeout_s=30")
        with pytest.raises(ConfigError, match=r"staleness.max_staleness = -1 must be greater than or equal to 0"):
            await set_dial(driven, "staleness.max_staleness=-1")
        await set_dial(driven, "buffer.lease_s=20")
        await set_dial(driven, "buffer.group_timeout_s=30")
        snapshot, _ = await asyncio.to_thread(look, driven)
        assert snapshot.run.state == "running"
        assert {dial.name: dial.value for dial in snapshot.dials} == {
            "staleness.max_staleness": 2,
            "learner.lr": 2e-3,
            "buffer.lease_s": 20,
            "buffer.group_timeout_s": 30,
        }
        assert snapshot.settings["staleness.max_staleness"] == 2
        assert snapshot.settings["learner.lr"] == 2e-3
        assert "dial         staleness.max_staleness = 2 from step 0 on" in describe(driven)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("groups.group_size=4", "groups.group_size is fixed for a run"),
        ("groups.groups_per_step=4", "groups.groups_per_step is fixed for a run"),
        ("roc.mode=off", "roc.mode is fixed for a run"),
        ("rollout.max_length=600", "rollout.max_length is not live, it is read once"),
        ("rollout.concurency=6", "did you mean rollout.concurrency"),
        ("learner.lr=1", "the run has no buffer yet"),
    ],
)
def test_the_command_refuses_with_the_reason(driven: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        turn(driven, change)


def test_a_run_that_nobody_drives_is_resumed_instead(driven: Path) -> None:
    (driven / "driver.lock").unlink()
    with pytest.raises(ConfigError, match=r"nobody drives this run; use `rocstar resume .* --set learner.lr=1`"):
        turn(driven, "learner.lr=1")


@pytest.mark.slow
async def test_a_node_stops_calls_at_the_seconds_that_were_turned() -> None:
    server = SandboxServer(SandboxSettings(workers=1))
    endpoint = await server.start("tcp://127.0.0.1:0")

    async def resolve() -> list[str]:
        return [endpoint]

    sandbox = SandboxClient(resolve, tenant="t")
    try:
        server.limit(wall_s=0.5, cpu_s=0.5)
        assert (await sandbox.run("while True: pass")).status in (Status.TIMEOUT, Status.CPU_TIMEOUT)
    finally:
        await sandbox.close()
        await server.stop()
