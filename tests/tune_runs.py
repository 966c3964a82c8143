"""A run directory as the buffer writes one, whose every figure is a round number, for the tests of the tuner.

Consumes    a directory
Produces    P = 1, S = 1, G = 2 of 4 rollouts; a step every 2 s, which kept one group and dropped another as all right.
            A step takes the learner 1 s, a version 0.1 s to arrive and 0.1 s to be loaded
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.run_writer import Writer

RECIPE = """
[run]
seed = 1
[model]
path = "m"
[problems]
source = "reasoning_gym"
families = [{ name = "products" }]
[groups]
groups_per_step = 1
group_size = 2
[roc]
min_per_side = 1
[rollout]
concurrency = 8
"""
STEP_S = 2.0
BEGIN_S = 1000.0
TOKENS_PER_S, CALLS_PER_S = 20.0, 4.0
CPU = {"rollout-0": 0.5, "sandbox-0": 0.1, "buffer-0": 0.1, "filter-0": 0.0, "learner-0": 0.25}
"""cores used"""


def write(directory: Path, num_steps: int) -> None:
    """The files of a run after so many steps."""
    (directory / "metrics").mkdir(parents=True)
    (directory / "recipe.toml").write_text(RECIPE)
    writer = Writer(directory)
    for step in range(num_steps):
        taken_s = BEGIN_S + STEP_S * step
        versions = (max(0, step - 1), step)
        writer.group(2 * step, "train", "", versions, "1100", state="released", kept=[0, 2], step=step)
        writer.group(2 * step + 1, "train", "", versions, "1111", state="dropped", drop_reason="all_right")
        writer.take(step, 2 * step, versions[0], (0, 2), (1.0, 0.0))
        _times(writer, step, taken_s)
    writer.close()
    _metrics(directory / "metrics", num_steps)


def _times(writer: Writer, step: int, taken_s: float) -> None:
    groups = (2 * step, 2 * step + 1)
    published_s = taken_s + 1.0
    writer.statements += [
        (
            "UPDATE groups SET scored_unix_s = ?, decided_unix_s = ? WHERE group_id IN (?, ?)",
            (taken_s - 0.35, taken_s - 0.25, *groups),
        ),
        (
            "UPDATE rollouts SET leased_unix_s = ?, finished_unix_s = ?, generate_s = 1.0, tool_s = 0.3 "
            "WHERE group_id IN (?, ?)",
            (taken_s - 2.0, taken_s - 0.5, *groups),
        ),
        ("UPDATE batches SET taken_unix_s = ? WHERE step = ?", (taken_s, step)),
        ("UPDATE publications SET unix_s = ? WHERE version = ?", (published_s, step + 1)),
        ("UPDATE acknowledgements SET unix_s = ? WHERE version = ?", (published_s + 0.2, step + 1)),
    ]


def _metrics(folder: Path, num_steps: int) -> None:
    """A line per second of each role, all figures growing evenly."""
    seconds = [at * 0.5 for at in range(int(2 * STEP_S * num_steps))]
    lines = [{"unix_s": BEGIN_S + at, "phase": "train", "peers": {}} for at in seconds]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, cores in CPU.items():
        told = [_snapshot(name, at, cores) for at in seconds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def _snapshot(name: str, at_s: float, cores: float) -> dict[str, object]:
    wall_s = 10.0 + at_s
    counters = {
        "rollout-0": {
            "tokens_generated": TOKENS_PER_S * wall_s,
            "rate_tokens@8": TOKENS_PER_S * wall_s,
            "rate_s@8": 8.0 * wall_s,
        },
        "sandbox-0": {"calls": CALLS_PER_S * wall_s},
    }
    gauges = {"rollout-0": {"kv_capacity_tokens": 4096}, "sandbox-0": {"shards": 2}}
    usage = {"host": "node", "cores": 2, "cpu_s": cores * wall_s, "core_wait_s": 0.0, "read_s": wall_s}
    return {
        "unix_s": BEGIN_S + at_s,
        "role": name.rpartition("-")[0],
        "name": name,
        "wall_s": wall_s,
        "clock": {},
        "usage": usage | {"host_cpu_s": 1.2 * wall_s},
        "counters": counters.get(name, {}),
        "gauges": gauges.get(name, {}),
        "histograms": {},
    }
