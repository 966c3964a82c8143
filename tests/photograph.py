"""The page of `rocstar monitor RUN --web` as a picture: `python -m tests.photograph RUN --out FILE.png`.

Consumes    a run directory; Chromium (apt-get install --no-install-recommends chromium)
Produces    a PNG of the page as it is for that run
Waits for   the page's first drawing
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from launch.monitor.web import Server
from launch.tune.check import contradicted
from tests.chromium import page


def photograph(
    run: Path, *, view: str = "", scheme: str = "light", width: int = 1360, height: int = 0, scale: float = 1.0
) -> bytes:
    """With a drill-down open, or none; height 0: as high as the page is."""
    with Server(run, 0, None, contradicted) as server, page() as shown:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            shown.scheme(scheme)
            shown.size(width, height or 800, scale)
            shown.go(f"{server.url}#{view}")
            shown.until("told && at('lost').hidden && (records || !(at('drill').dataset.view in RECORDED))")
            if not height:
                shown.size(width, shown.value("Math.ceil(document.documentElement.scrollHeight)"), scale)
            return shown.photograph()
        finally:
            server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Photographs the page of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--view", default="", help="a drill-down to open, e.g. engines")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1360)
    parser.add_argument("--height", type=int, default=0, help="of the picture; without it, as high as the page")
    parser.add_argument("--scale", type=float, default=1.0, help="2 for a sharper picture")
    told = parser.parse_args()
    told.out.write_bytes(
        photograph(told.run, view=told.view, scheme=told.scheme, width=told.width, height=told.height, scale=told.scale)
    )
    print(told.out)


if __name__ == "__main__":
    main()
