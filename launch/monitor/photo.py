"""The terminal's screen as a picture: `python -m launch.monitor.photo RUN --out FILE.svg`.

Consumes    a run directory, or http://HOST:PORT of its page; keys to press first
Produces    an SVG of the screen as a terminal of that size shows it; it loads nothing from elsewhere
Waits for   the page that the last key opens
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from launch.monitor.app import MonitorApp
from launch.monitor.desk import Desk
from launch.monitor.sources import source_of
from launch.tune.check import contradicted

COLUMNS, ROWS = 122, 48
FONT = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
"""that the SVG would load"""


async def photograph(desk: Desk, keys: str = "", columns: int = COLUMNS, rows: int = ROWS) -> str:
    """SVG, after the keys, each of which opens a page or moves within one."""
    app = MonitorApp(desk)
    async with app.run_test(size=(columns, rows)) as pilot:
        before = await app.until(lambda page: bool(page.head or page.failed))
        for key in keys:
            await pilot.press(key)
            before = await app.until(lambda page, before=before: page is not before)  # type: ignore[misc]
        await pilot.pause()
        return FONT.sub("", app.export_screenshot(title="rocstar monitor"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Photographs the terminal's screen of a run.")
    parser.add_argument("run", help="directory, or http://HOST:PORT")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keys", default="", help="to press first, e.g. 6nn")
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--rows", type=int, default=ROWS)
    told = parser.parse_args()
    desk = Desk(source_of(told.run, None, contradicted))
    told.out.write_text(asyncio.run(photograph(desk, told.keys, told.columns, told.rows)), encoding="utf-8")
    print(told.out)


if __name__ == "__main__":
    main()
