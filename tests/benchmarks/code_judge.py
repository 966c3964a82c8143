"""code-judge (github.com/0xWJ/code-judge) as a neighbour to compare with: started from a checkout, or found at a URL.

Consumes    the path of a checkout and a Python that has its requirements (and numpy, sympy, math-verify), and
            `redis-server` on the PATH; or the address of one that is listening
Produces    its address while the context lasts; one call of it
Waits for   its answer to /ping (at most START_S)
Invariant   2 workers, as it is published; it is no dependency, and every process started here ends with the context
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_S = 60.0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(where: str, python: str) -> Iterator[str]:
    """The address of code-judge; `where` is that already, or the checkout to start it from with `python`."""
    if not where or where.startswith("http"):
        yield where
        return
    redis, port = _free_port(), _free_port()
    environment = {
        **os.environ,
        "REDIS_URI": f"redis://127.0.0.1:{redis}",
        "MAX_WORKERS": "2",
        "PYTHON_EXECUTOR_PATH": python,
        "MAX_MEMORY": "1024",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        commands = (
            ["redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            [python, "-m", "uvicorn", "app.main:app", "--host", "127.0.0.1", "--port", str(port), "--no-access-log"],
            [python, "run_workers.py"],
        )
        for command in commands:
            log = stack.enter_context(open(Path(folder, "log"), "ab"))
            process = subprocess.Popen(
                command, cwd=where, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_end, process)
            if command[0] == "redis-server":
                _await_port(redis)
        url = f"http://127.0.0.1:{port}"
        _await_ping(url, Path(folder, "log"))
        yield url


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and its workers, which would outlive it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _await_port(port: int) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"redis-server did not listen within {START_S:.0f} s")


def _await_ping(url: str, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if call(url, "print(1)", many=False):
                return
        time.sleep(0.2)
    raise TimeoutError(f"code-judge ran nothing within {START_S:.0f} s: {log.read_text(errors='replace')[-2000:]}")


def call(url: str, code: str, *, many: bool) -> bool:
    """One call, as its own client makes it: alone by /run, among many by /run/long-batch. Whether it succeeded."""
    submission = {"type": "python", "solution": code, "input": ""}
    path = "/run/long-batch" if many else "/run"
    body = {"type": "batch", "submissions": [submission]} if many else submission
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        result = json.loads(answer.read())
    return bool((result["results"][0] if many else result)["success"])
