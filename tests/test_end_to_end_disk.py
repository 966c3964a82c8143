"""A whole run whose disk fills up, and the one command that goes on with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import NEEDS_ROOT, is_root
from tests.whole_run import ENDLESS, Command, sound

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_root(), reason=NEEDS_ROOT)]
DISK_MIB = 256


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def command(disk: Path) -> Iterator[Command]:
    command = Command(disk / "run")
    yield command
    command.close()


def fill(place: Path) -> Path:
    """Leaves not a block free; the file to delete for them."""
    filler = place / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    return filler


def test_a_full_disk_ends_a_run_with_the_reason_and_it_goes_on_once_there_is_room(command: Command, disk: Path) -> None:
    driver = command.run("run.max_restarts=1", "run.drain_s=5", *ENDLESS)
    command.until_step(1)
    filler = fill(disk)
    command.ended(driver, 1)
    command.nothing_left()
    os.unlink(filler)
    told = command.told()
    assert "No space left on device" in told or "database or disk is full" in told

    steps = command.steps_taken() + 2
    command.ended(command.start("resume", str(command.directory), "--set", f"run.steps={steps}"), 0)
    command.nothing_left()
    summary, figures = command.summary(), sound(command.directory)
    assert (summary["outcome"], summary["learner_steps"], figures["groups_trained"]) == ("reached", steps, 2 * steps)
