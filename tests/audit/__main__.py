"""`python -m tests.audit RUN [--json]`: exits 0 when all claims hold, 1 with the differences, 2 without a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.audit.report import Report, audit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--json", action="store_true", help="figures and findings as JSON")
    arguments = parser.parse_args()
    try:
        report = audit(arguments.run)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"figures": report.figures, "findings": report.findings}, indent=1))
    else:
        print_report(report)
    return 0 if report.sound else 1


def print_report(report: Report) -> None:
    """Figures one a line, the curve by version, then the findings."""
    for name, value in report.figures.items():
        if name not in ("steps", "versions", "evaluations"):
            print(f"{name:22} {_shown(value)}")
    for phase, evaluation in report.figures["evaluations"].items():
        print(f"evaluation {phase:11} " + "  ".join(f"{key} {_shown(value)}" for key, value in evaluation.items()))
    print("version  rollouts  reward  tool errors in correct rollouts")
    for row in report.figures["versions"]:
        print(
            f"{row['version']:7}  {row['rollouts']:8}  {_shown(row['reward']):6}  "
            f"{_shown(row['tool_error_in_correct'])} ({row['failed']} of {row['calls']} calls)"
        )
    for line in report.lines():
        print(f"DIFFERS  {line}")
    print("all claims hold" if report.sound else f"{sum(map(len, report.findings.values()))} differences")


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
