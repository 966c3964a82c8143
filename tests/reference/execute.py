"""Runs the model's code in one child process with a time limit. For tests: it is no sandbox.

Consumes    code
Produces    `sandbox.api.Result`s
Waits for   the child, at most `wall_s` per call
Invariant   the same code gives the same result: results are remembered
"""

import contextlib
import io
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

from sandbox.api import Result, Status


class Executor:
    """A child that executes snippets one after the other; it is replaced when a snippet kills or outlasts it."""

    def __init__(self, wall_s: float = 2.0) -> None:
        self._wall_s = wall_s
        self._known: dict[str, Result] = {}
        self._start()

    def run(self, code: str) -> Result:
        """The result of a snippet."""
        if code not in self._known:
            self._known[code] = self._fresh(code)
        return self._known[code]

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _fresh(self, code: str) -> Result:
        try:
            self._pipe.send(code)
            if self._pipe.poll(self._wall_s):
                status, stdout, exception, line = self._pipe.recv()
                return Result(id="", status=Status(status), stdout=stdout, exception=exception, line=line)
            status = Status.TIMEOUT
        except (EOFError, OSError):
            status = Status.SIGNAL
        self.close()
        self._start()
        return Result(id="", status=status)


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            code = pipe.recv()
            out = io.StringIO()
            status, exception, line = Status.OK, "", 0
            try:
                with contextlib.redirect_stdout(out):
                    exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
            except SyntaxError as error:
                status, exception, line = Status.ERROR, f"SyntaxError: {error.msg}", error.lineno or 0
            except BaseException as error:
                place = error.__traceback__
                while place is not None:
                    line = place.tb_lineno if place.tb_frame.f_code.co_filename == "<tool>" else line
                    place = place.tb_next
                status, exception = Status.ERROR, f"{type(error).__name__}: {error}"
            pipe.send((str(status), out.getvalue(), exception, line))
