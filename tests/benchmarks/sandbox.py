"""The sandbox's speed, beside the floors of the machine and, given a checkout, beside code-judge.

`python -m tests.benchmarks.sandbox --json [--passes 3] [--workers 1] [--concurrency 1,32,256] [--cases print,numpy]
 [--mix 45000 [--kill]] [--code-judge URL]`

Consumes    idle cores; a code-judge that is listening at URL (its own server, redis and 2 workers), if one is named
Produces    per case and concurrency: calls/s, p50, p95 and CPU-ms per call, the median of the passes; the systems take
            turns within a pass. --mix: one burst of a seeded mix, every answer checked, with losses and memory
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandbox.api import Limits
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_mix import mix
from tests.sandbox_node import children

CASES = {
    "print": "print(6 * 7)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(8) * 2))",
    "sympy": "from sympy import *; x = symbols('x'); print(solve(x**2 - 5*x + 6, x))",
    "work": "n = 0\nwhile n < 400_000: n += 1\nprint(n)",
    "sleep": "import time; time.sleep(0.2)",
    "spaced": "print(6 * 7)",
    "verify": "",
}
CALLS = {1: 60, 32: 320, 256: 768}
SLOW = ("sympy", "sleep", "work", "spaced")
PAIR = ("\\frac{x^2-1}{x-1}", "x+1")


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


Once = Callable[[int], Awaitable[bool]]


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


def _tree(server: SandboxServer) -> list[int]:
    """The node's lasting processes: this one, supervisors, zygotes."""
    supervisors = [shard.pid for shard in server._shards]
    return [os.getpid(), *supervisors, *(pid for parent in supervisors for pid in children(parent))]


async def _load(once: Once, calls: int, concurrency: int, pause_s: float) -> tuple[float, list[float], int]:
    """Seconds in all, seconds of each call, and how many were not answered."""
    gate = asyncio.Semaphore(concurrency)
    times: list[float] = []
    lost = 0

    async def one(number: int) -> None:
        nonlocal lost
        async with gate:
            begun = time.perf_counter()
            lost += not await once(number)
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(pause_s)

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(calls)))
    return time.perf_counter() - begun, sorted(times), lost


async def _measure(
    system: str, case: str, concurrency: int, once: Once, pids: Callable[[], list[int]] | None
) -> Figure:
    calls = CALLS.get(concurrency, 4 * concurrency) // (2 if case in SLOW else 1)
    await asyncio.gather(*(once(number) for number in range(-4, 0)))
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


def _ours(client: SandboxClient, case: str) -> Once:
    async def run(number: int) -> bool:
        return (await client.run(CASES[case])).status.value == "ok"

    async def check(number: int) -> bool:
        # A pair that no earlier one equals: nothing may be remembered.
        return (await client.check(f"{PAIR[0]}+{number + 9}", f"{PAIR[1]}+{number + 9}")).value == "right"

    return check if case == "verify" else run


def _code_judge(url: str, case: str, concurrency: int) -> Once:
    """A call of the published service, as its own client makes it."""
    verify = (
        "from math_verify import parse, verify\n"
        f"print(verify(parse('$' + {PAIR[1]!r} + '$'), parse('$' + {PAIR[0]!r} + '$')))"
    )
    submission = {"type": "python", "solution": verify if case == "verify" else CASES[case], "input": ""}
    path, body = ("/run", submission) if concurrency == 1 else (
        "/run/long-batch", {"type": "batch", "submissions": [submission]}
    )  # fmt: skip

    def post() -> bool:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            result = json.loads(answer.read())
        return bool((result["results"][0] if "results" in result else result)["success"])

    async def once(number: int) -> bool:
        return await asyncio.to_thread(post)

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
    }


async def compare(arguments: argparse.Namespace) -> list[Figure]:
    """All figures, the median over the passes."""
    server = SandboxServer(SandboxSettings(workers=arguments.workers, profile="auto", wall_s=10, cpu_s=10))
    client = SandboxClient([await server.start()])
    await client.check(*PAIR)
    figures: dict[tuple[str, str, int], list[Figure]] = {}
    for _ in range(arguments.passes):
        for case in arguments.cases:
            for concurrency in arguments.concurrency if case != "spaced" else [1]:
                systems = [("rocstar", _ours(client, case), lambda: _tree(server))]
                if arguments.code_judge:
                    systems.append(("code-judge", _code_judge(arguments.code_judge, case, concurrency), None))
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


async def burst(count: int, workers: int, kill: bool) -> dict[str, Any]:
    """The seeded mix in one burst; `kill`: a zygote and a supervisor die in the middle.

    The second dies when what the first took along is done, for a program that two processes died with is given up.
    """
    server = SandboxServer(SandboxSettings(workers=workers, profile="auto", wall_s=4, queue_bound=3000))
    client = SandboxClient([await server.start()], timeout_s=7200)
    cases = mix(count, seed=1)
    limits = Limits(wall_s=4.0, cpu_s=4.0)
    begun = time.perf_counter()
    calls = [asyncio.ensure_future(client.run(case.code, limits=limits)) for case in cases]
    highest_kib = 0
    victims = {count // 3: lambda: children(server._shards[0].pid), count // 2: lambda: [server._shards[0].pid]}
    while (done := sum(call.done() for call in calls)) < count:
        await asyncio.sleep(0.5)
        highest_kib = max(highest_kib, sum(map(_rss_kib, _tree(server)[1:])))
        for at in [at for at in victims if kill and done >= at and not server._dispatch.num_suspect][:1]:
            for pid in victims.pop(at)()[:1]:
                os.kill(pid, signal.SIGKILL)
    wall_s = time.perf_counter() - begun
    results = [call.result() for call in calls]
    wrong = [(case, result) for case, result in zip(cases, results, strict=True) if not case.met_by(result)]
    snapshot = server.snapshot()
    await client.close()
    await server.stop()
    return {
        "calls": count,
        "wall_s": round(wall_s, 1),
        "calls_per_s": round(count / wall_s, 1),
        "lost": sum(result.infra for result in results),
        "wrong": len(wrong),
        "examples": [f"{case.code!r} -> {result}"[:400] for case, result in wrong[:5]],
        "processes_rss_mib": highest_kib >> 10,
        "client_and_front_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "statuses": snapshot["statuses"],
        "restarts": [snapshot["zygote_restarts"], snapshot["shard_restarts"]],
    }


def _rss_kib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
    except FileNotFoundError:
        return 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--mix", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--code-judge", default="")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"workers": arguments.workers, "load_1min": os.getloadavg()[0]}
    if arguments.mix:
        report["mix"] = asyncio.run(burst(arguments.mix, arguments.workers, arguments.kill))
    else:
        report |= {"floors": floors(), "figures": [asdict(figure) for figure in asyncio.run(compare(arguments))]}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for figure in report.get("figures", []):
        print("{system:10} {case:7} x{concurrency:<4} {calls_per_s:8.1f}/s p50 {p50_ms:8.2f} p95 {p95_ms:8.2f} ms "
              "cpu {cpu_ms_per_call:6.2f} ms lost {lost}".format(**figure))  # fmt: skip
    print(report.get("mix") or report["floors"])


if __name__ == "__main__":
    main()
