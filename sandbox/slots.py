"""A zygote process and its slots, as the supervisor sees them.

Consumes    descriptors of a call to start; what zygote and slots report
Produces    started children; for each the exit report, once its slot is clean again
Waits for   READY (the start), exit reports (a slot that does not get clean in time is replaced)
Unblocked by the death of the zygote, which is reported with the calls that were in its slots
Invariant   a slot is given out only when no process is left in it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from sandbox import jail, zygote
from sandbox.cgroup import Group, Groups
from sandbox.jail import JailPlan
from sandbox.loop import Loop

_FIRST_SLOTS = 2
_CLEAN_S = 2.0
_ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox import zygote; zygote.main(*sys.argv[2:4])"


class Occupant(Protocol):
    """What runs in a slot."""

    def exited(self, wait_status: int, cpu_s: float, out_of_memory: bool) -> None:
        """Its process ended, the slot is clean."""

    def got_pid(self, pid: int) -> None:
        """The answer to `Slot.ask_pid`."""


@dataclass(slots=True)
class Slot:
    """A place for one call."""

    index: int
    group: Group | None
    commands: socket.socket = field(init=False)
    """The supervisor's end of the init process's socket."""
    occupant: Occupant | None = None
    uses: int = 0
    """How often the slot was given out; tells a late timer that its call is gone."""


class Slots:
    """One zygote and what it runs."""

    def __init__(
        self,
        loop: Loop,
        plan: JailPlan,
        profile: str,
        groups: Groups | None,
        max_slots: int,
        *,
        on_ready: Callable[[Slots, str], None],
        on_free: Callable[[], None],
        on_lost: Callable[[Slots, list[Occupant]], None],
    ) -> None:
        self.profile = profile
        self.ready = False
        self.started = False
        """Whether it was ever warm."""
        self._closed = False
        self._loop, self._plan, self._groups, self._max_slots = loop, plan, groups, max_slots
        self._on_ready, self._on_free, self._on_lost = on_ready, on_free, on_lost
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders = ours
        root = str(Path(__file__).resolve().parent.parent)
        arguments = [sys.executable, "-I", "-c", _ENTRY, root, json.dumps(asdict(plan)), profile]
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict(os.environ)
        self._process = subprocess.Popen(
            arguments, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, cwd="/", close_fds=True
        )
        theirs.close()
        loop.watch(ours.fileno(), self._on_report)

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    def has_room(self) -> bool:
        """Whether a call may be started now; makes another slot where all are taken and more are allowed."""
        if self.ready and not self._free and len(self._slots) < self._max_slots:
            self.add_slot()
        return self.ready and bool(self._free)

    def add_slot(self) -> None:
        """Make one more slot."""
        group = self._groups.make(f"{self.pid}-{len(self._slots)}") if self._groups is not None else None
        slot = Slot(len(self._slots), group)
        self._slots.append(slot)
        self._install(slot)
        self._free.append(slot)

    def _install(self, slot: Slot) -> None:
        """Have the zygote start the slot's init process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), ours.fileno()]
        if slot.group is not None:
            fds.append(slot.group.open_members())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._orders, [zygote.ORDER.pack(zygote.SLOT, slot.index, 0, 0.0)], fds)
        theirs.close()
        if slot.group is not None:
            os.close(fds[2])
        slot.commands = ours
        self._loop.watch(ours.fileno(), lambda: self._on_clean(slot))

    def start(
        self, occupant: Occupant, fds: list[int], memory_mib: int, cpu_s: float, *, session: bool = False
    ) -> Slot:
        """Fork a child for `occupant` into a free slot; [control, stdout, stderr] become its own."""
        slot = self._free.pop()
        slot.occupant = occupant
        slot.uses += 1
        if slot.group is not None:
            slot.group.limit(memory_mib)
        kind = zygote.SESSION if session else zygote.SPAWN
        order = zygote.ORDER.pack(kind, slot.index, memory_mib, cpu_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the zygote died: its hang-up is coming
            socket.send_fds(self._orders, [order], fds)
        return slot

    def ask_pid(self, slot: Slot) -> None:
        """Have the occupant told its process id."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._orders.send(zygote.ORDER.pack(zygote.PID, slot.index, 0, 0.0))

    def kill(self, slot: Slot) -> None:
        """Kill everything in the slot; its exit report follows."""
        if self._closed:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self._plan.full:
                slot.commands.send(zygote.KILL)
            else:
                self._orders.send(zygote.ORDER.pack(zygote.STOP, slot.index, 0, 0.0))
        self._watch_end(slot)

    def kill_one(self, slot: Slot, pid: int) -> None:
        """Kill one process of a session, by its number in the slot."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            slot.commands.send(zygote.ONE.pack(zygote.KILL, pid))

    def end(self, slot: Slot) -> None:
        """Kill everything in a session's slot; its exit report follows."""
        if not self._closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                slot.commands.send(zygote.END)
            self._watch_end(slot)

    def _watch_end(self, slot: Slot) -> None:
        uses = slot.uses
        self._loop.after(_CLEAN_S, lambda: self._replace(slot) if slot.uses == uses and slot.occupant else None)

    def _replace(self, slot: Slot) -> None:
        """The slot did not get clean: end its init process, and with it all else, and make a new one."""
        self._loop.forget(slot.commands.fileno())
        if self._process.poll() is not None:  # its zygote died and took it along: that is noticed by itself
            return
        slot.commands.close()
        self._install(slot)
        self._release(slot, 9, 0.0)

    def _on_clean(self, slot: Slot) -> None:
        report = slot.commands.recv(64)
        if not report:  # the init process died, alone (then it is replaced) or with its zygote (then that is noticed)
            self._replace(slot)
            return
        _, _, status, cpu_s = zygote.REPORT.unpack(report)
        self._release(slot, status, cpu_s)

    def _release(self, slot: Slot, status: int, cpu_s: float) -> None:
        occupant, slot.occupant = slot.occupant, None
        self._clear_tmp(slot)
        if slot not in self._free:
            self._free.append(slot)
        if occupant is not None:
            occupant.exited(status, cpu_s, slot.group is not None and status != 0 and slot.group.killed())
        self._on_free()

    def _clear_tmp(self, slot: Slot) -> None:
        if not self._plan.full:
            shutil.rmtree(jail.plain_tmp(self.pid, slot.index), ignore_errors=True)

    def _on_report(self) -> None:
        try:
            message = self._orders.recv(1 << 16)
        except ConnectionResetError:
            message = b""
        if not message:
            self._lost()
            return
        kind, index, number, cpu_s = zygote.REPORT.unpack_from(message)
        if kind == zygote.READY:
            missing = json.loads(message[zygote.REPORT.size :]).get("missing", "")
            self.ready = self.started = not missing
            for _ in range(_FIRST_SLOTS if self.ready else 0):
                self.add_slot()
            self._on_ready(self, missing)
        elif kind == zygote.EXITED:
            self._replace(self._slots[index]) if number < 0 else self._release(self._slots[index], number, cpu_s)
        else:
            occupant = self._slots[index].occupant
            if occupant is not None and number:
                occupant.got_pid(number)

    def _lost(self) -> None:
        """The zygote died; the kernel ends what ran in its slots."""
        self.close()
        self._on_lost(self, [slot.occupant for slot in self._slots if slot.occupant is not None])

    def close(self) -> None:
        """End the zygote and everything in its slots."""
        self.ready = False
        self._closed = True
        self._loop.forget(self._orders.fileno())
        self._orders.close()
        self._process.kill()
        self._process.wait()
        for slot in self._slots:
            self._loop.forget(slot.commands.fileno())
            slot.commands.close()
            self._clear_tmp(slot)
            if slot.group is not None:
                slot.group.remove()
