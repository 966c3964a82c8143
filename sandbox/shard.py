"""A supervisor process, as the front sees it.

Consumes    calls and answers to place
Produces    what the supervisor reports, as calls of the front's functions
Waits for   READY (at most START_S)
Unblocked by the supervisor's end: `on_end` is called with what it still had
Invariant   a call is placed only against credit that the supervisor gave
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack

from sandbox import messages
from sandbox.jail import JailPlan

START_S = 60.0
_STOP_S = 5.0
_ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox import supervisor; supervisor.main()"


class StartRefused(RuntimeError):
    """The node cannot run on this host; the message says what is missing."""


class Shard(asyncio.Protocol):
    """One supervisor."""

    def __init__(self, on_report: Callable[[Shard, list[Any]], None], on_end: Callable[[Shard], None]) -> None:
        self.credit = 0
        """Jobs it will take now."""
        self.held: set[int] = set()
        """Numbers of the entries it has."""
        self.cgroups = False
        self._on_report, self._on_end = on_report, on_end
        self._unpacker = msgpack.Unpacker(max_buffer_size=0)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    async def start(self, plan: JailPlan, profile: str, max_sessions: int, preamble: str, wishes: list[str]) -> None:
        """Start the process and wait until its zygotes are warm.

        Raises:
            StartRefused: the host lacks a piece of isolation, or the process ended or kept silent.
        """
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: self, self._launch(plan, profile, max_sessions, preamble, wishes)
        )
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except TimeoutError:
            await self.stop()
            raise StartRefused(f"a sandbox supervisor was not ready after {START_S:.0f} s: see its log") from None

    def _launch(
        self, plan: JailPlan, profile: str, max_sessions: int, preamble: str, wishes: list[str]
    ) -> socket.socket:
        """Start the process; our end of its socket. (Popen blocks for a millisecond, once per shard.)"""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parent.parent)
        command = [sys.executable, "-I", "-c", _ENTRY, root, json.dumps(asdict(plan)), profile, str(max_sessions)]
        command += [preamble, *wishes]
        environment = {"LANG": "C.UTF-8", "PATH": os.defpath, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
        self._process = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, cwd="/"
        )
        theirs.close()
        return ours

    @property
    def pid(self) -> int:
        """The supervisor's process id; 0 before the start."""
        return self._process.pid if self._process else 0

    def send(self, *message: Any) -> None:
        """Hand the supervisor a message."""
        if self._transport is not None:
            self._transport.write(msgpack.packb(message))

    async def stop(self) -> None:
        """End the supervisor and all below it, and wait until it has gone."""
        self._stopping = True
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        wait = asyncio.get_running_loop().run_in_executor(None, self._process.wait, _STOP_S)
        try:
            await wait
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is in the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes from the supervisor."""
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._accept(message)

    def _accept(self, message: list[Any]) -> None:
        if message[0] == messages.WANT:
            self.credit += message[1]
        elif message[0] == messages.READY and not self._ready.done():
            self.cgroups = bool(message[1])
            self._ready.set_result(None)
        elif message[0] == messages.REFUSED and not self._ready.done():
            self._ready.set_exception(StartRefused(message[1]))
        self._on_report(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the supervisor is gone."""
        self.credit = 0
        was_ready = self._ready.done() and self._ready.exception() is None
        if not self._ready.done():
            self._ready.set_exception(StartRefused("a sandbox supervisor ended while it started: see its log"))
            self._ready.exception()  # seen: nobody may wait for it any more
        if self._process is not None and not self._stopping:
            self._process.kill()
            self._process.wait()
            if was_ready:  # one that never was is the business of who waits for its start
                self._on_end(self)
