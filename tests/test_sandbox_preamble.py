"""The recipe's preamble: its names are the program's, its failure is none of the program's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from sandbox.api import Status
from sandbox.session import Session
from sandbox.settings import SandboxSettings
from tests.sandbox_node import Node, leaving_nothing

HELPERS = "import math, time\ndef area(r):\n    return math.pi * r * r\ntime.sleep(0.2)\nnumber = call_number"
FAILING = "if call_number > 1:\n    raise ValueError('no licence left')"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with leaving_nothing(workers=1, spare=False, wall_s=5.0, preamble=HELPERS) as node:
        yield node


@pytest.mark.parametrize("text", ["def f(:", "x = '\0'"])
def test_what_is_no_python_is_refused_with_the_settings(text: str) -> None:
    with pytest.raises(ValidationError, match="is no Python"):
        SandboxSettings(preamble=text)


@pytest.mark.slow
def test_its_names_are_the_programs_and_lines_are_counted_in_the_program(node: Node) -> None:
    assert node.run("round(area(2), 3)").stdout == "12.566\n"
    assert node.run("x = 1\ncall_number").line == 2


@pytest.mark.slow
def test_calls_that_wait_in_it_hold_no_worker(node: Node) -> None:
    begun = time.monotonic()
    results = node.run_all(["print(number)"] * 8)
    assert time.monotonic() - begun < 8 * 0.2
    assert {result.status for result in results} == {Status.OK}
    assert len({result.stdout for result in results}) == 8
    assert all(result.run_s > 0.2 for result in results)


@pytest.mark.slow
def test_it_runs_once_before_a_session(node: Node) -> None:
    session = node.client.session()
    assert node.wait(session.run("number += 1\narea(0)")).stdout == "0.0\n"
    begun = time.monotonic()
    assert node.wait(session.run("area(1) > 3 and number > 1")).stdout == "True\n"
    assert time.monotonic() - begun < 0.2
    node.wait(closed(session))


@pytest.mark.slow
def test_what_it_raises_is_the_sandboxs_failure() -> None:
    with leaving_nothing(workers=1, spare=False, preamble=FAILING) as node:
        assert node.run("print(6 * 7)").stdout == "42\n"
        failed = node.run("print(6 * 7)")
        assert (failed.status, failed.exception) == (Status.INTERNAL, "sandbox.preamble: ValueError: no licence left")
        session = node.client.session()
        assert node.wait(session.run("x = 1")).status is Status.INTERNAL


async def closed(session: Session) -> None:
    """On the node's loop."""
    session.close()
