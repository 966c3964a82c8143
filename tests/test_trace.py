"""The trace of what a real buffer recorded: its tracks, its times, what is inside what."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from buffer.schema import Loaded
from launch.config import ConfigError
from launch.monitor.trace import trace
from tests.buffers import Peers, decide_all, finish, serving, settings, turn

STEP = {"step": 0, "recomputed": False, "step_s": 0.02, "train_s": 0.015, "groups": 2, "loss": 0.1}


async def train_a_step(peers: Peers) -> None:
    """Every rollout has a turn with a call and one without, generated in 40 and 20 ms."""
    learner = await peers.learner()
    engine, roc = await peers.engine("rollout-0"), await peers.join("filter", "filter-0")
    for lease in await engine.lease(100, 0, 1.0):
        await engine.push_turn(turn(lease, 0, generate_s=0.04, tool_queue_s=0.003, tool_run_s=0.01))
        await engine.push_turn(turn(lease, 1, generate_s=0.02, status="", code="", observation=""))
        await engine.finish(finish(lease, 2, float(lease.rollout % 2)))
    await decide_all(roc)
    assert await learner.take(0, 1.0) is not None
    await learner.record_checkpoint(1)
    await learner.record_publication(1, 1)
    await engine.loaded(Loaded(lineage=1, version=1, checksum=1, pause_s=0.005))
    await learner.set_dial("staleness.max_staleness", 2)


@pytest.fixture
async def recorded(tmp_path: Path) -> Path:
    async with serving(tmp_path, settings(keep_segments=True)) as peers:
        await train_a_step(peers)
    return tmp_path


def events(told: dict[str, Any]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By role and track."""
    roles = {e["pid"]: e["args"]["name"] for e in told["traceEvents"] if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    out: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in told["traceEvents"]:
        if event["ph"] != "M":
            out[roles[event["pid"]]][tracks[event["pid"], event["tid"]]].append(event)
    return out


def ends(event: dict[str, Any]) -> int:
    return int(event["ts"] + event.get("dur", 0))


def test_the_trace_has_the_promised_tracks(recorded: Path) -> None:
    step = STEP | {"time_s": trace(recorded, 60.0)["otherData"]["to_unix_s"] - 0.01}
    (recorded / "metrics").mkdir(exist_ok=True)
    (recorded / "metrics" / "steps.jsonl").write_text(json.dumps(step) + "\n")
    roles = events(json.loads(json.dumps(trace(recorded, 60.0))))
    engine = roles["rollout-0"]
    slots = [track for track in engine if track.startswith("slot ")]
    assert len(slots) == 16  # all rollouts were held at once
    names = sorted(event["name"].split()[0] for event in engine[slots[0]])
    assert names == ["call", "generate", "generate", "rollout", "turn", "turn", "wait"]
    assert [event["name"] for event in engine["weights"]] == ["swap to version 0", "swap to version 1"]
    assert [event["name"] for event in roles["buffer-0"]["batches"]] == ["batch of step 0"]
    assert len(roles["buffer-0"]["groups"]) == 4
    assert roles["buffer-0"]["dials"][-1]["name"] == "staleness.max_staleness = 2"
    assert [event["name"] for event in roles["learner-0"]["steps"]] == ["step 0", "fetch", "train"]
    assert [event["name"] for event in roles["learner-0"]["publications"]] == ["version 0", "version 1"]
    assert [event["name"] for event in roles["learner-0"]["checkpoints"]] == ["checkpoint 1"]


def test_what_is_inside_lies_inside_and_nothing_overlaps(recorded: Path) -> None:
    for track, some in events(trace(recorded, 60.0))["rollout-0"].items():
        if not track.startswith("slot "):
            continue
        rollout = next(event for event in some if event["name"].startswith("rollout"))
        turns = sorted((event for event in some if event["name"].startswith("turn")), key=lambda one: int(one["ts"]))
        assert len(turns) == 2
        assert ends(turns[0]) <= turns[1]["ts"]
        for event in some:
            assert rollout["ts"] <= event["ts"]
            assert ends(event) <= ends(rollout)
        generation = next(event for event in some if event["name"] == "generate")
        assert generation["dur"] <= 41_000


def test_only_the_asked_seconds_are_shown(recorded: Path) -> None:
    whole = trace(recorded, 60.0)
    until = whole["otherData"]["to_unix_s"]
    assert len(trace(recorded, 0.001)["traceEvents"]) < len(whole["traceEvents"])
    before = trace(recorded, 5.0, until_unix_s=until - 3600.0)
    assert before["traceEvents"] == []


def test_a_turn_whose_payload_was_deleted_is_still_shown(recorded: Path) -> None:
    for segment in (recorded / "buffer" / "segments").glob("*.seg"):
        segment.unlink()
    slots = events(trace(recorded, 60.0))["rollout-0"]
    assert sum(event["name"].startswith("turn") for some in slots.values() for event in some) == 32


def test_a_run_without_records_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is recorded yet"):
        trace(tmp_path, 60.0)
