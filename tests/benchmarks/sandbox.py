"""The sandbox's speed, beside the floors of the machine and, given a checkout, beside code-judge.

`python -m tests.benchmarks.sandbox --json [--passes 3] [--workers 1] [--cores 1] [--concurrency 1,32,256]
 [--cases print,numpy] [--code-judge PATH_OR_URL [--code-judge-python PYTHON]]`

Consumes    idle cores (--cores: so many, everything together); a checkout of code-judge or its address, if one is named
Produces    per case and concurrency: calls/s, p50, p95 and CPU-ms per call, the median of the passes, and the ratios to
            code-judge; the systems take turns within a pass
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.benchmarks import code_judge
from tests.benchmarks.burst import node_processes
from tests.sandbox_answers import answer_pairs, hard_pairs, is_wrong

PROGRAMS = {
    "print": "print(6 * 7)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(8) * 2))",
    "sympy": "from sympy import *; x = symbols('x'); print(solve(x**2 - 5*x + 6, x))",
    "work": "n = 0\nwhile n < 400_000: n += 1\nprint(n)",
    "sleep": "import time; time.sleep(0.2)",
    "spaced": "print(6 * 7)",
}
ANSWERS = {"verify": answer_pairs, "verify-hard": hard_pairs}
"""Answers of the usual kinds, none a plain number; answers that take algebra."""
CALLS = {1: 60, 32: 320, 256: 768}
SLOW = ("sympy", "sleep", "work", "spaced")
JUDGE_CALLS = {1: 12, 32: 48, 256: 256}
"""Of code-judge, which would take minutes."""
_VERIFY = (
    "from math_verify import parse, verify\n"
    "print(verify(parse('$' + {gold!r} + '$', parsing_timeout=None), parse('$' + {answer!r} + '$',"
    " parsing_timeout=None), timeout_seconds=None))"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One case at one concurrency, of one system."""

    system: str
    case: str
    concurrency: int
    calls_per_s: float
    p50_ms: float
    p95_ms: float
    cpu_ms_per_call: float
    lost: int


Once = Callable[[], Awaitable[bool]]


def _cpu_s(pids: list[int]) -> float:
    """CPU-seconds of processes and of the children that they waited for."""
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        total += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


async def _load(once: Once, calls: int, concurrency: int, pause_s: float) -> tuple[float, list[float], int]:
    """Seconds in all, seconds of each call, and how many were not answered."""
    gate = asyncio.Semaphore(concurrency)
    times: list[float] = []
    lost = 0

    async def one() -> None:
        nonlocal lost
        async with gate:
            begun = time.perf_counter()
            lost += not await once()
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(pause_s)

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(calls)))
    return time.perf_counter() - begun, sorted(times), lost


async def _measure(
    system: str, case: str, concurrency: int, once: Once, pids: Callable[[], list[int]] | None
) -> Figure:
    calls = CALLS.get(concurrency, 4 * concurrency) // (2 if case in SLOW else 1)
    if pids is None:
        calls = min(calls, JUDGE_CALLS.get(concurrency, 2 * concurrency))
    await asyncio.gather(*(once() for _ in range(2 if pids is None else 8)))
    before = _cpu_s(pids()) if pids else 0.0
    wall_s, times, lost = await _load(once, calls, concurrency, 0.06 if case == "spaced" else 0.0)
    used_s = _cpu_s(pids()) - before if pids else 0.0
    return Figure(
        system=system,
        case=case,
        concurrency=concurrency,
        calls_per_s=round(calls / wall_s, 1),
        p50_ms=round(times[len(times) // 2] * 1e3, 2),
        p95_ms=round(times[int(len(times) * 0.95)] * 1e3, 2),
        cpu_ms_per_call=round(used_s / calls * 1e3, 2),
        lost=lost,
    )


def _ours(client: SandboxClient, case: str, numbers: itertools.count[int]) -> Once:
    async def run() -> bool:
        return (await client.run(PROGRAMS[case])).status.value == "ok"

    async def check() -> bool:
        # A pair that no earlier one equals: nothing of it may be remembered.
        (pair,) = ANSWERS[case](1, next(numbers))
        return (await client.check(*pair)).value == ("wrong" if is_wrong(pair) else "right")

    return check if case in ANSWERS else run


def _judge(url: str, case: str, concurrency: int, numbers: itertools.count[int]) -> Once:
    """A call of the published service, as its own client makes it."""

    async def once() -> bool:
        code = PROGRAMS.get(case, "")
        if not code:
            ((answer, gold),) = ANSWERS[case](1, next(numbers))
            code = _VERIFY.format(answer=answer, gold=gold)
        return await asyncio.to_thread(code_judge.call, url, code, many=concurrency > 1)

    return once


def floors() -> dict[str, float]:
    """What nothing can be faster than here, in ms: median of several."""

    def timed(action: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            begun = time.perf_counter()
            action()
            taken.append(time.perf_counter() - begun)
        return round(statistics.median(taken) * 1e3, 2)

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def python(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    return {
        "bare_fork_of_this_process_ms": timed(fork, 100),
        "python_pass_ms": timed(python("pass"), 10),
        "import_numpy_ms": timed(python("import numpy"), 3),
        "import_sympy_ms": timed(python("import sympy"), 3),
        "import_math_verify_ms": timed(python("import math_verify"), 3),
    }


async def compare(arguments: argparse.Namespace, judge_url: str) -> list[Figure]:
    """All figures, the median over the passes."""
    server = SandboxServer(SandboxSettings(workers=arguments.workers, profile="auto", wall_s=10, cpu_s=10))
    client = SandboxClient([await server.start()])
    numbers = itertools.count(11)
    await asyncio.gather(*(client.check(*pair) for pair in answer_pairs(20, 100_000)))
    figures: dict[tuple[str, str, int], list[Figure]] = {}
    for _ in range(arguments.passes):
        for case in arguments.cases:
            for concurrency in arguments.concurrency if case != "spaced" else [1]:
                systems: list[tuple[str, Once, Callable[[], list[int]] | None]] = [
                    ("rocstar", _ours(client, case, numbers), lambda: [os.getpid(), *node_processes(server)])
                ]
                if judge_url:
                    systems.append(("code-judge", _judge(judge_url, case, concurrency, numbers), None))
                for system, once, pids in systems:
                    figure = await _measure(system, case, concurrency, once, pids)
                    figures.setdefault((system, case, concurrency), []).append(figure)
    await client.close()
    await server.stop()
    return [_median(several) for several in figures.values()]


def _median(several: list[Figure]) -> Figure:
    names = ("calls_per_s", "p50_ms", "p95_ms", "cpu_ms_per_call", "lost")
    middle = {name: statistics.median(getattr(figure, name) for figure in several) for name in names}
    return Figure(**(asdict(several[0]) | middle))


def ratios(figures: list[Figure]) -> list[dict[str, Any]]:
    """How much less time and how many more calls than code-judge, and the spread of ours."""
    theirs = {(figure.case, figure.concurrency): figure for figure in figures if figure.system == "code-judge"}
    rows = []
    for ours in figures:
        if ours.system == "code-judge":
            continue
        row = {"case": ours.case, "concurrency": ours.concurrency, "p95_over_p50": round(ours.p95_ms / ours.p50_ms, 2)}
        other = theirs.get((ours.case, ours.concurrency))
        if other is not None:
            row["code_judge_p50_over_ours"] = round(other.p50_ms / ours.p50_ms, 1)
            row["calls_per_s_over_code_judge"] = round(ours.calls_per_s / other.calls_per_s, 1)
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[*PROGRAMS, *ANSWERS])
    parser.add_argument("--code-judge", default="")
    parser.add_argument("--code-judge-python", default=sys.executable)
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-arguments.cores :])
    report: dict[str, Any] = {"workers": arguments.workers, "cores": len(os.sched_getaffinity(0))}
    report |= {"load_1min": os.getloadavg()[0], "floors": floors()}
    with code_judge.running(arguments.code_judge, arguments.code_judge_python) as url:
        figures = asyncio.run(compare(arguments, url))
    report |= {"figures": [asdict(figure) for figure in figures], "ratios": ratios(figures)}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for figure in report["figures"]:
        print("{system:10} {case:11} x{concurrency:<4} {calls_per_s:8.1f}/s p50 {p50_ms:8.2f} p95 {p95_ms:8.2f} ms "
              "cpu {cpu_ms_per_call:6.2f} ms lost {lost}".format(**figure))  # fmt: skip
    print(report["ratios"], report["floors"])


if __name__ == "__main__":
    main()
