"""The lock that one driver holds, and a look at it that is no lock.

Consumes    the path of a file
Produces    the open file whose closing, or whose process's end, gives the lock back; whether anybody holds it
Waits for   nothing
Invariant   who only looks is in nobody's way: a look takes no lock, not even for a moment
"""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path
from typing import IO

_WHOLE_FILE = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length (0: all), pid (0: of an open file)"""


def hold(path: Path) -> IO[str] | None:
    """The held lock; None when somebody else holds it."""
    file = open(path, "w", encoding="ascii")  # noqa: SIM115 - held until it is closed
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
    except BlockingIOError:
        file.close()
        return None
    return file


def is_held(path: Path) -> bool:
    """Somebody, this process included, holds it."""
    try:
        with open(path, encoding="ascii") as file:
            told = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
    except FileNotFoundError:
        return False
    return bool(_WHOLE_FILE.unpack(told)[0] != fcntl.F_UNLCK)
