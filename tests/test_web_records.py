"""Single records for the page's drill-downs, over a small run, and what is no query of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.monitor.web_records import VIEWS, NotUnderstood, details
from tests.run_writer import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    write_run(directory)
    return directory


def test_groups_have_the_age_at_the_step_that_trained_them(run: Path) -> None:
    told = details(run, "view=groups")
    assert told["active"] == []
    ages = {group["group"]: (group["drop_reason"], group["age"], group["step"]) for group in told["closed"]}
    assert ages == {0: ("", 0, 0), 1: ("", 1, 1), 2: ("all_right", None, None), 3: ("", 1, 2)}


def test_calls_steps_and_versions_are_told(run: Path) -> None:
    calls = details(run, "view=sandbox")["calls"]
    assert {call["status"] for call in calls} == {"ok", "error"}
    assert [step["step"] for step in details(run, "view=learner")["steps"]] == [0, 1, 2]
    versions = details(run, "view=weights")["versions"]
    assert [version["version"] for version in versions] == [3, 2, 1, 0]
    assert [*versions[0]["acks"]] == [{"engine": "rollout-0", "version": 3, "unix_s": 31.5, "pause_s": 0.1}]


def test_the_newest_trajectory_is_told_and_a_move_leads_to_another(run: Path) -> None:
    first = details(run, "view=trajectory&group=0&rollout=1")
    assert (first["group"], first["rollout"]) == (0, 1)
    assert first["lines"][0].startswith("---- TRAJECTORY  group 0, rollout 1 of 4")
    after = details(run, "view=trajectory&group=0&rollout=1&move=next+group")
    assert (after["group"], after["rollout"]) == (1, 0)
    back = details(run, "view=trajectory&group=1&rollout=0&move=previous")
    assert (back["group"], back["rollout"]) == (0, 3)
    assert details(run, "view=trajectory")["lines"]
    assert details(run, "view=trajectory&group=77&rollout=0") == {"none": "there is no rollout 0 of group 77"}


@pytest.mark.parametrize("view", VIEWS)
def test_all_of_it_is_plain_and_absent_where_nothing_is_recorded(run: Path, tmp_path: Path, view: str) -> None:
    json.dumps(details(run, f"view={view}"), allow_nan=False)
    assert details(tmp_path, f"view={view}")["none"].startswith("nothing is recorded yet")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "view is one of groups, "),
        ("view=../../recipe.toml", "view is one of groups, "),
        ("view=groups&group=1", "groups takes nothing more"),
        ("view=trajectory&path=x", "trajectory takes group, rollout and move"),
        ("view=trajectory&group=1", "rollout is a whole number"),
        ("view=trajectory&group=1;drop&rollout=0", "group is a whole number"),
        ("view=trajectory&group=9999999999999&rollout=0", "group is a whole number"),
        ("view=trajectory&group=1&rollout=0&move=1 OR 1", "move is one of next, "),
        ("view=trajectory&a&b&c&d", "Max number of fields"),
    ],
)
def test_what_no_page_asks_is_not_understood(run: Path, query: str, words: str) -> None:
    with pytest.raises(NotUnderstood, match=words):
        details(run, query)
