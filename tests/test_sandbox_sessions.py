"""Sessions: variables survive, a stopped cell leaves no trace, what is lost is said to be lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from sandbox.api import Limits, Status, is_failure
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_node import PYTHONS_OWN_TMP, children, eventually, namespace_pid

pytestmark = pytest.mark.slow

QUICK = Limits(wall_s=0.5)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SandboxServer, SandboxClient]]:
    server = SandboxServer(SandboxSettings(workers=1, spare=False, wall_s=5.0, sessions=3))
    client = SandboxClient([await server.start()], timeout_s=30)
    yield server, client
    await client.close()
    await server.stop()


def _processes(server: SandboxServer) -> int:
    """Processes in the slots, init processes apart."""
    level = [pid for shard in server._shards for pid in children(shard.pid)]
    found = 0
    while level:
        level = [pid for parent in level for pid in children(parent)]
        found += sum(namespace_pid(pid) > 1 for pid in level)
    return found


async def test_variables_imports_and_functions_survive(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    assert (await session.run("import math\nx = 6\ndef f(y): return x * y")).status is Status.OK
    assert (await session.run("f(7)")).stdout == "42\n"
    assert (await session.run("x = 10; print(f(1)); print(input())", "in")).stdout == "10\nin\n"
    assert (await session.run("print(input())", "again")).stdout == "again\n"
    assert (await session.run("f(math.floor(2.5))")).stdout == "20\n"


async def test_sessions_do_not_see_each_other(pair: tuple[SandboxServer, SandboxClient]) -> None:
    one, two = pair[1].session(), pair[1].session()
    await one.run("x = 1; open('/tmp/x', 'w').write('1')")
    assert (await two.run("x")).exception.startswith("NameError")
    assert (await two.run("import os; sorted(os.listdir('/tmp'))")).stdout == f"{PYTHONS_OWN_TMP}\n"
    assert (await one.run("open('/tmp/x').read()")).stdout == "'1'\n"


async def test_an_error_keeps_what_was_done_before_it(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    result = await session.run("y = 5\nz = nope")
    assert (result.status, result.line) == (Status.ERROR, 2)
    assert (await session.run("y")).stdout == "5\n"
    assert (await session.run("import sys; sys.exit(3)")).exit_code == 3
    assert (await session.run("y")).stdout == "5\n"


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("x = 2\nprint('so far')\nwhile True: pass", Status.TIMEOUT),
        ("x = 2\nimport os, signal\nprint('so far')\nos.kill(os.getpid(), 9)", Status.SIGNAL),
        ("x = 2\nimport os\nprint('so far')\nos._exit(7)", Status.EXIT),
        ("x = 2\nprint('so far')\nwhile True: print('y' * 10000)", Status.OUTPUT_LIMIT),
    ],
)
async def test_a_cell_that_is_stopped_rolls_back(
    pair: tuple[SandboxServer, SandboxClient], cell: str, status: Status
) -> None:
    session = pair[1].session()
    await session.run("x = 1")
    result = await session.run(cell, limits=QUICK)
    assert result.status is status, result
    assert result.stdout.startswith("so far\n")
    assert (await session.run("x")).stdout == "1\n"
    assert (await session.run("x += 1; x")).stdout == "2\n"


async def test_the_first_cell_may_fail_as_well(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    assert (await session.run("while True: pass", limits=QUICK)).status is Status.TIMEOUT
    assert (await session.run("x = 3; x")).stdout == "3\n"


async def test_ending_a_session_leaves_no_process(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    await session.run("import subprocess; p = subprocess.Popen(['sleep', '100'])")
    assert _processes(pair[0]) >= 2
    session.close()
    await asyncio.sleep(0.05)
    await pair[1].run("1")
    assert await asyncio.to_thread(eventually, lambda: _processes(pair[0]) == 0)


async def test_the_one_that_rested_longest_is_evicted_and_says_so(
    pair: tuple[SandboxServer, SandboxClient],
) -> None:
    sessions = [pair[1].session() for _ in range(4)]
    for number, session in enumerate(sessions):
        assert (await session.run(f"x = {number}")).status is Status.OK
    lost = await sessions[0].run("x")
    assert lost.status is Status.SESSION_LOST
    assert not is_failure(lost.status)
    assert lost.to_text() == "session lost: its variables are gone"
    assert (await sessions[3].run("x")).stdout == "3\n"
    assert (await sessions[0].run("x = 9; x")).stdout == "9\n"
    assert pair[0].snapshot()["sessions_evicted"] == 2


async def test_a_dead_zygote_loses_its_sessions_and_says_so(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    await session.run("x = 1")
    os.kill(children(pair[0]._shards[0].pid)[0], signal.SIGKILL)
    assert await asyncio.to_thread(eventually, lambda: _processes(pair[0]) == 0), "until then it may answer"
    assert (await session.run("x")).status is Status.SESSION_LOST
    assert (await session.run("x = 2; x")).stdout == "2\n"


async def test_a_session_whose_builtins_are_gone_fails_by_its_own_code(
    pair: tuple[SandboxServer, SandboxClient],
) -> None:
    session = pair[1].session()
    assert (await session.run("import builtins\nx = 1\nbuiltins.compile = None")).status is Status.OK
    result = await session.run("x")
    assert (result.status, result.exception) == (Status.ERROR, "TypeError: 'NoneType' object is not callable")


async def test_a_session_that_kills_its_own_past_is_lost_alone(pair: tuple[SandboxServer, SandboxClient]) -> None:
    session = pair[1].session()
    await session.run("x = 1")
    result = await session.run("import os; os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)")
    assert is_failure(result.status)
    assert (await session.run("x")).status is Status.SESSION_LOST
    assert (await pair[1].run("print(1)")).stdout == "1\n"


async def test_a_long_session_keeps_two_processes(pair: tuple[SandboxServer, SandboxClient]) -> None:
    """The one that waits for the next cell, and its parent, which has the state before it."""
    session = pair[1].session()
    for number in range(60):
        result = await session.run("x = 1 if 'x' not in globals() else x + 1; x")
        assert result.stdout == f"{number + 1}\n"
    assert await asyncio.to_thread(eventually, lambda: _processes(pair[0]) == 2)


async def test_a_cell_is_quick(pair: tuple[SandboxServer, SandboxClient]) -> None:
    """A live cell costs less than a fork of its own would: the state is forked aside after the reply."""
    session = pair[1].session()
    await session.run("x = 0")
    cell, call = [], []
    for _ in range(40):
        begun = time.monotonic()
        await session.run("x += 1")
        cell.append(time.monotonic() - begun)
        begun = time.monotonic()
        await pair[1].run("x = 1")
        call.append(time.monotonic() - begun)
    assert sorted(cell)[20] < 1.5 * sorted(call)[20]
