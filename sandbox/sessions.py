"""A session: a live process that runs one cell after the other, as its supervisor sees it.

Consumes    cells; ACTIVE, OUTCOME and DIED records of the guest
Produces    one result per cell
Waits for   ACTIVE before a cell is sent (the state was forked aside), then for the cell, at most its limit
Invariant   a cell that is killed takes nothing along: the state before it goes on; what cannot go on is ended and said
            to be lost, never started anew in silence
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from sandbox import guest
from sandbox.api import Limits, Status
from sandbox.jobs import Coding, OnResult, ProgramJob
from sandbox.loop import Loop
from sandbox.slots import Slots

_CREDENTIALS = struct.Struct("iII")
_STOP_S = 1.0


class Session(Coding):
    """A session at work or at rest."""

    session = True

    def __init__(
        self,
        loop: Loop,
        slots: Slots,
        name: str,
        limits: Limits,
        lead: list[list[Any]],
        *,
        on_blocked: Callable[[], None],
        on_result: OnResult,
        on_lost: Callable[[Session], None],
    ) -> None:
        self.name = name
        self._on_lost = on_lost
        self._inner_pid = 0
        self._ready = False
        super().__init__(loop, slots, limits, on_blocked=on_blocked, on_result=on_result)
        # Who sent a record is told by the kernel: the process that computes, as the host numbers it.
        self.ctl.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.send(*lead, ["session"])

    def run(self, job: ProgramJob) -> None:
        """Run a cell, as soon as the state was forked aside."""
        self.job = job
        self.busy, self.started_s = True, time.monotonic()
        if self._ready:
            self._begin_cell(job)

    def _begin_cell(self, job: ProgramJob) -> None:
        self._ready = False
        self.discard_output()
        self.begin([job.code, job.stdin.encode()], job.limits)

    def receive(self) -> bytes:
        """Some bytes of records, and who sent them."""
        chunk, ancillary, _, _ = self.ctl.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
        for _, kind, data in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                self._sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        return chunk

    def take(self, record: list[Any]) -> None:
        """What the guest reports."""
        if record[0] == guest.ACTIVE and isinstance(record[1], int):
            self._inner_pid, self.pid = record[1], self._sender
            self._ready = True
            if self.job is not None and self.busy:
                self._begin_cell(self.job)
        elif record[0] == guest.DIED and isinstance(record[1], int):
            self.drain()
            group = self.slot.group
            self.died(abs(record[1]), 0.0, group is not None and group.killed())
        else:
            self.take_outcome(record)

    def stop(self) -> None:
        """Kill the cell; its parent reports that and goes on from the state before."""
        job = self.job
        self._slots.kill_one(self.slot, self._inner_pid)
        self.loop.after(_STOP_S, lambda: self.end() if job is not None and self.job is job else None)

    def over(self) -> None:
        """The cell is done, the session stays."""
        self.rest()

    def broken(self, why: str) -> None:
        """It could not be started: another try is another session."""
        super().broken(why)
        self.end()

    def hung_up(self) -> None:
        """No process is left that could go on."""
        self.drain()
        self.end()

    def end(self) -> None:
        """End the session; a cell under way is judged by why it was stopped, else as killed."""
        if self.done:
            return
        if self.job is not None:
            self.conclude(self.reason or Status.SIGNAL, number=0 if self.reason else 9)
        self._slots.end(self.slot)
        self.finish()
        self._on_lost(self)

    def lose(self) -> None:
        """Its zygote died: a cell under way is lost with the session."""
        if self.job is not None:
            self.conclude(Status.SESSION_LOST)
        self.finish()
        self._on_lost(self)

    def died(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """A cell died. (Also: the whole slot was cleaned, without our asking.)"""
        super().died(wait_status, cpu_s, out_of_memory)
        if self.slot.occupant is not self:
            self.finish()
            self._on_lost(self)
