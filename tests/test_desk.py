"""Pages of the screen as text: golden drill-downs of a recorded run, what is missing, what is torn, what is served."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from launch import cli
from launch.monitor import advisor, trajectories
from launch.monitor.desk import VIEWS, Desk, Page
from launch.monitor.glossary import help_lines
from launch.monitor.records import opened
from launch.monitor.show import look
from launch.monitor.sources import Served, source_of
from launch.monitor.text import MARKS
from tests.desks import FINISHED, copy, desk, pages
from tests.recorded import ROOT, drilled
from tests.run_writer import write_run
from tests.served import nothing, serving


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_the_drill_downs_of_a_recorded_run_are_the_golden_ones() -> None:
    found = drilled("finished")
    assert found.keys() == set(VIEWS.values())
    for view, text in found.items():
        assert text == (FINISHED / f"{view}.txt").read_text(), view


def test_an_empty_directory_and_one_without_an_index_say_so(tmp_path: Path) -> None:
    for directory, head in ((tmp_path, f"{tmp_path.name}  empty"), (ROOT / "interrupted", "quickstart  interrupted")):
        one = desk(directory)
        assert one.page().head.startswith(head)
        for page in pages(one, "23456"):
            assert not page.failed
            none = f"nothing is recorded yet (no buffer/index.sqlite in {directory}): let the run train first"
            assert page.lines[-1] == f"no single records: {none}"


def test_a_run_of_records_alone_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "recipe.toml").unlink()
    found = {page.view: page for page in pages(desk(tmp_path), "23456")}
    assert not any(page.failed for page in found.values())
    assert any(line.split()[:5] == ["3", "train-3", "1", "2", "1"] for line in found["groups"].lines)
    assert any("error" in line for line in found["sandbox"].lines)
    assert found["trajectory"].lines[0] == "---- TRAJECTORY  group 3, rollout 0 of 4; training; train-3"


def test_keys_lead_from_one_trajectory_to_another() -> None:
    titles = [page.lines[0].split(";")[0] for page in pages(desk(), "6nnpNP")]
    names = [re.sub(r"\D+", " ", title).split()[:2] for title in titles]
    assert names == [["35", "1"], ["35", "2"], ["35", "3"], ["35", "2"], ["35", "2"], ["34", "0"]]


def test_a_trajectory_tells_thought_code_result_and_penalties() -> None:
    *_, page = pages(desk(), "6n")
    text = "\n".join(page.lines)
    for part in (
        "reward 1: answer 5070 is right, wanted 5070",
        "penalties: failed calls 0.00, form 0.00",
        "TURN 0  rollout-0: version 7 (12 tokens)",
        "  I compute.",
        "  CALL ok: waited",
        "  | print(78 * 65)",
        "  RESULT\n  > 5070",
    ):
        assert part in text
    assert "<tool_call>" not in text  # the code is shown once


def test_keys_lead_from_one_learner_step_to_another() -> None:
    def title(page: Page) -> str:
        return next(line for line in page.lines if "time line" in line)[:11]

    assert [title(page) for page in pages(desk(), "4ppnnn")] == [f"---- STEP {step}" for step in (7, 6, 5, 6, 7, 7)]


def test_what_the_run_has_deleted_is_said(tmp_path: Path) -> None:
    run = copy(tmp_path)
    shutil.rmtree(run / "buffer" / "segments")
    trajectory, sandbox = pages(desk(run), "62")
    assert "deleted since no checkpoint needs them" in "\n".join(trajectory.lines)
    call = next(line for line in sandbox.lines if "rollout-0  35.3.1" in line)
    assert call.split()[-2:] == ["-", "-"]


def test_a_torn_record_is_told_and_the_rest_shown(tmp_path: Path) -> None:
    run = copy(tmp_path)
    segment = run / "buffer" / "segments" / "00000001.seg"
    data = bytearray(segment.read_bytes())
    data[40:] = bytes(len(data) - 40)
    segment.write_bytes(data)
    page = next(pages(desk(run), "2"))
    assert not page.failed
    assert "no single records: " in page.lines[-1]
    assert page.lines[0].startswith("---- SANDBOX")


def test_without_a_tokenizer_no_text_is_made_up() -> None:
    with opened(FINISHED) as db:
        told = trajectories.read(db, FINISHED, (35, 2))
    assert told is not None
    assert "  12 tokens; no tokenizer.json is at hand" in trajectories.lines(told, None)
    assert "  | print(78 * 65)" in trajectories.lines(told, None)


def test_a_served_run_is_shown_as_its_directory_is() -> None:
    with serving(FINISHED) as server:
        near, far = desk(), Desk(Served(server.url))
        for key in ("escape", *VIEWS):
            assert list(pages(far, key)) == list(pages(near, key))
    gone = far.page()
    assert "cannot be read (" in gone.failed
    assert gone.lines


def test_a_wrong_address_or_window_is_told() -> None:
    with pytest.raises(cli.ConfigError, match="`rocstar monitor RUN --web` serves a run"):
        Served("http://127.0.0.1:1").snapshot()
    with pytest.raises(cli.ConfigError, match="--window is the server's to say"):
        source_of("http://127.0.0.1:1", 5.0, nothing)
    with serving(FINISHED) as server, pytest.raises(cli.ConfigError, match="answers 404: there are"):
        Served(f"{server.url}nothing").snapshot()


def test_help_explains_every_figure() -> None:
    text = " ".join(help_lines())
    snapshot, _ = look(FINISHED)
    assert snapshot.tickets is not None
    assert snapshot.learner is not None
    names = {*advisor.WORK, "slots", "kv", "tickets", *MARKS, *MARKS.values()}
    names |= {one.name for one in snapshot.trend} | snapshot.tickets.by_state.keys() | snapshot.learner.parts_s.keys()
    names |= {"ratio_mean", "clipped", "capped_share", "ess", "entropy", "grad_norm", "penalties", "reward", "lag"}
    assert [name for name in sorted(names - {"other"}) if name not in text] == []
    assert max(map(len, help_lines())) <= 80


def test_the_index_is_only_read(tmp_path: Path) -> None:
    run = copy(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for page in pages(desk(run), "123456"):
        assert not page.failed
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with opened(run) as db, closing(db.cursor()) as cursor, pytest.raises(Exception, match="readonly"):
        cursor.execute("DELETE FROM turns")
