"""One burst of a seeded mix of calls through a sandbox node, every answer checked.

`python -m tests.benchmarks.burst --json [--calls 45000] [--workers 1] [--kill]`

Consumes    idle cores
Produces    calls/s, what was lost or wrong, the memory of the node's processes; with --kill a zygote and a supervisor
            die in the middle
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from sandbox.api import Limits
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.sandbox_mix import mix
from tests.sandbox_node import children, process_name


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
    rss_mib = []
    victims = {count // 3: lambda: children(server._shards[0].pid), count // 2: lambda: [server._shards[0].pid]}
    while (done := sum(call.done() for call in calls)) < count:
        await asyncio.sleep(0.5)
        for at in [at for at in victims if kill and done >= at and not server._dispatch.num_suspect][:1]:
            for pid in victims.pop(at)()[:1]:
                os.kill(pid, signal.SIGKILL)
        rss_mib.append(sum(map(_rss_kib, node_processes(server))) >> 10)
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
        "processes_rss_mib": max(rss_mib),
        "processes_rss_mib_by_tenth": rss_mib[:: max(1, len(rss_mib) // 10)],
        "client_and_front_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "load_1min": os.getloadavg()[0],
        "statuses": snapshot["statuses"],
        "restarts": [snapshot["zygote_restarts"], snapshot["shard_restarts"]],
    }


def _rss_kib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
    except FileNotFoundError:
        return 0


def node_processes(server: SandboxServer) -> list[int]:
    """The node's lasting processes, below this one: supervisors, zygotes, graders."""
    supervisors = [shard.pid for shard in server._shards]
    zygotes = [pid for parent in supervisors for pid in children(parent)]
    graders = [pid for parent in zygotes for pid in children(parent) if process_name(pid) == "rocstar-grader"]
    return [*supervisors, *zygotes, *graders]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=45_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
    report = asyncio.run(burst(arguments.calls, arguments.workers, arguments.kill))
    print(json.dumps(report, indent=1) if arguments.json else report)


if __name__ == "__main__":
    main()
