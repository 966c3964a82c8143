"""The service round the calls: nothing lost, nothing mixed up, fair, bounded, honest about its own failures."""

# ruff: noqa: ASYNC110 - what is waited for happens in other processes

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from sandbox.api import INFRA, Result, Status, Verdict
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_node import Node, children, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node(workers=2, spare=False, wall_s=2.0, cpu_s=5.0)
    yield node
    node.close()


@pytest.fixture
async def server() -> object:
    server = SandboxServer(SandboxSettings(workers=2, wall_s=2.0, queue_bound=50))
    endpoint = await server.start()
    yield server, endpoint
    await server.stop()


def _mixed(count: int, seed: int) -> list[tuple[str, str]]:
    """(program, what it must show), failing ones among them."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        a, b = draw.randrange(1000), draw.randrange(1000)
        kind = draw.random()
        if kind < 0.8:
            cases.append((f"print({a} * {b} + {number})", str(a * b + number)))
        elif kind < 0.9:
            cases.append((f"{a} + {b}", str(a + b)))
        elif kind < 0.95:
            cases.append((f"\n\nraise KeyError({number})", f"KeyError: {number} (line 3)"))
        else:
            cases.append((f"import os; os._exit({number % 200 + 1})", f"exit code {number % 200 + 1}"))
    return cases


def test_a_burst_is_answered_completely_and_in_order(node: Node) -> None:
    cases = _mixed(600, seed=1)
    results = node.run_all(code for code, _ in cases)
    assert [result.to_text() for result in results] == [shown for _, shown in cases]
    assert len({result.id for result in results}) == len(results)


def test_nothing_is_lost_or_mixed_up_when_zygotes_and_a_supervisor_are_killed(node: Node) -> None:
    cases = _mixed(500, seed=2)

    async def run() -> list[Result]:
        calls = [asyncio.ensure_future(node.client.run(code)) for code, _ in cases]
        for threshold, victims in ((50, node.zygotes), (150, node.supervisors), (300, node.zygotes)):
            while sum(call.done() for call in calls) < threshold:
                await asyncio.sleep(0.005)
            os.kill(victims()[0], signal.SIGKILL)
        return list(await asyncio.gather(*calls))

    restarts = node.server.snapshot()
    results = node.wait(run())
    assert [result.to_text() for result in results] == [shown for _, shown in cases]
    after = node.server.snapshot()
    assert after["zygote_restarts"] >= restarts["zygote_restarts"] + 2
    assert after["shard_restarts"] == restarts["shard_restarts"] + 1


def test_a_call_whose_process_is_lost_twice_is_given_up_as_infrastructure(node: Node) -> None:
    assert eventually(lambda: not node.guests()), "what earlier tests started is gone"

    async def run() -> Result:
        call = asyncio.ensure_future(node.client.run("import time; time.sleep(1.9)"))
        for _ in range(2):
            while not node.guests():
                await asyncio.sleep(0.01)
            for pid in node.zygotes():
                os.kill(pid, signal.SIGKILL)
            while node.guests():
                await asyncio.sleep(0.01)
        return await call

    result = node.wait(run())
    assert result.status is Status.WORKER_LOST
    assert result.infra
    assert node.run("print(1)").stdout == "1\n"


def test_a_poison_call_fails_alone(node: Node) -> None:
    poison = "import os, signal\nos.write(3, b'\\xff' * 100)\nos.kill(-1, 9)\nos.abort()"
    results = node.run_all(["print(1)"] * 20 + [poison] + ["print(2)"] * 20)
    assert [result.to_text() for result in results[:20]] == ["1"] * 20
    assert [result.to_text() for result in results[21:]] == ["2"] * 20
    assert results[20].status not in INFRA | {Status.OK}


def test_sleepers_do_not_hold_a_core(node: Node) -> None:
    """While two calls hold a pipe open for as long as they may, prints are each delayed by at most 0.2 s."""
    held = "import os, time\nr, w = os.pipe()\nos.read(r, 1)"

    async def delays(number: int, until: list[asyncio.Future[Result]]) -> list[float]:
        late = []
        while len(late) < number and not (until and all(call.done() for call in until)):
            begun = time.monotonic()
            assert (await node.client.run("print(1)")).stdout == "1\n"
            late.append(time.monotonic() - begun)
        return sorted(late)

    async def run() -> tuple[list[Result], list[float], list[float]]:
        free = await delays(40, [])
        holders = [asyncio.ensure_future(node.client.run(held)) for _ in range(2)]
        await asyncio.sleep(0.15)
        late = await delays(500, holders)
        return list(await asyncio.gather(*holders)), free, late

    results, free, late = node.wait(run())
    assert [result.status for result in results] == [Status.TIMEOUT] * 2
    assert len(late) > 10
    assert late[int(len(late) * 0.9)] < free[36] + 0.2, "nine of ten: other work shares this machine"


def test_many_sleepers_run_side_by_side(node: Node) -> None:
    begun = time.monotonic()
    results = node.run_all(["import time; time.sleep(0.5)"] * 24)
    assert {result.status for result in results} == {Status.OK}
    assert time.monotonic() - begun < 4.0, "24 x 0.5 s one after the other would be 6 s on two workers"


def test_a_sleeper_is_not_charged_for_its_wait_in_the_queue(node: Node) -> None:
    results = node.run_all(["x = 0\nwhile x < 1_500_000: x += 1\nprint(x)"] * 12)
    assert {result.stdout for result in results} == {"1500000\n"}
    assert max(result.queue_s for result in results) > max(result.run_s for result in results)


async def test_beyond_its_bound_the_queue_refuses_at_once(server: tuple[SandboxServer, str]) -> None:
    """A client that ignores its window is told so immediately; none of its accepted calls is lost."""
    node, endpoint = server
    client = SandboxClient([endpoint])
    await client.run("1")
    for peer in client._nodes.values():
        peer._window = 10_000
    statuses: dict[Status, int] = {}
    original = client._on_outcome

    def count(peer: object, name: str, outcome: Result | Verdict) -> None:
        if isinstance(outcome, Result):
            statuses[outcome.status] = statuses.get(outcome.status, 0) + 1
        original(peer, name, outcome)  # type: ignore[arg-type]

    for peer in client._nodes.values():
        peer._on_outcome = count
    results = await asyncio.gather(*(client.run(f"print({n})") for n in range(200)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(200)]
    assert statuses[Status.OVERLOADED] > 0
    assert node.snapshot()["refused"] == statuses[Status.OVERLOADED]
    await client.close()


async def test_a_cancelled_call_stops_and_is_forgotten(server: tuple[SandboxServer, str]) -> None:
    node, endpoint = server
    client = SandboxClient([endpoint])
    await client.run("1")
    call = asyncio.ensure_future(client.run("import time; time.sleep(1.9)"))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    begun = time.monotonic()
    while node.snapshot()["placed"] and time.monotonic() - begun < 1:
        await asyncio.sleep(0.01)
    assert node.snapshot()["statuses"].get("cancelled") == 1
    await client.close()


async def test_two_tenants_get_equal_turns(server: tuple[SandboxServer, str]) -> None:
    _, endpoint = server
    greedy, modest = SandboxClient([endpoint], tenant="greedy"), SandboxClient([endpoint], tenant="modest")
    await asyncio.gather(greedy.run("1"), modest.run("1"))
    crowd = [asyncio.ensure_future(greedy.run("sum(range(300_000))")) for _ in range(40)]
    await asyncio.sleep(0.02)
    few = [asyncio.ensure_future(modest.run("sum(range(300_000))")) for _ in range(5)]
    await asyncio.gather(*few)
    assert sum(call.done() for call in crowd) <= 20, "5 of one tenant's wait for about as many of the other's"
    await asyncio.gather(*crowd)
    await asyncio.gather(greedy.close(), modest.close())


async def test_a_higher_priority_overtakes(server: tuple[SandboxServer, str]) -> None:
    _, endpoint = server
    client = SandboxClient([endpoint])
    await client.run("1")
    low = [asyncio.ensure_future(client.run("sum(range(300_000))")) for _ in range(30)]
    await asyncio.sleep(0.02)
    await client.run("1", priority=5)
    assert sum(call.done() for call in low) < 15
    await asyncio.gather(*low)
    await client.close()


def test_a_node_whose_zygotes_never_get_warm_says_so_and_gives_up() -> None:
    node = Node(workers=1, spare=False, profile="lean")
    try:
        assert node.run("print(1)").stdout == "1\n"
        failed = asyncio.run_coroutine_threadsafe(node.server.failed(), node._loop)
        seen: set[int] = set()
        end_s = time.monotonic() + 60.0
        while not failed.done() and time.monotonic() < end_s:
            for pid in {pid for shard in node.supervisors() for pid in children(shard)} - seen:
                seen.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        assert failed.done()
        assert "can't be started any more" in str(node.server.failure)
        assert 6 <= len(seen) <= 12, "so few starts, ever longer apart, not one a second for ever"
    finally:
        node.close()
