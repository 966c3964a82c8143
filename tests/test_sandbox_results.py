"""Odd and ordinary programs: what their results say is what happened, and the module leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.api import Status, is_infra
from tests.sandbox_node import Node, leaving_nothing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with leaving_nothing(workers=2, spare=False, wall_s=1.0, cpu_s=5.0, memory_mib=128) as node:
        yield node


@pytest.mark.parametrize(
    ("code", "status", "number"),
    [
        ("import os; os.abort()", Status.SIGNAL, 6),
        ("import os; os.kill(os.getpid(), 9)", Status.SIGNAL, 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", Status.SIGNAL, 15),
        ("import ctypes; ctypes.string_at(0)", Status.SIGNAL, 11),
        ("import os; os._exit(4)", Status.EXIT, 4),
        ("import sys; sys.exit(3)", Status.EXIT, 3),
        ("import sys; sys.exit('sorry')", Status.EXIT, 1),
        ("raise SystemExit", Status.OK, 0),
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'exit 5'])", Status.EXIT, 5),
    ],
)
def test_how_a_process_ends_is_told_truly(node: Node, code: str, status: Status, number: int) -> None:
    result = node.run("print('out')\n" + code)
    assert (result.status, result.signal or result.exit_code) == (status, number)
    assert result.stdout == "out\n"


@pytest.mark.parametrize(
    ("code", "exception", "line"),
    [
        ("print(1)\nprnt(2)", "NameError: name 'prnt' is not defined", 2),
        ("x = 1\nprint('a'\n", "SyntaxError: '(' was never closed", 2),
        ("def f():\n  return 1 / 0\n\nf()", "ZeroDivisionError: division by zero", 2),
        ("import json\njson.loads('x')", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 2),
        ("from __future__ import annotations\nassert False", "AssertionError", 2),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded", 1),
        ("input()", "EOFError: EOF when reading a line", 1),
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E: <no message>", 3),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
    ],
)
def test_an_exception_is_named_with_the_users_line(node: Node, code: str, exception: str, line: int) -> None:
    result = node.run(code)
    assert (result.status, result.exception, result.line) == (Status.ERROR, exception, line)


def test_deep_recursion_without_limit_never_hangs(node: Node) -> None:
    result = node.run("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()", wall_s=0.7)
    assert result.status in (Status.SIGNAL, Status.MEMORY, Status.TIMEOUT, Status.ERROR)


def test_text_that_is_no_program_is_a_bad_request(node: Node) -> None:
    for code in ("print('\ud800')", "print(1)\0"):
        result = node.run(code)
        assert result.status is Status.BAD_REQUEST
        assert not is_infra(result.status)


def test_output_that_is_no_text_is_shown_somehow(node: Node) -> None:
    assert node.run("print('\\ud800')").stdout == "\\ud800\n"
    assert node.run("import os; os.write(1, b'a\\xffb')").stdout == "a\ufffdb"


def test_markers_of_other_systems_mean_nothing(node: Node) -> None:
    assert node.run("print('@@E error: timeout')").status is Status.OK


def test_a_program_of_a_megabyte_runs(node: Node) -> None:
    result = node.run("x = 0\n" + "x += 1 # padding\n" * 62_000 + "print(x)", wall_s=20.0, cpu_s=20.0)
    assert result.stdout == "62000\n"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import asyncio\nasync def f(): await asyncio.sleep(0.01); return 3\nprint(asyncio.run(f()))", "3"),
        ((
            "from multiprocessing import Pool\n"
            "def f(x): return x * x\n"
            "with Pool(2) as p: print(p.map(f, [1, 2, 3]))"
        ), "[1, 4, 9]"),
        ((
            "import subprocess\n"
            "print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout.strip())"
        ), "hi"),
        ((
            "import subprocess, sys\n"
            "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout.strip())"
        ), "5"),
        ("import threading\nt = threading.Thread(target=lambda: print('t'))\nt.start()", "t"),
        ("import atexit\natexit.register(print, 'end')", "end"),
        ("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: print('child')", "child"),
        ("a = 2\na * 21", "42"),
        ("print(1)\n5", "1"),
        ("None", ""),
        ("'x'", "'x'"),
        ("import sys; print(sys.argv, __name__)", "['<code>'] __main__"),
        ("import random; a = random.random(); print(0 <= a < 1)", "True"),
        ("", ""),
    ],
)  # fmt: skip
def test_ordinary_python_works(node: Node, code: str, shown: str) -> None:
    result = node.run(code, wall_s=10.0, cpu_s=10.0)
    assert result.status is Status.OK, result
    assert result.to_text() == shown


def test_input_is_read_by_every_way(node: Node) -> None:
    assert node.run("print(input(), input())", "a\nb\n").stdout == "a b\n"
    assert node.run("import sys\nprint(sys.stdin.read())", "x" * 200_000).stdout.count("x") > 60_000
    assert node.run("import sys\nprint(len(sys.stdin.buffer.read()))", "\u00e9" * 100_000).stdout == "200000\n"


def test_random_numbers_differ_between_calls(node: Node) -> None:
    results = node.run_all(["import random; print(random.random())"] * 8)
    assert len({result.stdout for result in results}) == 8
