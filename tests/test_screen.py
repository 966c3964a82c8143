"""The screen in a terminal: the app driven by its keys, its photograph, its command."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from textual.containers import ScrollableContainer
from textual.pilot import Pilot
from textual.widgets import Static

from buffer.schema import Turn
from launch import cli
from launch.monitor import trajectories
from launch.monitor.app import MonitorApp, painted
from launch.monitor.desk import Page
from launch.monitor.photo import photograph
from launch.monitor.trajectories import Trajectory, TurnText
from tests.desks import FINISHED, copy, desk
from tests.recorded import ROOT
from tests.served import grow, growing, live

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
    assert say(monkeypatch, "monitor", FINISHED, "--once", "--port", 8000) == 2
    assert "--port 8000 is of --web" in capsys.readouterr().err
    assert say(monkeypatch, "monitor", tmp_path / "nowhere", "--once") == 2
    assert "nowhere: is no directory" in capsys.readouterr().err


@pytest.mark.slow
def test_other_commands_do_not_load_textual() -> None:
    asked = "import sys, launch.cli; print('textual' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
