"""One step of the paper's load through the buffer: leased, pushed turn by turn, filtered, taken, fetched.

`python -m tests.benchmarks.wire --json [--groups 512] [--rollouts 32] [--tokens 8192] [--turns 3] [--senders 1,64]`

Consumes    idle cores and a disk; the buffer is a process of its own, its peers are this process
Produces    seconds and MB/s of each phase, the same bytes by plain append + fdatasync beside it (in pieces of the
            mean size of the buffer's commits) and by a bare pipeline beside it, the buffer's peak RSS
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from buffer.client import BufferClient
from buffer.schema import Decision, Lease, LogProbs, Turn, VersionRun
from tests.benchmarks.bare_wire import bare
from tests.buffers import Peers, Process, finish, settings

ROLLOUTS_AT_ONCE = 64
"""of one sender; many senders have four each at least"""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step consists of."""

    groups: int
    rollouts: int
    tokens: int
    turns: int


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run; bytes are of token ids and log-probs."""

    senders: int
    load: Load
    megabytes: float
    lease_s: float
    ingest_s: float
    ingest_mb_s: float
    plain_mb_s: float
    share_of_plain: float
    bare_mb_s: float
    """the least a Python process does to take in as many messages and bytes: bare_wire.py"""
    filter_s: float
    take_s: float
    total_s: float
    fetch_s: float
    commits: int
    commit_megabytes: float
    buffer_cpu_s: float
    buffer_peak_rss_mb: float


def make_turn(load: Load, lease: Lease, number: int, payload: LogProbs) -> Turn:
    count = load.tokens // load.turns
    ids = payload.view(np.int32)[number : number + count]
    return Turn(
        group=lease.group,
        rollout=lease.rollout,
        attempt=lease.attempt,
        turn=number,
        prompt_ids=ids[: 128 if number == 0 else 0],
        output_ids=ids,
        logprobs=payload[number : number + count],
        version_runs=(VersionRun(lineage=1, version=lease.base, num_tokens=count),),
        observation_ids=ids[:64],
        code="print(sum(range(10)))\n" * 10,
        status="ok",
        observation="45\n" * 20,
    )


async def push(load: Load, engine: BufferClient, leases: list[Lease], at_once: int) -> None:
    """All leases of one sender, some at a time, each turn after the one before is durable."""
    payload = np.random.default_rng(len(leases)).random(load.tokens, np.float32)
    room = asyncio.Semaphore(at_once)

    async def one(lease: Lease) -> None:
        async with room:
            for number in range(load.turns):
                await engine.push_turn(make_turn(load, lease, number, payload))
            await engine.finish(finish(lease, load.turns, float(lease.rollout % 2)))

    await asyncio.gather(*(one(lease) for lease in leases))


async def decide(roc: BufferClient, load: Load) -> None:
    for _ in range(load.groups):
        headers = await roc.next_group(600.0)
        assert headers is not None
        await roc.decide(Decision(group=headers.group, keep=tuple(range(load.rollouts // 2))))


async def take(learner: BufferClient) -> tuple[float, float]:
    """Seconds to take the batch, and to fetch it."""
    started_s = time.monotonic()
    batch = await learner.take(0, 600.0)
    assert batch is not None
    taken_s = time.monotonic()
    for group in batch.groups:
        await learner.fetch([(group.group, rollout) for rollout in group.rollouts])
    return taken_s - started_s, time.monotonic() - taken_s


async def lease_all(engines: list[BufferClient], load: Load) -> list[list[Lease]]:
    share = -(-load.groups * load.rollouts // len(engines))
    out: list[list[Lease]] = []
    for engine in engines:
        mine: list[Lease] = []
        while len(mine) < share and (some := await engine.lease(min(1024, share - len(mine)), 0, 1.0)):
            mine += some
        out.append(mine)
    return out


def plain(directory: Path, num_bytes: int, piece_bytes: int) -> float:
    """Seconds to append `num_bytes` to one file, each piece synced."""
    piece = os.urandom(piece_bytes)
    path = directory / "plain"
    started_s = time.monotonic()
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(max(1, num_bytes // piece_bytes)):
        os.write(file, piece)
        os.fdatasync(file)
    os.close(file)
    spent_s = time.monotonic() - started_s
    path.unlink()
    return spent_s


async def measure(load: Load, senders: int, directory: Path) -> Result:
    chosen = settings(
        max_staleness=0,
        groups_per_step=load.groups,
        group_size=load.rollouts // 2,
        num_rollouts=load.rollouts,
        dead_after_s=600.0,
        lease_s=600.0,
    )
    process = Process(directory, chosen)
    peers = Peers(await process.start())
    learner = await peers.learner()
    roc = await peers.join("filter", "filter-0")
    engines = [await peers.engine(f"rollout-{number}") for number in range(senders)]
    started_s = time.monotonic()
    leases = await lease_all(engines, load)
    leased_s = time.monotonic()
    deciding = asyncio.create_task(decide(roc, load))
    at_once = max(4, ROLLOUTS_AT_ONCE // senders)
    await asyncio.gather(*(push(load, e, some, at_once) for e, some in zip(engines, leases, strict=True)))
    pushed_s = time.monotonic()
    await deciding
    decided_s = time.monotonic()
    take_s, fetch_s = await take(learner)
    status = await learner.status()
    cpu_s, rss_mb = _usage(process.child.pid)
    await peers.close()
    await process.kill(signal.SIGTERM)
    num_bytes = status["buffer"]["counters"]["payload_bytes"]
    commits = sum(status["buffer"]["histograms"]["commit_s"]["counts"])
    ingest_s = pushed_s - leased_s
    plain_s = plain(directory, int(num_bytes), int(num_bytes / commits))
    num_turns = load.groups * load.rollouts * load.turns
    bare_s = bare(directory, num_turns, int(num_bytes / num_turns), senders, at_once)
    return Result(
        senders=senders,
        load=load,
        megabytes=num_bytes / 1e6,
        lease_s=leased_s - started_s,
        ingest_s=ingest_s,
        ingest_mb_s=num_bytes / 1e6 / ingest_s,
        plain_mb_s=num_bytes / 1e6 / plain_s,
        share_of_plain=plain_s / ingest_s,
        bare_mb_s=num_bytes / 1e6 / bare_s,
        filter_s=decided_s - pushed_s,
        take_s=take_s,
        total_s=decided_s - started_s + take_s,
        fetch_s=fetch_s,
        commits=commits,
        commit_megabytes=num_bytes / 1e6 / commits,
        buffer_cpu_s=cpu_s,
        buffer_peak_rss_mb=rss_mb,
    )


def _usage(pid: int) -> tuple[float, float]:
    """CPU seconds and peak resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--senders", default="1,64")
    chosen = parser.parse_args()
    load = Load(chosen.groups, chosen.rollouts, chosen.tokens, chosen.turns)
    results = []
    for senders in map(int, chosen.senders.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            results.append(asdict(asyncio.run(measure(load, senders, Path(directory)))))
        if not chosen.json:
            print("\n".join(f"{key:>20}  {value}" for key, value in results[-1].items()), end="\n\n")
    if chosen.json:
        print(json.dumps({"benchmark": "wire", "cores": os.cpu_count(), "results": results}))


if __name__ == "__main__":
    main()
