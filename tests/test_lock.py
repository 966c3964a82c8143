"""The driver's lock: one holder, and nobody who looks is in its way."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import lock
from launch.reach import is_driven

HOLDER = """
import sys
from pathlib import Path
from launch.lock import hold
held = hold(Path(sys.argv[1]))
print(held is not None, flush=True)
input()
"""


def test_one_holds_it_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "driver.lock"
    assert not is_driven(tmp_path)
    first = lock.hold(path)
    assert first is not None
    assert is_driven(tmp_path)
    assert lock.hold(path) is None
    assert is_driven(tmp_path)
    first.close()
    assert not is_driven(tmp_path)
    second = lock.hold(path)
    assert second is not None
    second.close()


def test_a_look_never_keeps_a_starting_driver_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is stopped in the moment in which it has looked and not gone yet; then a driver starts."""
    path = tmp_path / "driver.lock"
    path.touch()
    look, held = fcntl.fcntl, []

    def stopped(file: Any, command: int, argument: bytes) -> Any:
        told = look(file, command, argument)
        if command == fcntl.F_OFD_GETLK:
            driver = lock.hold(path)
            held.append(driver is not None)
            if driver is not None:
                driver.close()
        return told

    monkeypatch.setattr(fcntl, "fcntl", stopped)
    assert not is_driven(tmp_path)
    assert held == [True]


@pytest.mark.slow
def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "driver.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert lock.is_held(path)
        assert lock.hold(path) is None
        holder.kill()
        holder.wait()
        assert not lock.is_held(path)
