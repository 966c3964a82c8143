"""`python -m tests.mutants [--json] [--only WORD] [--fast]`: exits 0 when every mutant is noticed, else 1.

Consumes    the tree as git lists it; the table
Produces    for each law the test that fails without it, or SURVIVED
Waits for   pytest, at most PATIENCE_S a mutant; one that takes longer counts as noticed
Invariant   works in a copy, in which the tests pass as long as nothing is left out: that is tried first
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.table import TABLE

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def copy(target: Path) -> None:
    """What git knows of, as it lies in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def ask(tree: Path, tests: str) -> str:
    """The first test that fails in `tree`; "" when all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "a test that never ended"
    if done.returncode == 0:
        return ""
    found = FAILED.search(done.stdout)
    return found[1] if found else done.stdout[-500:] + done.stderr[-500:]


def mutated(text: str, mutant: Mutant) -> str:
    """`text` without the law."""
    assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} occurs {text.count(mutant.old)} times"
    return text.replace(mutant.old, mutant.new)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="laws with this in their words or file")
    parser.add_argument("--fast", action="store_true", help="without those that train")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [m for m in TABLE if arguments.only in f"{m.law} {m.file}" and not (arguments.fast and m.slow)]
    noticed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        copy(tree)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            broken = ask(tree, tests)
            if broken:
                print(f"without any mutation {broken} fails", file=sys.stderr)
                return 2
        for mutant in chosen:
            path = tree / mutant.file
            text = path.read_text(encoding="utf-8")
            path.write_text(mutated(text, mutant), encoding="utf-8")
            noticed[mutant.law] = ask(tree, mutant.tests)
            path.write_text(text, encoding="utf-8")
            print(f"{mutant.law}: {noticed[mutant.law] or 'SURVIVED'}", file=sys.stderr, flush=True)
    survived = [law for law, test in noticed.items() if not test]
    if arguments.json:
        print(json.dumps({"mutants": len(noticed), "survived": survived, "noticed": noticed}, indent=1))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
