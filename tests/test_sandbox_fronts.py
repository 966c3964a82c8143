"""The other ways in: a sandbox in three lines, the command line, JSON over HTTP; and the scientific profile."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.api import Status, Verdict
from sandbox.client import SandboxClient
from sandbox.http import HttpFront
from sandbox.local import Sandbox
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both() -> Iterator[Sandbox]:
    with Sandbox(SandboxSettings(workers=1, profile="auto", wall_s=20, cpu_s=20, memory_mib=512)) as sandbox:
        yield sandbox


def test_three_lines_are_enough(both: Sandbox) -> None:
    assert both.run("print(6 * 7)").stdout == "42\n"
    assert [result.stdout for result in both.run_all(["1", "2"])] == ["1\n", "2\n"]
    assert both.check("\\frac{1}{2}", "0.5") is Verdict.RIGHT
    session = both.session()
    session.run("x = 6")
    assert session.run("x * 7").stdout == "42\n"
    session.close()
    assert both.snapshot()["statuses"]["ok"] >= 5


def test_numpy_and_sympy_are_warm_and_draw_different_numbers(both: Sandbox) -> None:
    result = both.run("import numpy as np; print(round(float(np.linalg.det(np.eye(3) * 2)), 3))")
    assert result.stdout == "8.0\n"
    assert result.cpu_s < 0.1, "not imported again"
    assert both.run("from sympy import *; x = symbols('x'); print(solve(x**2 - 5*x + 6, x))").stdout == "[2, 3]\n"
    draws = both.run_all(["import numpy as np; np.random.random()"] * 4)
    assert len({draw.stdout for draw in draws}) == 4


def test_a_program_that_needs_no_numpy_gets_the_lean_interpreter(both: Sandbox) -> None:
    loaded = "import sys; print('sympy' in sys.modules)"
    assert both.run(loaded).stdout == "True\n", "its text names sympy"
    assert both.run("import sys; print(any(m.startswith('sym' + 'py') for m in sys.modules))").stdout == "False\n"


@pytest.mark.parametrize(("code", "exit_code", "out"), [("print(7)", 0, "7\n"), ("1/0", 1, ""), ("2", 0, "2\n")])
def test_the_command_runs_a_file(tmp_path: Path, code: str, exit_code: int, out: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(code)
    command = [sys.executable, "-m", "sandbox", "--profile", "lean", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stdout) == (exit_code, out), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == bool(exit_code)


def _request(port: int, method: str, path: str, body: object = None, token: str = "secret") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request(method, path, text, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


async def test_the_same_calls_over_http() -> None:
    server = SandboxServer(SandboxSettings(workers=1))
    client = SandboxClient([await server.start()])
    front = HttpFront(client, token="secret")
    port = await front.start()

    async def ask(*request: object, **options: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(_request, port, *request, **options)  # type: ignore[arg-type]

    status, body = await ask("POST", "/run", {"code": "print(input())", "input": "hi", "limits": {"wall_s": 2}})
    assert (status, json.loads(body)["text"], json.loads(body)["status"]) == (200, "hi", "ok")
    status, body = await ask("POST", "/check", {"answer": "7000", "gold": "70"})
    assert json.loads(body) == {"verdict": "wrong"}
    status, body = await ask("POST", "/batch", {"calls": [{"code": f"print({n})"} for n in range(20)]})
    lines = [json.loads(line) for line in body.splitlines()]
    assert {line["index"]: line["stdout"] for line in lines} == {n: f"{n}\n" for n in range(20)}
    for request, expected in (
        (("POST", "/run", "{"), 400),
        (("POST", "/run", {"code": 1}), 400),
        (("POST", "/run", {"code": "1", "limits": {"wall": 1}}), 400),
        (("POST", "/run", {"code": "1", "limits": {"wall_s": -1}}), 400),
        (("POST", "/batch", {"calls": [1]}), 400),
        (("GET", "/etc/passwd"), 404),
    ):
        status, body = await ask(*request)
        assert status == expected
        assert json.loads(body)["error"]
    assert (await ask("GET", "/health", token="guess"))[0] == 401
    assert (await ask("GET", "/health"))[0] == 200
    await front.stop()
    await client.close()
    await server.stop()


async def test_http_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        await HttpFront(SandboxClient([])).start("0.0.0.0")


def test_what_has_no_status_of_success_is_shown_to_the_person(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("print('so far', flush=True)\nwhile True: pass")
    command = [sys.executable, "-m", "sandbox", "--profile", "lean", "--wall-s", "0.3", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stdout) == (1, "so far\n")
    assert Status.TIMEOUT.value in done.stderr or "limit" in done.stderr or "timed out" in done.stderr
