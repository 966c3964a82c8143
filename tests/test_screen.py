"""The screen in a terminal: golden drill-downs of a recorded run, and the app driven by its keys."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from textual.containers import ScrollableContainer
from textual.pilot import Pilot
from textual.widgets import Static

from buffer.schema import Turn
from launch import cli
from launch.monitor import advisor, trajectories
from launch.monitor.app import MonitorApp, painted
from launch.monitor.desk import VIEWS, Desk, Page
from launch.monitor.glossary import help_lines
from launch.monitor.photo import photograph
from launch.monitor.records import opened
from launch.monitor.show import look
from launch.monitor.sources import Directory, Served, source_of
from launch.monitor.text import MARKS
from launch.monitor.trajectories import Trajectory, TurnText
from tests.recorded import ROOT, drilled
from tests.run_writer import write_run
from tests.served import grow, growing, live, nothing, serving

FINISHED = ROOT / "finished"
FIRST = {
    "1": "---- ENGINES ",
    "2": "---- SANDBOX ",
    "3": "---- TICKETS ",
    "4": "---- A STEP'S PARTS ",
    "5": "---- WEIGHTS ",
    "6": "---- TRAJECTORY ",
    "question_mark": "---- KEYS",
    "j": "{",
}
PATIENCE_S = 20.0


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def desk(directory: Path = FINISHED) -> Desk:
    return Desk(Directory(directory, None, nothing))


def pages(one: Desk, keys: Sequence[str]) -> Iterator[Page]:
    for key in keys:
        one.press(key)
        yield one.page()


def copy(target: Path) -> Path:
    return Path(shutil.copytree(FINISHED, target / "run"))


@pytest.mark.usefixtures("utc")
def test_the_drill_downs_of_a_recorded_run_are_the_golden_ones() -> None:
    found = drilled("finished")
    assert found.keys() == set(VIEWS.values())
    for view, text in found.items():
        assert text == (FINISHED / f"{view}.txt").read_text(), view


async def opened_page(app: MonitorApp, pilot: Pilot[None], key: str) -> Page:
    before = app.shown
    await pilot.press(key)
    async with asyncio.timeout(PATIENCE_S):
        return await app.until(lambda page: page is not before)


async def first_page(app: MonitorApp) -> Page:
    async with asyncio.timeout(PATIENCE_S):
        return await app.until(lambda page: bool(page.head))


@pytest.mark.slow
async def test_every_page_opens_by_its_key_and_q_quits() -> None:
    app = MonitorApp(desk())
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await first_page(app)
        seen = [line.rstrip() for line in (screen.head, *screen.lines)]
        assert seen == (FINISHED / "screen.txt").read_text().splitlines()
        for key, first in FIRST.items():
            page = await opened_page(app, pilot, key)
            assert page.lines[0].startswith(first), key
            assert not any("no single records" in line for line in page.lines), key
            shown = app.query_one("#text", Static)
            assert str(shown.render()).startswith(first)
        assert (await opened_page(app, pilot, "escape")).view == "screen"
        await pilot.press("q")
    assert app.return_code == 0
    assert not app.is_running


async def test_a_small_terminal_scrolls() -> None:
    app = MonitorApp(desk())
    async with app.run_test(size=(80, 24)) as pilot:
        await first_page(app)
        await pilot.pause()
        body = app.query_one("#body", ScrollableContainer)
        assert body.max_scroll_y > 0
        assert body.max_scroll_x > 0
        await pilot.press("end")
        await pilot.pause()
        assert body.scroll_y == body.max_scroll_y
        await opened_page(app, pilot, "4")
        assert body.scroll_y == 0


@pytest.mark.slow
async def test_a_run_that_goes_on_is_drawn_anew(tmp_path: Path) -> None:
    growing(tmp_path, 5)
    with live(tmp_path):
        app = MonitorApp(desk(tmp_path))
        async with app.run_test(), asyncio.timeout(PATIENCE_S):
            await app.until(lambda page: "running  step 5/8" in page.head)
            grow(tmp_path, 8)
            await app.until(lambda page: "step 8/8" in page.head)


@pytest.mark.slow
async def test_a_run_that_is_gone_is_said_to_be_above_what_was_seen(tmp_path: Path) -> None:
    run = copy(tmp_path)
    app = MonitorApp(desk(run))
    async with app.run_test(), asyncio.timeout(PATIENCE_S):
        before = await first_page(app)
        shutil.rmtree(run)
        page = await app.until(lambda page: bool(page.failed))
        assert page.failed == f"cannot be read now: {run}: is no directory"
        assert page.lines == before.lines
        assert app.query_one("#failed", Static).display
        shutil.copytree(FINISHED, run)
        assert await app.until(lambda page: not page.failed) == before


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


def test_a_program_cannot_steer_the_terminal() -> None:
    turn = Turn(
        group=1,
        rollout=0,
        attempt=1,
        turn=0,
        prompt_ids=np.zeros(0, np.int32),
        output_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        version_runs=(),
        observation_ids=np.zeros(0, np.int32),
        code="print('\x1b[2J')",
        status="ok",
        observation="\x1b]0;owned\x07 [bold]plain[/bold] \u202e",
    )
    told = TurnText(number=0, attempt=1, engine="rollout-0", num_tokens=1, versions=(), status="ok", told=turn)
    head = {"kind": "eval", "phase": "end", "num_rollouts": 1, "problem_id": "p", "state": "leased"}
    head["excluded_reason"] = ""
    one = Trajectory(key=(1, 0), head=head, problem="a\x1bb", right_answer="1", finished=(), turns=(told,))
    lines = trajectories.lines(one, lambda ids: "\x9b31m")
    assert all(line.isprintable() for line in lines)
    assert r"  | print('\x1b[2J')" in lines
    assert "[bold]plain[/bold]" in painted(tuple(lines)).plain


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


async def test_the_photograph_loads_nothing(tmp_path: Path) -> None:
    image = await photograph(desk(), "6n")
    assert image.startswith("<svg")
    assert "TRAJECTORY" in image
    assert "url(http" not in image
    assert "@import" not in image


def say(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["rocstar", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_prints_once_and_asks_for_a_terminal_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert say(monkeypatch, "monitor", FINISHED, "--once") == 0
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == (FINISHED / "screen.txt").read_text()
    assert say(monkeypatch, "monitor", ROOT / "interrupted", "--once") == 0
    assert "quickstart  interrupted" in capsys.readouterr().out
    assert say(monkeypatch, "monitor", tmp_path, "--once") == 0
    assert "metrics/ is empty" in capsys.readouterr().out
    assert say(monkeypatch, "monitor", FINISHED) == 2
    assert "standard output is no terminal; say --once, --json or --web" in capsys.readouterr().err
    assert say(monkeypatch, "monitor", tmp_path / "nowhere", "--once") == 2
    assert "nowhere: is no directory" in capsys.readouterr().err


def test_other_commands_do_not_load_textual() -> None:
    asked = "import sys, launch.cli; print('textual' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_the_index_is_only_read(tmp_path: Path) -> None:
    run = copy(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for page in pages(desk(run), "123456"):
        assert not page.failed
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with opened(run) as db, closing(db.cursor()) as cursor, pytest.raises(Exception, match="readonly"):
        cursor.execute("DELETE FROM turns")
