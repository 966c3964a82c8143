"""The service round the calls: nothing lost, nothing mixed up, fair, bounded, honest about its own failures."""

# ruff: noqa: ASYNC110 - what is waited for happens in other processes

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from buffer.doors import make_keys
from sandbox import client as sandbox_client
from sandbox import node as sandbox_node
from sandbox.api import INFRA, Limits, Result, Status, Verdict
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_node import Node, children, eventually, namespace_pid

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


async def test_with_two_nodes_the_death_of_one_costs_nothing() -> None:
    nodes = [SandboxServer(SandboxSettings(workers=1)) for _ in range(2)]
    endpoints = [await node.start() for node in nodes]
    client = SandboxClient(lambda: endpoints)
    await asyncio.gather(*(client.run("1") for _ in range(20)))
    calls = [asyncio.ensure_future(client.run(f"print({n})")) for n in range(150)]
    while sum(call.done() for call in calls) < 30:
        await asyncio.sleep(0.005)
    assert all(node.snapshot()["calls"] > 5 for node in nodes), "both work"
    await nodes[0].stop()
    results = await asyncio.gather(*calls)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(150)]
    await client.close()
    await nodes[1].stop()


async def test_without_a_node_a_call_ends_at_its_deadline_with_the_reason() -> None:
    client = SandboxClient(["tcp://127.0.0.1:9"], timeout_s=0.3)
    result = await client.run("1")
    assert result.status is Status.WORKER_LOST
    assert "no answer within 0.3 s (tcp://127.0.0.1:9 silent" in result.exception
    await client.close()


async def test_a_wait_for_the_nodes_addresses_has_an_end_and_a_name(
    server: tuple[SandboxServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked once in vain, once more by way of an error, then told."""
    monkeypatch.setattr(sandbox_client, "RESOLVE_TIMEOUT_S", 0.2)
    asked: list[int] = []

    async def resolve() -> list[str]:
        asked.append(len(asked))
        if len(asked) == 1:
            await asyncio.Event().wait()
        if len(asked) == 2:
            raise OSError("no route")
        return [server[1]]

    client = SandboxClient(resolve, timeout_s=0.5)
    lost = await client.run("1")
    assert "no node is known; their addresses were not told within 0.2 s" in lost.exception
    assert (await client.run("print(6)", timeout_s=20.0)).stdout == "6\n"
    assert asked[:3] == [0, 1, 2]
    await client.close()


async def test_the_tick_goes_on_while_addresses_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that falls silent is found although nobody tells where the nodes are."""
    monkeypatch.setattr(sandbox_node, "SILENT_S", 1.5)
    monkeypatch.setattr(sandbox_client, "_RESOLVE_EVERY", 1)
    node = SandboxServer(SandboxSettings(workers=1))
    endpoint, hang = await node.start(), False

    async def resolve() -> list[str]:
        if hang:
            await asyncio.Event().wait()
        return [endpoint]

    client = SandboxClient(resolve)
    assert (await client.run("print(1)")).stdout == "1\n"
    hang = True
    await node.stop()
    result = await client.run("print(2)", timeout_s=4.0)
    assert "silent for" in result.exception
    await client.close()


async def test_the_same_id_is_run_once(server: tuple[SandboxServer, str]) -> None:
    node, endpoint = server
    client = SandboxClient([endpoint])
    await client.run("1")
    (peer,) = client._nodes.values()
    call = asyncio.ensure_future(client.run("import time; time.sleep(0.3); print(1)"))
    await asyncio.sleep(0.05)
    (request,) = client._requests.values()
    peer.submit(request.id, request.kind, request.fields)
    peer.flush()
    assert (await call).stdout == "1\n"
    assert node.snapshot()["calls"] == 2
    await client.close()


async def test_a_bind_beyond_loopback_needs_keys() -> None:
    with pytest.raises(ValueError, match="CURVE"):
        await SandboxServer(SandboxSettings(workers=1)).start("tcp://0.0.0.0:0")


async def test_with_keys_only_their_owner_gets_in() -> None:
    keys = make_keys()
    server = SandboxServer(SandboxSettings(workers=1))
    endpoint = await server.start("tcp://127.0.0.1:0", keys=keys)
    friend = SandboxClient([endpoint], keys=keys.for_clients())
    stranger = SandboxClient([endpoint], timeout_s=0.5)
    assert (await friend.run("print(1)")).stdout == "1\n"
    assert (await stranger.run("print(1)")).status is Status.WORKER_LOST
    await asyncio.gather(friend.close(), stranger.close())
    await server.stop()


def test_grading_keeps_right_wrong_timeout_and_unparsable_apart(node: Node) -> None:
    cases = {
        ("\\frac{140}{2}", "70"): Verdict.RIGHT,
        ("(a+b)(b+c)", "(b+c)(a+b)"): Verdict.RIGHT,
        ("69 or 70", "70"): Verdict.WRONG,
        ("\\frac{40001}{2}", "20000"): Verdict.WRONG,
        ("10^{10^9}", "70"): Verdict.TIMEOUT,
        ("{{{", "70"): Verdict.UNPARSABLE,
        ("x=70", "70"): Verdict.RIGHT,
        ("7000", "70"): Verdict.WRONG,
    }
    assert node.check_all(cases) == list(cases.values())


def test_a_batch_with_an_answer_that_never_ends_grades_the_others(node: Node) -> None:
    pairs = [(f"\\frac{{{2 * n}}}{{2}}", str(n)) for n in range(40)]
    pairs[7] = ("2^{2^{34}}", "5")
    verdicts = node.check_all(pairs)
    assert verdicts[7] is Verdict.TIMEOUT
    assert [v for n, v in enumerate(verdicts) if n != 7] == [Verdict.RIGHT] * 39
    assert eventually(lambda: not node.guests())


async def test_a_spare_child_serves_the_next_program_and_only_that() -> None:
    server = SandboxServer(SandboxSettings(workers=1, wall_s=0.5))
    client = SandboxClient([await server.start()])
    zygote = children(server._shards[0].pid)[0]

    def waiting() -> list[int]:
        return [pid for pid in children(zygote) if namespace_pid(pid) > 1]

    assert (await client.run("x = 1; print(x)")).stdout == "1\n"
    await asyncio.sleep(0.5)  # the first program's child is gone by now
    assert await asyncio.to_thread(eventually, lambda: len(waiting()) == 1)
    spare = waiting()
    await asyncio.sleep(0.6)
    assert waiting() == spare, "it may wait longer than a program may run"
    number = namespace_pid(spare[0])
    assert (await client.run("import os; print(os.getpid())")).stdout == f"{number}\n"
    other = await client.run("'x' in globals()", limits=Limits(memory_mib=77))
    assert other.stdout == "False\n", "a program with other limits gets a child of its own"
    results = await asyncio.gather(*(client.run(f"print({n})") for n in range(50)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(50)]
    for pid in waiting():
        os.kill(pid, signal.SIGKILL)
    assert (await client.run("print(2)")).stdout == "2\n"
    await client.close()
    await server.stop()
