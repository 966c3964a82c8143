"""What a jailed child does: runs one program, a session's cells, or grades answers; reports on its control socket.

Consumes    one job, read from the control socket after the child was walled in (session: cell after cell; grader:
            batch after batch); before it perhaps the node's preamble
Produces    one OUTCOME (program); a VERDICT per answer and an OUTCOME per batch (grader); a session: ACTIVE, then
            OUTCOME or DIED per cell
Waits for   the job (the supervisor kills a child whose job never comes)
Invariant   the job is read after the last wall stands; BROKEN is believed only while the job is unread, so that user
            code cannot blame the sandbox
"""

from __future__ import annotations

import ast
import atexit
import gc
import os
import resource
import select
import signal
import struct
import sys
import types
from typing import Any, NoReturn

import msgpack

from sandbox import answers, jail
from sandbox.api import Verdict

OUTCOME, VERDICT, BROKEN, ACTIVE, DIED = 0, 1, 2, 3, 4
FILENAME = "<code>"
PREAMBLE = "sandbox.preamble"
MAX_VALUE_CHARS = 8192
_AST: int = ast.PyCF_ONLY_AST
_MAX_MESSAGE_CHARS = 2000
_MAX_FRAMES = 12
_LENGTH = struct.Struct("<I")


def receive(fd: int) -> list[Any]:
    """Read one length-prefixed msgpack record."""
    head = _read_exactly(fd, _LENGTH.size)
    return list(msgpack.unpackb(_read_exactly(fd, _LENGTH.unpack(head)[0])))


def _read_exactly(fd: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(fd, count - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts


def send(fd: int, *record: Any) -> None:
    """Write one length-prefixed msgpack record."""
    body = msgpack.packb(record, unicode_errors="replace")
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


def give_up(ctl: int, why: str) -> NoReturn:
    """The sandbox's own failure; the job stays unread until the supervisor, which has seen that it is, hangs up."""
    send(ctl, BROKEN, why)
    hangs_up = select.poll()
    hangs_up.register(ctl, 0)
    hangs_up.poll()
    os._exit(1)


def run_preamble(ctl: int, text: str, number: int, main: types.ModuleType) -> None:
    """Run the node's own code in the program's namespace; its failure is none of the program's."""
    namespace = main.__dict__
    namespace["call_number"] = number
    try:
        exec(compile(text, PREAMBLE, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        give_up(ctl, f"{PREAMBLE}: {type(error).__name__}: {_message(error)}")
    namespace.pop("call_number", None)


def run_program(ctl: int, code: str, stdin: bytes, main: types.ModuleType, atexit_base: int) -> NoReturn:
    """Run `code` as __main__ and report how it ended."""
    me = os.getpid()
    outcome = _run(code, stdin, main, atexit_base)
    if os.getpid() != me:  # a fork of the user's that came back through our frames
        os._exit(0 if outcome[0] == "ok" else 1)
    send(ctl, OUTCOME, *outcome, _cpu_s())
    os._exit(0)


def run_session(ctl: int, main: types.ModuleType, atexit_base: int) -> NoReturn:
    """Run cell after cell in one namespace; each begins in a fork, so that its parent still has the state before it.

    The parent waits. A cell that ends ends its parent, and goes on as the parent of the next; one that dies is
    reported by its parent, which starts anew from what it has.
    """
    while True:
        pid = os.fork()
        if pid:
            status = os.waitpid(pid, 0)[1]
            send(ctl, DIED, status)
            continue
        me = os.getpid()
        send(ctl, ACTIVE, me)
        code, stdin = receive(ctl)
        used_s = _cpu_s()
        outcome = _run(code, stdin, main, atexit_base)
        if os.getpid() != me:
            os._exit(0 if outcome[0] == "ok" else 1)
        os.kill(os.getppid(), signal.SIGKILL)
        send(ctl, OUTCOME, *outcome, _cpu_s() - used_s)


def _run(code: str, stdin: bytes, main: types.ModuleType, atexit_base: int) -> list[Any]:
    """Run one piece of code; [status, value, exception, line, exit code]."""
    if stdin or _Input.used:
        _Input.replace(stdin)
    if "random" in code and "numpy" in sys.modules:  # forks would all draw the same numbers
        sys.modules["numpy"].random.seed()
    try:
        value = execute(code, main.__dict__)
        outcome = ["ok", value, "", 0, 0]
        _finish(atexit_base)
    except BaseException as error:
        outcome = _describe(error)
    _flush()
    return outcome


class _Input:
    """Standard input, as long as no call used it the empty device of the zygote."""

    used = False

    @classmethod
    def replace(cls, stdin: bytes) -> None:
        """Put a text on it."""
        fd = os.memfd_create("stdin")
        view = memoryview(stdin)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        os.close(fd)
        if cls.used:
            sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        cls.used = True


def _cpu_s() -> float:
    """CPU-seconds of this process and of the children it waited for."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + waited.ru_utime + waited.ru_stime


def execute(code: str, namespace: dict[str, Any]) -> str:
    """Run the code; the repr of a last expression, or "" when there is none or it is None."""
    tree: ast.Module = compile(code, FILENAME, "exec", _AST, dont_inherit=True)
    last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILENAME, "exec", dont_inherit=True), namespace)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), FILENAME, "eval", dont_inherit=True), namespace)
    return "" if value is None else _cut(repr(value), MAX_VALUE_CHARS)


def _finish(atexit_base: int) -> None:
    """What a Python process does at its end: wait for threads, run exit functions."""
    _flush()
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        threading._shutdown()
    if atexit._ncallbacks() > atexit_base:
        atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the user closed or replaced it: nothing of ours is in it
            continue


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def _describe(error: BaseException) -> list[Any]:
    """[status, value, exception, line, exit code] of an exception that reached the top."""
    if isinstance(error, MemoryError):
        jail.relax_memory()
    if isinstance(error, SystemExit):
        return _describe_exit(error.code)
    frames = _user_frames(error)
    line = frames[-1][0] if frames else 0
    if isinstance(error, SyntaxError) and error.filename == FILENAME:
        line = error.lineno or 0
        frames = []
        message = error.msg
    else:
        message = _message(error)
    name = type(error).__name__
    text = f"{name}: {_cut(message, _MAX_MESSAGE_CHARS)}" if message else name
    trace = "".join(f"  line {number}, in {where}\n" for number, where in frames[-_MAX_FRAMES:])
    _complain(f"{trace}{text}\n")
    status = "memory" if isinstance(error, MemoryError) else "error"
    error.__traceback__ = None
    return [status, "", text, line, 0]


def _describe_exit(code: Any) -> list[Any]:
    if code is None or isinstance(code, int):
        number = (code or 0) & 0xFF
    else:
        number = 1
        _complain(f"{code}\n")
    return ["exit" if number else "ok", "", "", 0, number]


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # user code may do anything in __str__
        return "<no message>"


def _user_frames(error: BaseException) -> list[tuple[int, str]]:
    frames = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename == FILENAME:
            frames.append((step.tb_lineno, code.co_name))
        step = step.tb_next
    return frames


def _complain(text: str) -> None:
    _flush()
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:  # the user closed it
        return


def run_grader(ctl: int) -> NoReturn:
    """Grade batch after batch of (answer, gold); each verdict is reported as soon as it is known.

    A comparison that ran out of time or memory was interrupted anywhere: the process ends, and what it remembers
    with it.
    """
    gc.disable()
    while True:
        pairs, limit_s = receive(ctl)
        for number, (answer, gold) in enumerate(pairs):
            verdict = answers.grade(answer, gold, limit_s)
            send(ctl, VERDICT, number, verdict.value)
            if verdict is Verdict.TIMEOUT:
                os._exit(0)
        send(ctl, OUTCOME, "ok", "", "", 0, 0, 0.0)
        gc.collect(0)
