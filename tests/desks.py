"""A recorded run as the screen has it, by keys.

Consumes    tests/recorded/finished
Produces    its desk, the pages that keys lead to, a copy that may be changed
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.monitor.desk import Desk, Page
from launch.monitor.sources import Directory
from tests.recorded import ROOT
from tests.served import nothing

FINISHED = ROOT / "finished"


def desk(directory: Path = FINISHED) -> Desk:
    return Desk(Directory(directory, None, nothing))


def pages(one: Desk, keys: Sequence[str]) -> Iterator[Page]:
    for key in keys:
        one.press(key)
        yield one.page()


def copy(target: Path) -> Path:
    return Path(shutil.copytree(FINISHED, target / "run"))
