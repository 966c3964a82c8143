"""`rocstar`, and `python -m launch`: the process around the command line.

Consumes    arguments
Produces    the exit code of `launch.cli`
Waits for   the command
Invariant   a command that starts a run listens for signals before it imports anything heavy, and leaves at once when
            it is over, whatever was raised: threads of Ray's would hold up Python's own end
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from launch import early
from launch.early import EXIT_FAILED


def main() -> None:
    """Entry point."""
    starts_a_run = early.listens(sys.argv[1:])
    if starts_a_run:
        early.listen()
    from launch import cli

    if starts_a_run:
        _leave(_code_of_a_run())
    cli.main()


def _code_of_a_run() -> int:
    from launch import cli

    with contextlib.suppress(OSError):  # of output whose disk is full
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        except BaseException:  # the last boundary: told, and the exit code is that of a failure
            traceback.print_exc()
    return EXIT_FAILED


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
