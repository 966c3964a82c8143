"""One child at work: its job goes in, its output and its report come out, its limits are watched.

Consumes    the control socket and the output pipes of a child, time, its exit report
Produces    one outcome per job, exactly once
Waits for   the child's report or its exit; both have the wall-clock limit as deadline
Invariant   what the child writes is data: outcomes are checked, and none of those it can claim is an infrastructure one
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

import msgpack

from sandbox import guest
from sandbox.api import Limits, Status
from sandbox.loop import IN, OUT, Loop
from sandbox.output import HeadTail
from sandbox.slots import Slot, Slots

_ATTEND_S = 0.005
"""A child older than this has its output read as it comes; most are done before."""
_SAMPLE_S = 0.02
_LINGER_S = 0.05
_CHUNK = 1 << 16
_MAX_RECORD_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_TICKS = os.sysconf("SC_CLK_TCK")


class Running:
    """Plumbing of a child; what its records and its end mean is the subclass's."""

    def __init__(self, loop: Loop, slots: Slots, payload: list[Any], limits: Limits, on_blocked: Callable[[], None]):
        self._loop, self._slots, self._limits, self._on_blocked = loop, slots, limits, on_blocked
        self.started_s = time.monotonic()
        self.blocked = False
        """Whether it sleeps rather than computes."""
        self.done = False
        self.reason: Status | None = None
        """Why the supervisor killed it."""
        self.used_cpu_s = 0.0
        self._pid = 0
        self._record = b""
        self._outputs: dict[int, HeadTail] = {}
        body = msgpack.packb(payload)
        self._unsent = memoryview(_LENGTH.pack(len(body)) + body)
        self._slot = self._launch()

    def _launch(self) -> Slot:
        self._ctl, theirs = socket.socketpair()
        self._ctl.setblocking(False)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        self._out, self._err = HeadTail(), HeadTail()
        for (read, _), sink in zip(pipes, (self._out, self._err), strict=True):
            os.set_blocking(read, False)
            self._outputs[read] = sink
        fds = [theirs.fileno(), pipes[0][1], pipes[1][1]]
        slot = self._slots.start(self, fds, self._limits.memory_mib, self._limits.cpu_s)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        self._send()
        self._loop.after(_ATTEND_S, self._attend)
        self._loop.after(self._limits.wall_s, self._expire)
        return slot

    def _send(self) -> None:
        """Write what the socket takes of the job."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._ctl.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the child is gone; its exit report says how
            self._unsent = memoryview(b"")
        self._loop.watch(self._ctl.fileno(), self._on_control, IN | OUT if self._unsent else IN)

    def _on_control(self) -> None:
        if self._unsent:
            self._send()
        self._read_control()

    def _read_control(self) -> None:
        """Take the records that are there."""
        while not self.done:
            try:
                chunk = self._ctl.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._loop.forget(self._ctl.fileno())
                return
            self._record += chunk
            self._split()

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
        waiting = fcntl.ioctl(self._ctl.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return struct.unpack("i", waiting)[0] > 0

    def _attend(self) -> None:
        """It is no short call: read its output as it comes and look at what it does."""
        if self.done:
            return
        for fd in self._outputs:
            self._loop.watch(fd, lambda fd=fd: self._read_output(fd))  # type: ignore[misc]
        self._slots.ask_pid(self._slot)

    def got_pid(self, pid: int) -> None:
        """The child's process id: from now on it is sampled."""
        if not self.done and not self._pid:
            self._pid = pid
            self._sample()

    def _sample(self) -> None:
        """See how much CPU it has used, and whether it computes or sleeps."""
        if self.done:
            return
        state, cpu_s = _process_times(self._pid)
        asleep = state != "R" and cpu_s == self.used_cpu_s and time.monotonic() - self.started_s > 2 * _SAMPLE_S
        self.used_cpu_s = cpu_s
        if cpu_s >= self._limits.cpu_s:
            self.kill(Status.CPU_TIMEOUT)
            return
        if asleep != self.blocked:
            self.blocked = asleep
            self._on_blocked()
        self._loop.after(_SAMPLE_S, self._sample)

    def _expire(self) -> None:
        if not self.done:
            self.kill(Status.TIMEOUT)

    def kill(self, reason: Status) -> None:
        """Stop it; what it left is read when its exit is reported."""
        if self.reason is None and not self.done:
            self.reason = reason
            self._slots.kill(self._slot)

    def _read_output(self, fd: int) -> None:
        """Read what is there, up to the limit."""
        sink = self._outputs[fd]
        while self._out.total + self._err.total <= self._limits.output_kib << 10:
            try:
                chunk = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self._loop.forget(fd)
                return
            sink.add(chunk)
        self._loop.forget(fd)
        self.kill(Status.OUTPUT_LIMIT)

    def drain(self) -> None:
        """Read what is left in the pipes."""
        for fd in self._outputs:
            self._read_output(fd)

    def over_output(self) -> bool:
        """Whether it wrote more than it may."""
        return self._out.total + self._err.total > self._limits.output_kib << 10

    def finish(self) -> None:
        """The outcome is known: let go of the descriptors; a child that lingers is killed."""
        self.done = True
        self.blocked = False
        self._loop.forget(self._ctl.fileno())
        self._ctl.close()
        for fd in self._outputs:
            self._loop.forget(fd)
            os.close(fd)
        slot, uses = self._slot, self._slot.uses
        if slot.occupant is self:
            self._loop.after(_LINGER_S, lambda: self._end_lingering(slot, uses))

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


def _process_times(pid: int) -> tuple[str, float]:
    """(state, CPU-seconds with those of waited-for children) of a process; ("R", 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "R", 0.0
    return fields[0].decode(), sum(int(field) for field in fields[11:15]) / _TICKS
