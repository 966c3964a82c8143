"""What a session costs: the latency of its cells from turn to turn, and the memory of many that live at once.

`python -m tests.benchmarks.sessions --json [--sessions 500] [--turns 10] [--timed 30] [--cores 1] [--profile sci]`

Consumes    idle cores
Produces    milliseconds of turns 1 to N as the client sees them, and what the node adds to the time of the cell's own
            code; a program of its own beside it; private memory per live session
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.benchmarks.burst import node_processes
from tests.sandbox_node import children

FIRST = "import time\nx = list(range(100))"
CELL = "begun = time.perf_counter()\nx.append(len(x))\nprint(time.perf_counter() - begun)"
PAUSE_S = 0.06


async def _timed(client: SandboxClient, turns: int, count: int) -> dict[str, Any]:
    """Latency by turn, the median over `count` sessions; beside it a program that begins anew each time."""
    seen: list[list[float]] = [[] for _ in range(turns)]
    added: list[float] = []
    alone: list[float] = []
    for _ in range(count):
        session = client.session()
        for turn in range(turns):
            begun = time.perf_counter()
            result = await session.run(CELL if turn else f"{FIRST}\n{CELL}")
            seen[turn].append(time.perf_counter() - begun)
            assert result.status.value == "ok", result
            if turn:
                added.append(result.run_s - float(result.stdout))
            await asyncio.sleep(PAUSE_S)
        session.close()
        begun = time.perf_counter()
        await client.run(f"{FIRST}\n{CELL}")
        alone.append(time.perf_counter() - begun)
        await asyncio.sleep(PAUSE_S)
    by_turn = [round(statistics.median(times) * 1e3, 2) for times in seen]
    return {
        "sessions_timed": count,
        "turn_ms": by_turn,
        "last_turn_over_first": round(by_turn[-1] / by_turn[0], 2),
        "last_turn_over_second": round(by_turn[-1] / by_turn[1], 2),
        "cell_adds_ms": round(statistics.median(added) * 1e3, 2),
        "program_ms": round(statistics.median(alone) * 1e3, 2),
    }


def _private_kib(pid: int) -> int:
    """Memory that is this process's alone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _below(pids: list[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        found += children(pid)
    return found


async def _alive(client: SandboxClient, server: SandboxServer, count: int) -> dict[str, Any]:
    """Memory of many sessions at rest, each of which ran two cells."""
    processes = [shard.pid for shard in server._shards]
    before_kib = sum(map(_private_kib, _below(processes)))
    sessions = [client.session() for _ in range(count)]
    begun = time.perf_counter()
    for cell in (FIRST, CELL):
        results = await asyncio.gather(*(session.run(cell) for session in sessions))
        assert {result.status.value for result in results} == {"ok"}
    made_s = time.perf_counter() - begun
    after_kib = sum(map(_private_kib, _below(processes)))
    results = await asyncio.gather(*(session.run("x") for session in sessions[:20]))
    return {
        "live_sessions": count,
        "private_mib": (after_kib - before_kib) >> 10,
        "private_mib_per_session": round((after_kib - before_kib) / 1024 / count, 2),
        "lasting_processes_rss_mib": sum(map(_rss_kib, node_processes(server))) >> 10,
        "two_cells_each_s": round(made_s, 1),
        "evicted": server.snapshot()["sessions_evicted"],
        "lost": sum(result.status.value != "ok" for result in results),
    }


def _rss_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    settings = SandboxSettings(
        workers=arguments.workers, profile=arguments.profile, sessions=arguments.sessions + 8, wall_s=10, cpu_s=10
    )
    server = SandboxServer(settings)
    client = SandboxClient([await server.start()], timeout_s=600)
    await client.run(FIRST)
    report = await _timed(client, arguments.turns, arguments.timed)
    report |= await _alive(client, server, arguments.sessions)
    await client.close()
    await server.stop()
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--timed", type=int, default=30)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--profile", default="sci")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-arguments.cores :])
    report = {"profile": arguments.profile, "load_1min": os.getloadavg()[0]} | asyncio.run(measure(arguments))
    print(json.dumps(report, indent=1) if arguments.json else report)


if __name__ == "__main__":
    main()
