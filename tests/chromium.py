"""Headless Chromium as Debian has it, driven through the Chrome DevTools protocol.

Consumes    the browser's program; an address
Produces    `Page`: evaluates JavaScript, clicks, photographs, keeps its requests and complaints
Waits for   the browser's answers, at most PATIENCE_S each
Invariant   the browser keeps all its files in a folder of its own, and when its context is left, however, its processes
            are gone
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

from websockets.sync.client import ClientConnection, connect

from launch import warden

PROGRAM = shutil.which("chromium")
PATIENCE_S = 20.0
_RESTS = """(() => {
  const one = document.querySelector(SELECTOR);
  one.scrollIntoView({block: "center"});
  const box = one.getBoundingClientRect(), where = [box.x + box.width / 2, box.y + box.height / 2];
  const rests = one === window.clicked?.one && String(where) === window.clicked.where;
  window.clicked = {one, where: String(where)};
  return rests && one.contains(document.elementFromPoint(...where)) && where;
})()"""
FLAGS = (
    "--headless",
    "--no-sandbox",  # it runs as root in containers; the only page is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


class Page:
    """One page of a browser."""

    def __init__(self, browser: ClientConnection, process: subprocess.Popen[bytes], marks: dict[str, str]) -> None:
        self._browser, self._number, self._session = browser, 0, ""
        self._process, self._marks = process, marks
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers; what it tells meanwhile is kept."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        self._browser.send(json.dumps({"id": self._number, "method": method, "params": params} | session))
        until_s = time.monotonic() + PATIENCE_S
        while True:
            told = json.loads(self._browser.recv(timeout=until_s - time.monotonic()))
            self._keep(told.get("method"), told.get("params", {}))
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])

    def _keep(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(told["entry"]))

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def scheme(self, name: str) -> None:
        """light | dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def go(self, url: str) -> None:
        told = self.call("Page.navigate", url=url)
        assert "errorText" not in told, told["errorText"]
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression; of a promise, what it becomes."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """The expression's value once it is true, looked at whenever the page draws a frame."""
        look = f"(() => {{ try {{ return {expression}; }} catch (error) {{ return false; }} }})()"
        frames = "const next = () => { const found = LOOK; found ? done(found) : setTimeout(next, 20); }; next();"
        return self.value(f"new Promise(done => {{ {frames.replace('LOOK', look)} }})")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what the selector finds, once it rests there: the page draws itself anew."""
        where = self.until(_RESTS.replace("SELECTOR", json.dumps(selector)))
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def processes(self) -> list[int]:
        """Of the browser, those that run."""
        return alive(self._process, self._marks)

    def photograph(self) -> bytes:
        """PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A page of a browser of its own."""
    assert PROGRAM is not None, "there is no chromium: apt-get install --no-install-recommends chromium"
    marks = {"ROCSTAR_BROWSER": uuid.uuid4().hex}
    with tempfile.TemporaryDirectory(prefix="rocstar-browser-", ignore_cleanup_errors=True) as folder:
        homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"), folder)
        process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={folder}/profile", "about:blank"],
            env=os.environ | homes | marks,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with connect(_endpoint(process), max_size=None, proxy=None, open_timeout=PATIENCE_S) as browser:
                yield Page(browser, process, marks)
        finally:
            _end(process, marks)


def _endpoint(process: subprocess.Popen[bytes]) -> str:
    """Where it listens, as it says itself."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line.decode(errors="replace"))
        if said[-1].startswith("DevTools listening on "):
            return said[-1].removeprefix("DevTools listening on ").strip()
    raise RuntimeError(f"chromium ended before it listened: {''.join(said)}")


def _end(process: subprocess.Popen[bytes], marks: dict[str, str]) -> None:
    """The browser with its children, which are in its session, and its crash reporter in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    warden.kill_marked(marks)
    assert process.stderr is not None
    process.stderr.close()


def alive(process: subprocess.Popen[bytes], marks: dict[str, str]) -> list[int]:
    """What of a browser still runs. Its children write over their environment and so lose their mark."""
    found = set(warden.marked(marks))
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
            state, _, _, session = file.read().rpartition(") ")[2].split()[:4]
            if int(session) == process.pid and state != "Z":
                found.add(int(entry))
    return sorted(found)
