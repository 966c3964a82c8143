"""The table of mutants fits the tree: each text to be replaced is there, once, and what replaces it compiles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import mutated
from tests.mutants.mutant import Mutant
from tests.mutants.table import TABLE

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.law)
def test_a_mutant_fits_its_file(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutated(text, mutant)
    assert changed != text
    ast.parse(changed)
    for test in mutant.tests.split():
        assert (ROOT / test).is_file()
