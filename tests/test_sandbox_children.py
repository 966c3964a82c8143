"""Children that outlive a job or wait for one: graders, spares, standby zygotes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from sandbox import server as sandbox_server
from sandbox.api import Limits, Verdict
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_node import Node, children, eventually, namespace_pid, process_name

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node(workers=1, spare=False, wall_s=2.0, cpu_s=5.0)
    yield node
    node.close()


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


def _graders(zygotes: list[int]) -> list[int]:
    def named(pid: int) -> bool:
        return process_name(pid) == "rocstar-grader"

    return [pid for zygote in zygotes for pid in children(zygote) if named(pid)]


def test_a_grader_is_kept_until_a_comparison_was_interrupted_in_it(node: Node) -> None:
    assert node.check_all([("\\sqrt{4}", "2")]) == [Verdict.RIGHT]
    first = _graders(node.zygotes())
    assert len(first) == 1
    assert node.check_all([(f"{n}\\sqrt{{4}}", f"{2 * n}") for n in range(3, 50)]) == [Verdict.RIGHT] * 47
    assert _graders(node.zygotes()) == first
    pairs = [("x+1", "1+x"), ("10^{10^9}", "7"), ("x+2", "2+x")]
    assert node.check_all(pairs) == [Verdict.RIGHT, Verdict.TIMEOUT, Verdict.RIGHT]
    assert eventually(lambda: not set(first) & set(_graders(node.zygotes())))


def test_a_grader_that_is_killed_at_rest_or_at_work_costs_at_most_its_answer(node: Node) -> None:
    for _ in range(2):
        assert node.check_all([("\\sqrt{9}", "3")]) == [Verdict.RIGHT]
        for pid in _graders(node.zygotes()):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not _graders(node.zygotes()))
    calls = node.start_checks([("10^{10^9}", "7"), ("\\sqrt{16}", "4")])
    assert eventually(lambda: bool(_graders(node.zygotes())))
    time.sleep(0.3)  # it is at the first answer by then: nothing outside it tells
    for pid in _graders(node.zygotes()):
        os.kill(pid, signal.SIGKILL)
    assert calls.result(30) == [Verdict.TIMEOUT, Verdict.RIGHT]


async def test_a_standby_zygote_takes_a_dead_ones_place_without_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "_FEW_CORES", 0)
    server = SandboxServer(SandboxSettings(workers=1, spare=False))
    client = SandboxClient([await server.start()])
    supervisor = server._shards[0].pid
    assert await asyncio.to_thread(eventually, lambda: len(children(supervisor)) == 2, 10)
    used, standby = children(supervisor)
    assert (await client.run("print(1)")).stdout == "1\n"
    assert await asyncio.to_thread(eventually, lambda: len(children(standby)) == 2, 10), "it is warm"
    os.kill(used, signal.SIGKILL)
    assert (await client.run("print(2)")).stdout == "2\n"
    assert children(supervisor)[0] == standby
    assert await asyncio.to_thread(eventually, lambda: len(children(supervisor)) == 2, 10), "it has a successor"
    assert server.snapshot()["zygote_restarts"] == 1
    await client.close()
    await server.stop()
