"""The page of `rocstar monitor --web`: who is answered, what loads, and what it does in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launch.lock import hold
from launch.monitor import show, web
from launch.monitor.web import Server, Source, content_policy
from tests import chromium
from tests.chromium import Page
from tests.photograph import photograph
from tests.recorded import ROOT

LINE = "document.querySelector('[data-chart=reward] .curve').getAttribute('d')"
POINTS = (
    "Object.fromEntries([...document.querySelectorAll('[data-chart]')]"
    ".map(one => [one.dataset.chart, one.querySelectorAll('circle').length]))"
)
browser = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="there is no chromium: apt-get install --no-install-recommends chromium"
)


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    with Server(directory) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def finished() -> Iterator[Server]:
    with serving(ROOT / "finished") as server:
        yield server


def ask(server: Server, path: str = "/", method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()


def test_the_json_is_the_one_snapshot(finished: Server) -> None:
    answer, body = ask(finished, "/snapshot.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert body.decode() == show.as_json(*show.look(ROOT / "finished"))


def test_the_page_may_load_nothing_from_elsewhere(finished: Server) -> None:
    answer, body = ask(finished)
    page = body.decode()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"], policy["img-src"]) == ("'none'", "'self'", "data:")
    assert policy["script-src"].count("'sha256-") == 1 == policy["style-src"].count("'sha256-")
    assert not set("*:") & set(policy["script-src"] + policy["style-src"])
    assert not any(word in page.replace("http://www.w3.org/2000/svg", "") for word in ("http:", "https:", "//cdn"))
    assert not any(word in page for word in ("innerHTML", "eval(", "document.write", ' style="'))
    assert content_policy(page.replace("ask();", "ask(1);")) != answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", ""]
)
def test_who_calls_it_by_a_foreign_name_is_refused(finished: Server, host: str) -> None:
    for path in ("/", "/snapshot.json"):
        answer, body = ask(finished, path, Host=host)
        assert answer.status == 421
        assert body == b"call this host localhost or 127.0.0.1\n"


def test_loopback_names_at_any_port_are_answered_as_a_forwarded_port_needs(finished: Server) -> None:
    assert all(ask(finished, Host=host)[0].status == 200 for host in ("localhost", "LOCALHOST:81", "[::1]:82"))


@pytest.mark.parametrize(
    "path", ["/page.html", "/../cli.py", "/snapshot.json/", "/snapshot.json?x", "/run.json", "/%2e%2e/recipe.toml"]
)
def test_there_are_no_other_paths(finished: Server, path: str) -> None:
    answer, body = ask(finished, path)
    assert answer.status == 404
    assert body.startswith(b"there are / and ")


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(finished: Server, method: str) -> None:
    answer, body = ask(finished, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert body == (b"" if method == "HEAD" else b"only GET\n")


def test_it_listens_on_loopback_alone(finished: Server) -> None:
    assert finished.socket.getsockname()[0] == "127.0.0.1"


def test_a_directory_that_has_gone_is_told_and_asked_for_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving(run) as server:
        answer, body = ask(server, "/snapshot.json")
        assert (answer.status, json.loads(body)) == (503, {"error": f"{run}: is no directory"})
        run.mkdir()
        assert json.loads(ask(server, "/snapshot.json")[1])["run"]["state"] == "empty"


def test_a_run_that_is_over_is_read_again_only_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "EVERY_S", 0.0)
    growing(tmp_path, 3)
    source = Source(tmp_path, None)
    before = source.snapshot()
    assert source.snapshot() is before
    grow(tmp_path, 5)
    assert source.snapshot() != before
    with live(tmp_path):
        before = source.snapshot()
        assert source.snapshot() is not before


def test_however_many_look_a_run_is_read_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "EVERY_S", 60.0)
    source = Source(tmp_path, None)
    before = source.snapshot()
    growing(tmp_path, 3)
    assert source.snapshot() is before


def growing(target: Path, steps: int) -> None:
    """A recorded run of which so many steps are written, and nobody has said how it ended."""
    (target / "metrics").mkdir()
    for name in ("run.json", "recipe.toml"):
        (target / name).write_bytes((ROOT / "finished" / name).read_bytes())
    grow(target, steps)


def grow(target: Path, steps: int) -> None:
    """The run goes on to so many steps: what is new is appended to its files."""
    source = ROOT / "finished" / "metrics"
    until_s = next(
        (one["unix_s"] for one in lines(source / "run.jsonl") if one.get("next_step", 0) >= steps), float("inf")
    )
    for path in source.glob("*.jsonl"):
        by_step = path.stem == "steps"
        kept = [one for one in lines(path) if (one["step"] < steps if by_step else one["unix_s"] <= until_s)]
        copy = target / "metrics" / path.name
        written = len(copy.read_text().splitlines()) if copy.exists() else 0
        with copy.open("a") as file:
            file.writelines(f"{json.dumps(one)}\n" for one in kept[written:])


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def live(run: Path) -> Iterator[None]:
    """Somebody drives the run."""
    held = hold(run / "driver.lock")
    assert held is not None
    with held:
        yield


@pytest.fixture
def page() -> Iterator[Page]:
    """A browser of its own; its page complains of nothing and asks nobody but the server it came from."""
    with chromium.page() as page:
        yield page
        origin = page.value("location.origin")
        assert page.complaints == []
        assert origin.startswith("http://127.0.0.1:")
        assert len(page.requests) >= 2
        assert all(request.startswith(f"{origin}/") or request == "data:," for request in page.requests)


@browser
@pytest.mark.slow
def test_the_charts_move_while_a_run_goes_on_and_its_end_is_told(tmp_path: Path, page: Page) -> None:
    growing(tmp_path, 4)
    (tmp_path / "run.json").write_text(json.dumps({"name": "<b>bold</b>"}))
    with serving(tmp_path) as server:
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


@browser
@pytest.mark.slow
def test_drill_downs_open_on_a_click_and_by_key(page: Page, finished: Server) -> None:
    page.size(1300, 900)
    page.go(finished.url)
    page.until("at('flow').childElementCount")
    assert page.value("at('drill').hidden")
    page.click("#flow tr[data-view=sandbox]")
    page.until("!at('drill').hidden && at('view').textContent.includes('a call runs for')")
    page.click("#views [data-view=weights]")
    page.until("at('view').textContent.includes('version 7 is published')")
    assert page.value("location.hash") == "#weights"
    page.click("#close")
    page.until("at('drill').hidden && !location.hash")
    for number, view in enumerate(page.value("Object.keys(VIEWS)"), 1):
        page.press(str(number))
        page.until(f"at('drill').dataset.view === '{view}' && at('view').textContent.length > 100")
    page.press("Escape")
    page.until("at('drill').hidden")


@browser
@pytest.mark.slow
def test_an_empty_directory_is_told_and_then_its_run_is_shown(tmp_path: Path, page: Page) -> None:
    with serving(tmp_path) as server:
        page.go(server.url)
        page.until("!at('empty').hidden")
        assert page.value("at('empty').textContent").startswith("Nothing was measured yet")
        assert page.value("at('state').textContent") == "empty: no figures yet"
        assert page.value("at('work').hidden && at('side').hidden")
        growing(tmp_path, 8)
        page.until("at('empty').hidden && !at('work').hidden && at('flow').textContent.includes('sandbox')")


@browser
@pytest.mark.slow
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


@browser
@pytest.mark.slow
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


@browser
@pytest.mark.slow
def test_a_photograph_is_a_picture_of_the_asked_size() -> None:
    picture = photograph(ROOT / "finished", scheme="dark", width=900, height=600)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (900, 600)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "monitor", str(ROOT / "finished"), "--web"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            address = urlsplit(said.split()[0])
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", "/snapshot.json")
                assert json.load(connection.getresponse())["run"]["state"] == "reached"
            again = [*command, "--port", str(address.port)]
            taken = subprocess.run(again, capture_output=True, text=True, env=environment)
            assert (taken.returncode, taken.stdout) == (2, "")
            assert taken.stderr.startswith(f"rocstar: monitor: port {address.port} cannot be had (Address already in")
        finally:
            process.send_signal(signal.SIGINT)
        assert (process.wait(10), process.stderr.read() if process.stderr else "") == (0, "")
