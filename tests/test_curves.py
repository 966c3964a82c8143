"""The curves of runs: points by hand from a small run, medians over seeds, and a picture that is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.curves import Curve, Point, draw, main, median, points, read
from sandbox.api import Status
from tests.run_writer import write_run

PNG = b"\x89PNG\r\n\x1a\n"


def curve(mode: str, seed: int, errors: dict[int, float | None]) -> Curve:
    some = [
        Point(version=version, num_rollouts=16, accuracy=0.1 * seed, tool_error_in_correct=error)
        for version, error in errors.items()
    ]
    return Curve(run=f"{mode}-{seed}", mode=mode, seed=seed, points=tuple(some))


def test_points_of_a_run_count_dropped_groups_and_the_version_that_began_a_rollout(tmp_path: Path) -> None:
    write_run(tmp_path, "off", seed=3)
    found = read(tmp_path, min_rollouts=1)
    assert (found.mode, found.seed) == ("off", 3)
    # Version 0 began 1100 and 1010, version 1 began 1111 (dropped) and 0111; rollouts 0 and 2 fail their one call.
    assert [(point.version, point.num_rollouts, point.accuracy) for point in found.points] == [
        (0, 8, 0.5),
        (1, 8, 0.875),
    ]
    assert [point.tool_error_in_correct for point in found.points] == [3 / 4, 3 / 7]
    assert read(tmp_path, min_rollouts=9).points == ()


def test_infrastructure_failures_are_no_calls_and_without_a_call_there_is_no_share() -> None:
    rows = [(0, 1.0, [Status.OVERLOADED, Status.OK]), (0, 0.0, [Status.ERROR]), (1, 1.0, []), (1, 0.0, [Status.ERROR])]
    assert [point.tool_error_in_correct for point in points(rows, 1)] == [0.0, None]


def test_the_median_needs_more_than_half_of_the_runs() -> None:
    runs = [
        curve("paper", 1, {0: 0.3, 1: 0.2, 2: 0.1}),
        curve("paper", 2, {0: 0.1, 1: None}),
        curve("paper", 3, {0: 0.2, 1: 0.4}),
    ]
    versions, values = median(runs, "tool_error_in_correct")
    assert versions == [0, 1]
    assert values == pytest.approx([0.2, 0.3])


def test_the_command_draws_all_modes_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for mode, seed in (("paper", 1), ("paper", 2), ("off", 1)):
        runs.append(tmp_path / f"{mode}-{seed}")
        runs[-1].mkdir()
        write_run(runs[-1], mode, seed)
    out = tmp_path / "docs" / "curves.png"
    assert main([*map(str, runs), "--out", str(out), "--json", "--min-rollouts", "1"]) == 0
    assert out.read_bytes().startswith(PNG)
    assert [run["mode"] for run in json.loads(capsys.readouterr().out)] == ["paper", "paper", "off"]
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "give the directory of a run" in capsys.readouterr().err


def test_a_mode_with_one_run_and_a_run_without_points_are_drawn(tmp_path: Path) -> None:
    draw([curve("off", 1, {0: 0.3}), curve("released", 1, {})], tmp_path / "few.png")
    assert (tmp_path / "few.png").read_bytes().startswith(PNG)
