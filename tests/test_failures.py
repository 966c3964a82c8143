"""tests/failures.md names tests that exist, each kind once and in order."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| [^|]+ \| ((?:`[^`|]+` ?)+)\|$")
NUM_KINDS = 33


def test_every_named_test_exists_and_every_kind_stands_once() -> None:
    lines = [line for line in (TESTS / "failures.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [ROW.match(line) for line in lines[1:]]
    assert all(rows), [line for line, row in zip(lines[1:], rows, strict=True) if row is None]
    kinds = [int(row[1]) for row in rows if row]
    assert kinds == list(range(1, NUM_KINDS + 1))
    named = {name for row in rows if row for name in re.findall(r"`([^`]+)`", row[2])}
    assert named - _tests({name.split("::")[0] for name in named}) == set()


def _tests(modules: set[str]) -> set[str]:
    """`module::function` of every test in these files."""
    found = set()
    for module in modules:
        tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found |= {f"{module}::{function.name}" for function in functions if function.name.startswith("test_")}
    return found
