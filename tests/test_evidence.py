"""What evidence says of the times in a run, by hand; every kept file names the commit and command that made it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evidence.times import times
from tests.run_writer import write_run

KEPT = sorted((Path(__file__).parent / "evidence").glob("*.json"))


def test_the_times_of_a_run_are_those_of_its_index(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    told = times(tmp_path)
    assert (told["deadlines_met"], told["deadlines_missed"]) == (3, 0)
    assert told["window"]["seconds"] == 60.0


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_kept_file_says_where_it_comes_from(path: Path) -> None:
    told = json.loads(path.read_text())
    assert {"commit", "command", "machine"} <= set(told)
    assert "summary" in told or "report" in told
