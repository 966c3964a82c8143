"""Where the screen gets a run from: its directory, or the page's server of `rocstar monitor RUN --web`.

Consumes    a run directory; or http://HOST:PORT, e.g. the end of `ssh -L PORT:127.0.0.1:PORT`
Produces    the snapshot with its advice, as `--json` prints it, and single records: the same JSON from both
Waits for   the disk; the server, at most TIMEOUT_S
Invariant   nothing of a run is changed; through no proxy, and no redirection is followed
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from launch.config import ConfigError
from launch.monitor import show, web, web_records
from launch.monitor.fixes import Fix
from launch.monitor.snapshot import Snapshot

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20


class RunSource(Protocol):
    """Both raise ConfigError, OSError or ValueError when there is nothing to read."""

    def snapshot(self) -> bytes: ...

    def records(self, query: str) -> dict[str, Any]: ...


class Directory:
    """A run whose files are at hand.

    Raises:
        ConfigError: no such directory, or its recipe is of another release.
    """

    def __init__(self, directory: Path, window_s: float | None, against: Callable[[Snapshot, Fix], str]) -> None:
        show.facts_of(directory)
        self._directory = directory
        self._source = web.Source(directory, window_s, against)

    def snapshot(self) -> bytes:
        return self._source.snapshot()

    def records(self, query: str) -> dict[str, Any]:
        return web_records.details(self._directory, query)


class Served:
    """A run that another `rocstar monitor RUN --web` serves."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())

    def snapshot(self) -> bytes:
        return self._get("/snapshot.json")

    def records(self, query: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._get(f"/records.json?{query}"))
        return told

    def _get(self, path: str) -> bytes:
        try:
            with self._opener.open(self._url + path, timeout=TIMEOUT_S) as answer:
                body: bytes = answer.read(MAX_BYTES)
                return body
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(1000).decode("utf-8", "replace").strip()
            raise ConfigError(f"{self._url} answers {error.code}: {told}") from None
        except OSError as error:
            why = getattr(error, "reason", error)
            raise ConfigError(f"{self._url} cannot be read ({why}); `rocstar monitor RUN --web` serves a run") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def source_of(run: str, window_s: float | None, against: Callable[[Snapshot, Fix], str]) -> RunSource:
    """Of a directory's path or a served page's address.

    Raises:
        ConfigError: there is no such directory, or a window is asked of a server, which has its own.
    """
    if not run.startswith(("http://", "https://")):
        return Directory(Path(run), window_s, against)
    if window_s is not None:
        raise ConfigError("monitor: --window is the server's to say, give it to its `rocstar monitor RUN --web`")
    return Served(run)
