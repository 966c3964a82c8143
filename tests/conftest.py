"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.buffers import Maker, Process, settings
from tests.whole_run import Command


@pytest.fixture
async def make_buffer(tmp_path: Path) -> AsyncIterator[Maker]:
    """Makes a buffer process that does not outlive the test."""
    made: list[Process] = []

    def make(**changes: Any) -> Process:
        made.append(Process(tmp_path, settings(**changes)))
        return made[-1]

    yield make
    for one in made:
        await one.kill()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A run of its own."""
    command = Command(tmp_path / "run")
    yield command
    command.close()
