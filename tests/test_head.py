"""The loss of Ray's head: noticed in time, and an end in good order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import head, warden
from launch.threads import in_thread
from tests.whole_run import ENDLESS, Command


@pytest.mark.slow
async def test_a_head_that_listens_is_not_lost_and_one_that_does_not_is(unused_tcp_port: int) -> None:
    calls = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", unused_tcp_port)
    where = f"127.0.0.1:{unused_tcp_port}"
    watching = asyncio.create_task(head.lost(where, patience_s=0.4))
    for _ in range(6):  # half as long again as it may be silent
        calls.clear()
        await asyncio.wait_for(calls.wait(), 5.0)
    assert not watching.done()
    server.close()
    await server.wait_closed()
    assert await asyncio.wait_for(watching, 5.0) == f"Ray's head at {where} has not answered for 0.4 s"


async def test_a_call_that_blocks_holds_up_no_loop() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_thread(lambda: time.sleep(30.0)), 0.05)
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(OSError, match="no"):
        await in_thread(lambda: os.stat("/no/such/place"))


@pytest.mark.slow
def test_a_run_that_waits_for_nodes_notices_that_its_head_is_gone(
    command: Command,
    unused_tcp_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token, where = command.directory.with_suffix(".token"), f"127.0.0.1:{unused_tcp_port}"
    node = command.start("node", "head", "--address", str(unused_tcp_port), "--token", str(token))
    until(lambda: asyncio.run(head.listens(where)))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    recipe = ("launch/recipes/quickstart.toml", "--set", f"run.directory={command.directory}")
    driver = command.start("run", *recipe, "--address", where)
    until(lambda: "waiting for nodes: 1 buffer" in command.directory.with_suffix(".out").read_text())
    node.kill()
    killed_s = time.monotonic()
    command.ended(driver, 75)
    assert time.monotonic() - killed_s < head.HEAD_PATIENCE_S + 15.0
    node.wait()
    command.nothing_left(within_s=15.0)
    assert f":{unused_tcp_port} has not answered for 15 s" in command.summary()["reason"]


@pytest.mark.slow
def test_a_run_whose_head_dies_ends_as_interrupted_and_can_go_on(command: Command) -> None:
    driver = command.run(*ENDLESS, "learner.checkpoint_every=100")
    command.until_step(1)
    heads = [pid for pid in warden.marked(command.marks) if b"gcs_server" in _command(pid)]
    assert len(heads) == 1
    os.kill(heads[0], signal.SIGKILL)
    killed_s = time.monotonic()
    command.ended(driver, 75)
    assert time.monotonic() - killed_s < head.HEAD_PATIENCE_S + head.DRAIN_S + 10.0
    command.nothing_left()
    summary = command.summary()
    assert summary["outcome"] == "interrupted"
    assert summary["reason"].startswith("Ray's head at 127.0.0.1:")
    assert f"rocstar resume {command.directory}" in summary["reason"]
    assert list((command.directory / "checkpoints").glob("step_*/COMPLETE")), "the learner was not asked to end"


def until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
