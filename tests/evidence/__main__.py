"""Runs a command and keeps what it showed: `python -m tests.evidence NAME [--run RUN] [--note TEXT] -- COMMAND...`

Consumes    a work tree as committed (else its commit would be a wrong name for what ran); a command that prints JSON,
            or one that leaves a run in RUN
Produces    tests/evidence/NAME.json: commit, command, exit code, machine, seconds; of a run its summary, audit, times
Waits for   the command's end
Invariant   nothing in the file is typed by hand; a run's figures beside its summary are computed without code of ours
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.audit.report import audit
from tests.evidence.times import times

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=__doc__)
    parser.add_argument("name", help="of the file")
    parser.add_argument("--run", type=Path, help="the run directory that the command works in")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if changed := _git("status", "--porcelain", "--", ".", ":!tests/evidence/*.json"):
        print(f"the work tree differs from its commit, commit first:\n{changed}", file=sys.stderr)
        return 2
    begun_s = time.monotonic()
    ended = subprocess.run(arguments.command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    out: dict[str, Any] = {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "command": " ".join(arguments.command),
        "exit_code": ended.returncode,
        "seconds": round(time.monotonic() - begun_s, 1),
        "machine": _machine(arguments.note),
    }
    if arguments.run is None:
        out["report"] = json.loads(ended.stdout[ended.stdout.index("{") :])
    else:
        print(ended.stdout)
        report = audit(arguments.run)
        out["times"] = times(arguments.run)
        out["audit"] = {"sound": report.sound, "findings": report.findings, "figures": report.figures}
        out["summary"] = json.loads((arguments.run / "summary.json").read_text())
    (ROOT / "tests" / "evidence" / f"{arguments.name}.json").write_text(json.dumps(out, indent=1) + "\n")
    return ended.returncode


def _machine(note: str) -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": model.partition(": ")[2],
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "load_per_core_at_end_1min": round(os.getloadavg()[0] / (os.cpu_count() or 1), 2),
        "note": note,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
