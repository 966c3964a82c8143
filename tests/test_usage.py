"""CPU seconds of a process tree: children and those that have ended count, nothing falls."""

from __future__ import annotations

import os
import subprocess
import sys

from buffer.meters import Meters
from buffer.usage import MIN_INTERVAL_S, Usage

BURN = """
import sys, time
end = time.process_time() + 0.2
while time.process_time() < end: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_what_a_child_uses_counts_while_it_lives_and_after() -> None:
    usage = Usage()
    before = usage.read(0.0)["cpu_s"]
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = usage.read(10.0)["cpu_s"]
    assert living - before >= 0.15
    assert usage.read(20.0)["cpu_s"] >= living


def test_whoever_asks_often_gets_the_same_reading() -> None:
    usage = Usage()
    first = usage.read(0.0)
    sum(range(3_000_000))
    assert usage.read(MIN_INTERVAL_S / 2) == first
    assert usage.read(1.0)["host_cpu_s"] >= first["host_cpu_s"]


def test_a_tree_that_has_ended_uses_nothing_more() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        usage = Usage(child.pid)
    assert usage.read(0.0)["core_wait_s"] == 0.0


def test_a_snapshot_tells_the_host_and_its_cores() -> None:
    used = Meters("learner", "learner-0", 0.0, Usage().read).snapshot(1.0)["usage"]
    assert used["cores"] == len(os.sched_getaffinity(0))
    assert used["cpu_s"] > 0
