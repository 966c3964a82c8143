"""The page in headless Chromium: charts move, drill-downs open, nothing is complained of, nothing leaves the host."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launch.monitor.web import Server
from tests import chromium
from tests.chromium import Page
from tests.photograph import photograph
from tests.recorded import ROOT
from tests.run_writer import write_run
from tests.served import grow, growing, live, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.PROGRAM is None, reason="there is no chromium: apt-get install --no-install-recommends chromium"
    ),
]
LINE = "document.querySelector('[data-chart=reward] .curve').getAttribute('d')"
POINTS = (
    "Object.fromEntries([...document.querySelectorAll('[data-chart]')]"
    ".map(one => [one.dataset.chart, one.querySelectorAll('circle').length]))"
)

BLANK = "data:,"


@contextlib.contextmanager
def shown(directory: Path, page: Page) -> Iterator[Server]:
    """A server that ends once the page was left: it would complain of unanswered questions."""
    with serving(directory) as server:
        yield server
        page.go(BLANK)


@pytest.fixture
def page() -> Iterator[Page]:
    """A browser of its own; its page complains of nothing and asks nobody but the server it came from."""
    with chromium.page() as page:
        yield page
        asked = urlsplit(next(request for request in page.requests if request != BLANK))
        origin = f"{asked.scheme}://{asked.netloc}"
        assert page.complaints == []
        assert origin.startswith("http://127.0.0.1:")
        assert len(page.requests) >= 2
        assert all(request.startswith(f"{origin}/") or request == BLANK for request in page.requests)


def test_the_charts_move_while_a_run_goes_on_and_its_end_is_told(tmp_path: Path, page: Page) -> None:
    growing(tmp_path, 4)
    (tmp_path / "run.json").write_text(json.dumps({"name": "<b>bold</b>"}))
    with shown(tmp_path, page) as server:
        with live(tmp_path):
            page.go(server.url)
            page.until("at('state').textContent === 'live'")
            assert page.value("at('name').textContent") == "<b>bold</b>"
            assert page.value(POINTS) == {"groups": 3, "reward": 4, "entropy": 4, "length": 4, "age": 4}
            line, step = page.value(LINE), page.value("told.run.step")
            grow(tmp_path, 6)
            page.until(f"{LINE} !== {json.dumps(line)}")
            assert page.value(POINTS) == {"groups": 5, "reward": 6, "entropy": 6, "length": 6, "age": 6}
            assert page.value("told.run.step") > step
        page.until("at('state').textContent === 'stopped: nobody drives it'")
        ended = {"outcome": "interrupted", "reason": "a signal came"}
        (tmp_path / "summary.json").write_text(json.dumps(ended))
        page.until("at('state').textContent === 'interrupted, can be resumed'")
        assert page.value("at('verdict').textContent").startswith("ended: a signal came")


def test_drill_downs_open_on_a_click_and_by_key(tmp_path: Path, page: Page) -> None:
    write_run(tmp_path)
    growing(tmp_path, 8)
    with shown(tmp_path, page) as server:
        page.size(1300, 900)
        page.go(server.url)
        page.until("at('flow').childElementCount")
        assert page.value("at('drill').hidden")
        page.click("#flow tr[data-view=sandbox]")
        page.until("!at('drill').hidden && at('view').textContent.includes('a call runs')")
        page.until("document.querySelectorAll('#records tbody tr').length === 20")
        page.click("#views [data-view=weights]")
        page.until("at('view').textContent.includes('version 8 is published')")
        assert page.value("location.hash") == "#weights"
        page.click("#close")
        page.until("at('drill').hidden && !location.hash")
        for number, view in enumerate(page.value("Object.keys(VIEWS)"), 1):
            page.press(str(number))
            page.until(f"at('drill').dataset.view === '{view}' && at('drill').textContent.length > 150")
        page.press("Escape")
        page.until("at('drill').hidden")


def test_a_trajectory_opens_from_its_group_and_leads_to_the_next(tmp_path: Path, page: Page) -> None:
    write_run(tmp_path)
    growing(tmp_path, 8)
    with shown(tmp_path, page) as server:
        page.size(1300, 900)
        page.go(f"{server.url}#groups")
        page.until("document.querySelector('[data-group=\"1\"]')")
        page.click('[data-group="1"]')
        page.until("at('records').textContent.includes('group 1, rollout 0 of 4')")
        page.click("[data-move=next]")
        page.until("at('records').textContent.includes('group 1, rollout 1 of 4')")
        page.click("[data-move='previous group']")
        page.until("at('records').textContent.includes('group 0, rollout 0 of 4')")


def test_an_empty_directory_is_told_and_then_its_run_is_shown(tmp_path: Path, page: Page) -> None:
    with shown(tmp_path, page) as server:
        page.go(server.url)
        page.until("!at('empty').hidden")
        assert page.value("at('empty').textContent").startswith("Nothing was measured yet")
        assert page.value("at('state').textContent") == "empty: no figures yet"
        assert page.value("at('work').hidden && at('side').hidden")
        growing(tmp_path, 8)
        page.until("at('empty').hidden && !at('work').hidden && at('flow').textContent.includes('sandbox')")


def test_the_policy_holds_and_lost_news_are_told(tmp_path: Path) -> None:
    with chromium.page() as page:
        with serving(tmp_path) as server:
            page.go(server.url)
            page.until("told")
            assert page.complaints == []
            assert page.value("fetch('http://127.0.0.2:9/').then(() => 'went', () => 'refused')") == "refused"
            assert page.value("(() => { try { document.body.innerHTML = '<p>'; } catch { return 'refused'; } })()")
            assert len(page.complaints) >= 2
        page.until("!at('lost').hidden && at('lost').textContent.startsWith('No news: ')")


def test_a_browser_is_gone_also_when_what_it_was_for_fails() -> None:
    pages = []

    def fail() -> None:
        with chromium.page() as page:
            pages.append(page)
            assert len(page.processes()) >= 4
            page.value("what is no JavaScript")

    with pytest.raises(AssertionError, match="SyntaxError"):
        fail()
    assert pages[0].processes() == []


def test_a_photograph_is_a_picture_of_the_asked_size() -> None:
    picture = photograph(ROOT / "finished", scheme="dark", width=900, height=600)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (900, 600)
