"""`python -m sandbox run FILE | shell | serve`: a program, an interactive session, a node by itself.

Consumes    the command line
Produces    a program's output and exit code; a node that listens until it is interrupted
Waits for   the program, the person, the interrupt
Invariant   exit codes: 0 the program ran, 1 it failed, 2 usage or a host that cannot isolate
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sandbox.api import Limits, Result, Status
from sandbox.client import SandboxClient
from sandbox.http import HttpFront
from sandbox.local import Sandbox
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from sandbox.shard import StartRefused


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sandbox", description="Runs Python that you do not trust.")
    parser.add_argument("--profile", choices=("lean", "sci", "auto"), default="auto")
    parser.add_argument("--isolation", choices=("full", "rlimits"), default="full")
    parser.add_argument("--workers", type=int, default=0, help="0: one per core")
    parser.add_argument("--wall-s", type=float, default=4.0)
    parser.add_argument("--memory-mib", type=int, default=256)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a file")
    run.add_argument("file", type=Path, help="- reads the program from standard input")
    commands.add_parser("shell", help="an interactive session")
    serve = commands.add_parser("serve", help="a node of its own")
    serve.add_argument("--bind", default="tcp://127.0.0.1:7071")
    serve.add_argument("--http-port", type=int, default=0, help="JSON over HTTP on loopback as well; 0: none")
    return parser


def _show(result: Result) -> None:
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    last = result.to_text().rpartition("\n")[2]
    if result.status not in (Status.OK, Status.ERROR):
        sys.stderr.write(f"{last}\n")


def _run(settings: SandboxSettings, file: Path) -> int:
    from_stdin = str(file) == "-"
    code = sys.stdin.read() if from_stdin else file.read_text()
    stdin = "" if from_stdin or sys.stdin.isatty() else sys.stdin.read()
    with Sandbox(settings) as sandbox:
        result = sandbox.run(code, stdin)
    _show(result)
    return 0 if result.status is Status.OK else 1


def _shell(settings: SandboxSettings) -> int:
    """Cells until the end of input; a line that ends in a colon begins one that an empty line ends."""
    with Sandbox(settings) as sandbox:
        session = sandbox.session()
        while True:
            try:
                lines = [input(">>> ")]
                while lines[-1].endswith(":") or (len(lines) > 1 and lines[-1]):
                    lines.append(input("... "))
            except (EOFError, KeyboardInterrupt):
                return 0
            limits = Limits(wall_s=settings.wall_s, cpu_s=settings.cpu_s, memory_mib=settings.memory_mib)
            _show(session.run("\n".join(lines), limits=limits))


async def _serve(settings: SandboxSettings, bind: str, http_port: int) -> int:
    server = SandboxServer(settings)
    endpoint = await server.start(bind)
    print(f"sandbox node at {endpoint}, {settings.num_workers()} workers", flush=True)
    client = SandboxClient([endpoint])
    front = HttpFront(client)
    if http_port:
        print(f"JSON over HTTP at http://127.0.0.1:{await front.start(port=http_port)}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(server.failed())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await front.stop()
    await client.close()
    await server.stop()
    if server.failure is not None:
        raise server.failure
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    given = _parser().parse_args(arguments)
    try:
        settings = SandboxSettings(
            profile=given.profile,
            isolation=given.isolation,
            workers=1 if given.command != "serve" and not given.workers else given.workers,
            wall_s=given.wall_s,
            cpu_s=given.wall_s,
            memory_mib=given.memory_mib,
        )
        if given.command == "run":
            return _run(settings, given.file)
        if given.command == "shell":
            return _shell(settings)
        return asyncio.run(_serve(settings, given.bind, given.http_port))
    except (StartRefused, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
