"""`rocstar monitor RUN --web`: the one snapshot as a page for a browser on this host.

Consumes    a run directory, through `show.look`; GET requests
Produces    page.html with its scripts in it; as JSON the snapshot with its advice, as `--json` prints it, and records
            for the drill-downs
Waits for   requests, until Ctrl-C
Invariant   it listens on loopback, answers only GET of its own paths, and only who calls it by a loopback name (a page
            of another site that points its own name here is refused); no path names a file; the page may load nothing
            from elsewhere. However many pages look, the run is read at most once per EVERY_S, and one that is over
            only when its files have changed; a fix is judged (launch/tune/check.py) once per JUDGED_S

Any user of this host can look. From another host, through `ssh -L PORT:127.0.0.1:PORT`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from launch.config import ConfigError
from launch.monitor import show
from launch.monitor.fixes import Fix
from launch.monitor.snapshot import Snapshot
from launch.monitor.web_records import NotUnderstood, details
from launch.reach import is_driven

PAGE = Path(__file__).with_name("page.html")
SCRIPTS = [Path(__file__).with_name(name) for name in ("draw.js", "views.js", "recorded.js", "page.js")]
EVERY_S, JUDGED_S = 0.9, 120.0
IDLE_S = 10.0
"""a connection that asks nothing for so long is closed"""
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


Against = Callable[[Snapshot, Fix], str]
"""what speaks against a fix, or \"\""""


class Judge:
    """Remembers what was said against a fix: to find it takes simulations."""

    def __init__(self, against: Against) -> None:
        self._against = against
        self._said: dict[str, tuple[float, str]] = {}

    def __call__(self, snapshot: Snapshot, fix: Fix) -> str:
        key, now_s = f"{fix.dial} {fix.now} {fix.proposed}", time.monotonic()
        self._said = {one: said for one, said in self._said.items() if now_s < said[0] + JUDGED_S}
        if key not in self._said:
            self._said[key] = (now_s, self._against(snapshot, fix))
        return self._said[key][1]


class Source:
    """The newest look at a run, shared by all who ask."""

    def __init__(self, directory: Path, window_s: float | None, against: Against) -> None:
        self._directory, self._window_s, self._judge = directory, window_s, Judge(against)
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._seen: tuple[Any, ...] = ()
        self._told = b""

    def snapshot(self) -> bytes:
        """As JSON.

        Raises:
            ConfigError: the directory is gone, or its recipe is of another release.
        """
        with self._lock:
            if not self._told or time.monotonic() >= self._looked_s + EVERY_S:
                seen = self._files()
                if not self._told or seen != self._seen or is_driven(self._directory):
                    self._told = show.as_json(*show.look(self._directory, self._window_s, self._judge)).encode()
                self._looked_s, self._seen = time.monotonic(), seen
            return self._told

    def _files(self) -> tuple[Any, ...]:
        """What would change if the run did."""
        paths = [*self._directory.glob("*.*"), *self._directory.glob("metrics/*.jsonl")]
        found = []
        for path in sorted(paths):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((path, stat.st_size, stat.st_mtime_ns))
        return (is_driven(self._directory), *found)


class Server(ThreadingHTTPServer):
    """Serves one run; port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int, window_s: float | None, against: Against) -> None:
        self.directory = directory
        self.source = Source(directory, window_s, against)
        self.page = page()
        self.policy = content_policy(self.page)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


def serve(directory: Path, port: int, window_s: float | None, against: Against) -> None:
    """Until Ctrl-C.

    Raises:
        ConfigError: no such directory, or the port is in use.
    """
    show.facts_of(directory)
    try:
        server = Server(directory, port, window_s, against)
    except OSError as error:
        told = f"monitor: port {port} cannot be had ({error.strerror}); without --port a free one is taken"
        raise ConfigError(told) from None
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.url}  shows {directory}; Ctrl-C ends it", flush=True)
        server.serve_forever()


def page() -> str:
    """One file, which needs no other."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    return PAGE.read_text(encoding="utf-8").replace("/* scripts */", scripts)


def content_policy(page: str) -> str:
    """Nothing but the page's own script and style, named by their hashes, and questions to its own server."""
    hashes = {
        tag: " ".join(f"'sha256-{_hash(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = IDLE_S
    server_version, sys_version = "rocstar", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "call this host localhost or 127.0.0.1")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, HTML, self.server.page.encode())
        elif self.path == "/snapshot.json":
            self._tell(self.server.source.snapshot)
        elif self.path.startswith("/records.json?"):
            query = self.path.partition("?")[2]
            self._tell(lambda: json.dumps(details(self.server.directory, query)).encode())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there are /, /snapshot.json and /records.json?view=NAME")

    def _tell(self, what: Callable[[], bytes]) -> None:
        """As JSON; what keeps it from being told, too."""
        try:
            told, status = what(), HTTPStatus.OK
        except NotUnderstood as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ConfigError, OSError, ValueError) as error:
            told, status = json.dumps({"error": str(error)}).encode(), HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, JSON, told)

    def _only_get(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _only_get

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._answer(status, TEXT, f"{words}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, format: str, *args: Any) -> None:
        """A page asks once a second: that is no news."""
