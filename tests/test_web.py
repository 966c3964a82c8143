"""The page of `rocstar monitor --web`: who is answered, with what, and how often a run is read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launch.monitor import show, web
from launch.monitor.fixes import Fix
from launch.monitor.snapshot import Snapshot
from launch.monitor.web import Judge, Server, Source, content_policy
from launch.reach import note
from tests.buffers import RUN, settings
from tests.buffers import serving as serving_buffer
from tests.recorded import ROOT
from tests.served import grow, growing, live, nothing, serving


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
    assert body.startswith(b"there are /, /snapshot.json and ")


def test_records_are_told_and_only_what_a_page_asks(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        answer, body = ask(server, "/records.json?view=groups")
        none = f"nothing is recorded yet (no buffer/index.sqlite in {tmp_path}): let the run train first"
        assert (answer.status, json.loads(body)) == (200, {"none": none})
        answer, body = ask(server, "/records.json?view=passwords")
    assert (answer.status, body[:12]) == (400, b"view is one ")


def test_what_it_serves_is_installed_with_it() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["launch.monitor"]
    for path in (web.PAGE, *web.SCRIPTS):
        assert any(path.match(pattern) for pattern in patterns)
        assert all(len(line) <= 120 for line in path.read_text("ascii").splitlines())


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
    source = Source(tmp_path, None, nothing)
    before = source.snapshot()
    assert source.snapshot() is before
    grow(tmp_path, 5)
    assert source.snapshot() != before
    with live(tmp_path):
        before = source.snapshot()
        assert source.snapshot() is not before


def test_however_many_look_a_run_is_read_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "EVERY_S", 60.0)
    source = Source(tmp_path, None, nothing)
    before = source.snapshot()
    growing(tmp_path, 3)
    assert source.snapshot() is before


async def test_of_a_live_run_the_buffer_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "BETWEEN_S", 0.01)
    (tmp_path / "run.json").write_text(json.dumps({"run": RUN, "name": "r"}))
    (tmp_path / "keys").mkdir()
    async with serving_buffer(tmp_path, settings()) as peers:
        note(tmp_path, peers.endpoint, guarded=False)
        await peers.learner()
        engine = await peers.engine("rollout-0")
        await engine.lease(4, 0, 1.0)
        with live(tmp_path), serving(tmp_path) as server:
            told = json.loads((await asyncio.to_thread(ask, server, "/snapshot.json"))[1])
    assert told["run"]["state"] == "running"
    assert told["tickets"]["by_state"]["leased"] == 1


def test_a_fix_that_something_speaks_against_is_not_given_and_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def against(snapshot: Snapshot, fix: Fix) -> str:
        asked.append(fix.dial)
        return "it is slower"

    snapshot, advice = show.look(ROOT / "finished")
    assert json.loads(Source(ROOT / "finished", None, against).snapshot())["advice"]["fixes"] == []
    assert asked == [fix.dial for fix in advice.fixes] != []
    asked.clear()
    judge = Judge(against)
    assert [judge(snapshot, advice.fixes[0]) for _ in range(3)] == ["it is slower"] * 3
    judge(snapshot, replace(advice.fixes[0], proposed="another"))
    assert len(asked) == 2
    monkeypatch.setattr(web, "JUDGED_S", 0.0)
    judge(snapshot, advice.fixes[0])
    assert len(asked) == 3


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
