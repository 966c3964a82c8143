"""One child at work: its job goes in, its output and its report come out, its limits are watched.

Consumes    the control socket and the output pipes of a child, time, its exit report
Produces    one outcome per job, exactly once
Waits for   the child's report or its exit; both have the wall-clock limit as deadline
Invariant   what the child writes is data: outcomes are checked, and none of those it can claim is an infrastructure one
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

import msgpack

from sandbox import guest, linux
from sandbox.api import Limits, Status
from sandbox.loop import IN, OUT, Loop
from sandbox.output import HeadTail
from sandbox.slots import Slot, Slots

_ATTEND_S = 0.005
"""A child older than this has its output read as it comes; most are done before."""
_YOUNG_S = 0.03
"""A child younger than this is looked at more often: it may be about to sleep, and another could run."""
_SAMPLE_S = 0.02
_LINGER_S = 0.05
_CHUNK = 1 << 16
_MAX_LEFT_CHUNKS = 16
_MAX_RECORD_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class Running:
    """Plumbing of a child; what its records and its end mean is the subclass's."""

    session = False
    """Whether it takes one job after the other."""

    def __init__(self, loop: Loop, slots: Slots, limits: Limits, on_blocked: Callable[[], None]) -> None:
        self.loop, self._slots, self._on_blocked = loop, slots, on_blocked
        self.limits = limits
        self.started_s = 0.0
        self.busy = False
        """Whether a job is under way."""
        self.blocked = False
        """Whether it sleeps rather than computes."""
        self.done = False
        """Whether the child is finished with."""
        self.reason: Status | None = None
        """Why the supervisor killed it."""
        self.used_cpu_s = 0.0
        self.out, self.err = HeadTail(), HeadTail()
        self.pid = 0
        """As the host sees it; 0 until it is known."""
        self._turn = 0
        self._was_asleep = False
        self._record = b""
        self._unsent = memoryview(b"")
        self.slot = self._launch()

    def _launch(self) -> Slot:
        self.ctl, theirs = socket.socketpair()
        self.ctl.setblocking(False)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for read, _ in pipes:
            os.set_blocking(read, False)
        self._reads = [read for read, _ in pipes]
        fds = [theirs.fileno(), pipes[0][1], pipes[1][1]]
        slot = self._slots.start(self, fds, self.limits.memory_mib, self.limits.cpu_s, session=self.session)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        return slot

    def begin(self, payload: list[Any], limits: Limits, *lead: list[Any]) -> None:
        """Give the child a job, and before it the records of `lead`."""
        self.limits = limits
        self.started_s = time.monotonic()
        self.busy, self.reason, self.used_cpu_s, self._was_asleep = True, None, 0.0, False
        self.out, self.err = HeadTail(), HeadTail()
        self._turn += 1
        turn = self._turn
        self.send(*lead, payload)
        self.loop.after(_ATTEND_S, lambda: self._attend(turn))
        self.loop.after(limits.wall_s, lambda: self._expire(turn))

    def send(self, *records: list[Any]) -> None:
        """Write records to the child, at once: while it is at one, it has not read the next."""
        bodies = [msgpack.packb(record) for record in records]
        self._unsent = memoryview(bytes(self._unsent) + b"".join(_LENGTH.pack(len(body)) + body for body in bodies))
        self._send()

    def _send(self) -> None:
        """Write what the socket takes."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.ctl.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the child is gone; its exit report says how
            self._unsent = memoryview(b"")
        self.loop.watch(self.ctl.fileno(), self._on_control, IN | OUT if self._unsent else IN)

    def _on_control(self) -> None:
        if self._unsent:
            self._send()
        self._read_control()

    def _read_control(self) -> None:
        """Take the records that are there."""
        while not self.done:
            try:
                chunk = self.receive()
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self.loop.forget(self.ctl.fileno())
                self.hung_up()
                return
            self._record += chunk
            self._split()

    def receive(self) -> bytes:
        """Some bytes of records."""
        return self.ctl.recv(_CHUNK)

    def _split(self) -> None:
        while len(self._record) >= _LENGTH.size and not self.done:
            (size,) = _LENGTH.unpack_from(self._record)
            if size > _MAX_RECORD_BYTES:
                self.misused()
                return
            if len(self._record) < _LENGTH.size + size:
                return
            body, self._record = self._record[_LENGTH.size : _LENGTH.size + size], self._record[_LENGTH.size + size :]
            try:
                record = msgpack.unpackb(body)
                if record[0] == guest.BROKEN and self._job_unread():
                    self.broken(str(record[1]))
                else:
                    self.take(record)
            except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException):
                self.misused()

    def _job_unread(self) -> bool:
        """Whether the child has not read its job, so that no user code has run."""
        waiting = fcntl.ioctl(self.ctl.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return struct.unpack("i", waiting)[0] > 0

    def _attend(self, turn: int) -> None:
        """It is no short job: read its output as it comes and look at what it does."""
        if turn != self._turn or not self.busy:
            return
        for fd in self._reads:
            self.loop.watch(fd, lambda fd=fd: self._read_output(fd))  # type: ignore[misc]
        if self.pid:
            self._sample(turn)
        else:
            self._slots.ask_pid(self.slot)

    def got_pid(self, pid: int) -> None:
        """The child's process id: from now on it is sampled."""
        if self.busy and not self.pid:
            self.pid = pid
            self._sample(self._turn)

    def _sample(self, turn: int) -> None:
        """See how much CPU it has used, and whether it computes or sleeps."""
        if turn != self._turn or not self.busy:
            return
        state, cpu_s = linux.process_times(self.pid)
        asleep = state != "R" and cpu_s == self.used_cpu_s and self._was_asleep
        self._was_asleep = state != "R"
        self.used_cpu_s = cpu_s
        if cpu_s >= self.limits.cpu_s:
            self.kill(Status.CPU_TIMEOUT)
            return
        if asleep != self.blocked:
            self.blocked = asleep
            self._on_blocked()
        young = time.monotonic() - self.started_s < _YOUNG_S
        self.loop.after(_ATTEND_S if young else _SAMPLE_S, lambda: self._sample(turn))

    def _expire(self, turn: int) -> None:
        if turn == self._turn and self.busy:
            self.kill(Status.TIMEOUT)

    def kill(self, reason: Status) -> None:
        """Stop the job; what it left is read when its end is reported."""
        if self.reason is None and self.busy:
            self.reason = reason
            self.stop()

    def stop(self) -> None:
        """Kill what computes."""
        self._slots.kill(self.slot)

    def _read_output(self, fd: int) -> None:
        """Read what is there, up to the limit."""
        sink = self.out if fd == self._reads[0] else self.err
        while not self.over_output():
            try:
                chunk = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self.loop.forget(fd)
                return
            sink.add(chunk)
        self.loop.forget(fd)
        self.kill(Status.OUTPUT_LIMIT)

    def drain(self) -> None:
        """Read what is left in the pipes."""
        for fd in self._reads:
            self._read_output(fd)

    def discard_output(self) -> None:
        """Drop what an earlier job left in the pipes."""
        for fd in self._reads:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_MAX_LEFT_CHUNKS):
                    os.read(fd, _CHUNK)

    def over_output(self) -> bool:
        """Whether it wrote more than it may."""
        return self.out.total + self.err.total > self.limits.output_kib << 10

    def rest(self) -> None:
        """The job is done, the child stays."""
        self.busy = self.blocked = False
        for fd in self._reads:
            self.loop.forget(fd)

    def finish(self) -> None:
        """The child is done with: let go of the descriptors; if it lingers it is killed."""
        if self.done:
            return
        self.rest()
        self.done = True
        self.loop.forget(self.ctl.fileno())
        self.ctl.close()
        for fd in self._reads:
            os.close(fd)
        slot, uses = self.slot, self.slot.uses
        if slot.occupant is self:
            self.loop.after(_LINGER_S, lambda: self._end_lingering(slot, uses))

    def _end_lingering(self, slot: Slot, uses: int) -> None:
        if slot.uses == uses and slot.occupant is self:
            self._slots.kill(slot)

    def exited(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """Its process ended: take its last words, then judge."""
        if self.done:
            return
        self._read_control()
        if not self.done:
            self.drain()
            self.died(wait_status, cpu_s, out_of_memory)

    def hung_up(self) -> None:
        """The control socket was closed at the other side; what that means is told by the exit report."""

    def unsettled(self) -> list[int]:
        """The front's ids of what it works at and has not settled."""
        raise NotImplementedError

    def take(self, record: list[Any]) -> None:
        """A record from the child."""
        raise NotImplementedError

    def misused(self) -> None:
        """The child wrote something that is no record."""
        raise NotImplementedError

    def broken(self, why: str) -> None:
        """The child could not be walled in; no user code has run."""
        raise NotImplementedError

    def died(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """The process ended without an outcome."""
        raise NotImplementedError
