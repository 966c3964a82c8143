"""The buffer role: requests in, group commits to disk, replies out.

Consumes    requests of all roles
Produces    durable turns, groups and batches, and one reply per request
Waits for   messages, the disk (in a thread), deadlines of parked requests
Unblocked by the socket, the end of a commit, the clock
Invariant   a reply leaves after everything that was decided before it is durable

One round: take in what is there, apply it to the state, ask parked requests again; then hand the unit to the writer
thread, unless it is still busy with the one before. While it writes, the next unit fills: commits group themselves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from buffer import metrics_log
from buffer.doors import Keys
from buffer.intake import Intake
from buffer.parking import Parking
from buffer.report import standing
from buffer.restore import open_run
from buffer.run_state import Now, Source
from buffer.schema import Problem
from buffer.segments import SegmentGone
from buffer.service import PARKED, Read, Request, Service
from buffer.settings import BufferSettings
from buffer.storage import Storage, Unit
from buffer.tickets import LedgerError
from buffer.transport import Router
from buffer.wire import Head, Reason, Refusal, name_of, pack_head, read_body, read_head, reply_frames

MAX_ROUND_MESSAGES = 256
MAX_READINGS_PER_PEER = 32


class StorageFailed(Exception):
    """The disk refused a commit: nothing of it was acknowledged; free space or repair it, then resume the run."""


@dataclass(frozen=True, slots=True)
class _Reply:
    route: bytes
    seq: int
    kind: str
    value: Any
    """of the kind's answer; a Read; a Refusal"""
    peer: str = ""


class BufferServer:
    """The buffer of one run directory; a directory that holds the run already is taken up again."""

    def __init__(
        self,
        settings: BufferSettings,
        directory: Path,
        run: str,
        problems: Source,
        heldout: Sequence[Problem] = (),
        live: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`directory` is the run's: the buffer writes buffer/ and metrics/ in it; `live`: dials it keeps for others.

        Raises:
            IndexFault, SegmentError: the directory can't be used; the message says what to do.
        """
        self._settings, self._directory, self._name = settings, directory, run
        self._storage = Storage(directory, run, settings.segment_mib << 20)
        self._run = open_run(self._storage, run, settings, problems, heldout, _now(), live)
        self._service = Service(self._run, self._storage)
        self._writer = ThreadPoolExecutor(1, "buffer-writer")
        self._readers = ThreadPoolExecutor(2, "buffer-reader")
        self._readers.map(threading.Barrier(2).wait, [None, None])  # both threads are there from the start
        self._intake, self._parking, self._reading = Intake(), Parking(), Counter[str]()
        self._replies: list[_Reply] = []
        self._committing = False
        self._stopping = self._closed = False
        self._failure: BaseException | None = None
        self._last_tick_s = self._last_log_s = time.monotonic()

    async def start(self, bind: str = "tcp://127.0.0.1:0", keys: Keys | None = None) -> str:
        """Listen; returns the endpoint that peers connect to. Beyond loopback it takes the run's keys."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._router = Router(bind, keys)
        self._loop.add_reader(self._router.fileno, self._wake.set)
        self._main = asyncio.create_task(self._serve(), name="buffer")
        return self._router.endpoint

    async def run_until_stopped(self) -> None:
        """Returns after `stop`.

        Raises:
            StorageFailed: the disk refused; whatever was acknowledged is on it.
        """
        await asyncio.shield(self._main)
        if self._failure is not None:
            raise StorageFailed(f"{self._directory}: {self._failure}") from self._failure

    async def stop(self) -> None:
        """Make durable what was taken in, answer it, close."""
        self._stopping = True
        self._wake.set()
        await self._main

    async def _serve(self) -> None:
        clock = self._run.meters.clock
        try:
            self._set_timer()
            while not self._stopping or self._committing or not self._run.unit.empty:
                state, waits_for = ("blocked", "the disk") if self._committing else ("starved", "requests")
                clock.enter(state, time.monotonic(), waits_for)
                await self._wake.wait()
                self._wake.clear()
                clock.enter("busy", time.monotonic())
                self._round(_now())
        finally:
            self._closed = True
            self._timer.cancel()
            self._loop.remove_reader(self._router.fileno)
            self._writer.shutdown()
            self._readers.shutdown()
            self._router.close()
            self._storage.close()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._settings.heartbeat_s / 4, self._set_timer)
        self._wake.set()

    def _round(self, now: Now) -> None:
        if self._failure is not None:
            return
        self._take_in(now)
        if now.s - self._last_tick_s >= self._settings.heartbeat_s / 4:
            self._tick(now)
        self._service.settle(now)
        while self._ask_parked(now):
            self._service.settle(now)
        self._commit()

    def _take_in(self, now: Now) -> None:
        for _ in range(MAX_ROUND_MESSAGES):
            if self._stopping or not self._intake.is_open(self._run.unit.num_bytes, len(self._replies), now.s):
                return  # the end of the commit under way wakes the loop again
            message = self._router.receive()
            if message is None:
                return
            self._handle(*message, now)
        self._wake.set()

    def _tick(self, now: Now) -> None:
        deaf_s = max(now.s - self._last_tick_s, self._intake.shut_s(now.s))
        stalled = deaf_s > self._settings.dead_after_s / 2
        self._last_tick_s = now.s
        self._service.tick(now, stalled=stalled)
        if now.s - self._last_log_s >= 1.0:
            self._last_log_s = now.s
            self._log(now)

    def _log(self, now: Now) -> None:
        own = self._run.meters.snapshot(now.s)
        lines = [("buffer-0", own), ("run", standing(self._run, now, own))]
        for peer in self._run.peers.by_name.values():
            if peer.unlogged and peer.role != "monitor":
                peer.unlogged = False
                lines.append((peer.name, peer.snapshot))
        self._run.put_meters(now)
        files = self._directory / "metrics"
        end = self._loop.run_in_executor(self._readers, metrics_log.append, files, lines, now.unix_s)
        end.add_done_callback(self._logged)

    def _logged(self, done: asyncio.Future[None]) -> None:
        """Figures that can't be written end no run; that they are missing is counted."""
        if not done.cancelled() and (error := done.exception()) is not None:
            self._run.meters.count(f"metrics_failed/{type(error).__name__}")

    def _handle(self, route: bytes, frames: list[bytes], now: Now) -> None:
        head = Head("", -1, 0, "")
        try:
            if not frames:
                raise Refusal(Reason.MALFORMED, "a message without frames")
            head = read_head(frames[0])
            if head.run != self._name:
                raise Refusal(Reason.WRONG_RUN, f"run {head.run[:80]!r} is not {self._name!r}")
            value = self._answer(route, head, frames[1:], now)
        except Refusal as refusal:
            value = refusal
        except LedgerError as error:
            value = Refusal(Reason.NOT_ALLOWED, str(error))
        if value is not PARKED:
            self._replies.append(_Reply(route, head.seq, head.kind, value, name_of(route)))

    def _answer(self, route: bytes, head: Head, frames: list[bytes], now: Now) -> Any:
        if head.kind == "status":
            return self._service.status(now) | {"run": self._name}
        name = name_of(route)
        peer = None if head.kind == "hello" else self._run.peers.check(name, head.epoch)
        record = read_body(head.kind, frames)
        if peer is None:
            if record.name != name:
                raise Refusal(Reason.NOT_ALLOWED, f"name {record.name[:40]!r} is not that of the connection")
            return self._service.hello(record, now)
        request = Request(head.kind, head.seq, record, frames, peer)
        value = self._service.answer(request, now)
        if value is PARKED and (wait_s := self._parking.park(request, route, now)) is not None:
            self._loop.call_later(wait_s, self._wake.set)
        if isinstance(value, Read):
            if self._reading[name] >= MAX_READINGS_PER_PEER:
                raise Refusal(Reason.NOT_ALLOWED, f"{name}: {MAX_READINGS_PER_PEER} readings are under way")
            self._reading[name] += 1
        return value

    def _ask_parked(self, now: Now) -> bool:
        """Ask every waiting request again; whether one was answered."""
        answered = self._parking.ask(now, self._service.answer)
        for parked, value in answered:
            if isinstance(value, Read):
                self._reading[parked.request.peer.name] += 1
            request = parked.request
            self._replies.append(_Reply(parked.route, request.seq, request.kind, value, request.peer.name))
        return bool(answered)

    # Commits and replies

    def _commit(self) -> None:
        if self._committing:
            return
        unit, self._run.unit = self._run.unit, Unit()
        replies, self._replies = self._replies, []
        if unit.empty:
            self._send_all(replies)
            return
        self._committing = True
        started_s = time.monotonic()
        future = self._loop.run_in_executor(self._writer, self._storage.commit, unit)
        future.add_done_callback(lambda done: self._committed(done, unit, replies, started_s))

    def _committed(self, done: asyncio.Future[None], unit: Unit, replies: list[_Reply], started_s: float) -> None:
        self._committing = False
        if self._closed:
            return
        self._wake.set()
        if (error := done.exception()) is not None:  # memory is ahead of the disk: a restart from there is right
            self._failure, self._stopping = error, True
            self._run.unit = Unit()
            return
        self._run.meters.observe("commit_s", time.monotonic() - started_s)
        self._run.meters.count("payload_bytes", unit.num_bytes)
        self._send_all(replies)
        self._commit()  # what was taken in meanwhile

    def _send_all(self, replies: list[_Reply]) -> None:
        for reply in replies:
            if isinstance(reply.value, Read):
                self._read(reply, reply.value.make)
            else:
                self._send(reply, reply.value, reply_frames(reply.kind, reply.value))

    def _read(self, reply: _Reply, make: Callable[[], Any]) -> None:
        def work() -> tuple[Any, list[bytes]]:
            try:
                value = make()
            except (Refusal, SegmentGone) as error:
                value = error if isinstance(error, Refusal) else Refusal(Reason.UNKNOWN_KEY, str(error))
            return value, reply_frames(reply.kind, value)

        def done(future: asyncio.Future[tuple[Any, list[bytes]]]) -> None:
            self._reading[reply.peer] -= 1
            if self._closed or future.cancelled():
                return
            if (error := future.exception()) is not None:
                self._failure, self._stopping = error, True
                self._wake.set()
            else:
                self._send(reply, *future.result())

        self._loop.run_in_executor(self._readers, work).add_done_callback(done)

    def _send(self, reply: _Reply, value: Any, frames: list[bytes]) -> None:
        if isinstance(value, Refusal):  # every refusal, a reading thread's too, goes by here
            self._run.meters.count(f"refused/{value.reason}")
        kind, *rest = frames
        head = pack_head(kind.decode(), reply.seq, self._run.life, self._name)
        if not self._router.send(reply.route, [head, *rest]):
            self._run.meters.count("replies_lost")
        self._wake.set()  # sending may have taken the socket's event: look again before waiting


def _now() -> Now:
    return Now(time.monotonic(), time.time())
