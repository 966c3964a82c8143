"""The warm interpreter: forks a walled-in child for each call. Never sees a request.

Consumes    orders from its supervisor: make a slot, fork a child into a slot (with descriptors), name a child's pid
Produces    children that read their job from their own control socket. When one ends, its slot's init process kills
            and reaps what it left behind and passes the wait status on to the supervisor
Waits for   orders and dying children
Unblocked by the supervisor's socket closing, or its death: then this process, the slots' init processes and, by the
            kernel, everything in their pid namespaces end
Invariant   single-threaded; no byte of a job passes through this process
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import sys
import types
from dataclasses import dataclass
from typing import IO, NoReturn

from sandbox import guest, jail, linux, seccomp, warm

SLOT, SPAWN, PID, STOP, SESSION = 0, 1, 2, 3, 4
"""Orders. SLOT carries [init's socket, the supervisor's end of it, cgroup.procs or nothing], SPAWN [control, stdout,
stderr], the memory limit and the CPU limit. STOP kills the child's process group, where there are
no namespaces. SESSION is a SPAWN whose child's exit is not reported."""
ORDER = struct.Struct("<BHId")
READY, EXITED, CHILD = 0, 1, 2
"""Reports: kind, slot, number, CPU-seconds. READY carries JSON text after the head; EXITED's number is the wait status,
negative (errno) when there was no fork; CHILD's is the pid."""
REPORT = struct.Struct("<BHid")
KILL, END = b"K", b"E"
"""What the supervisor sends a slot's init: kill everything in the slot; the same, reap it and report its exit. KILL
followed by a pid: kill that process of a session."""
ONE = struct.Struct("<ci")
MAX_ORDER_FDS = 4
GRADER = b"rocstar-grader"
"""The name of a process that grades, as lists of processes show it."""
# signal.signal without its conversion to enum members, which costs a child 0.2 ms of page faults.
_set_handler = getattr(signal.signal, "__wrapped__", signal.signal)
_CTL_FD = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Descriptors of a slot."""

    init: int
    """pidfd of its init process."""
    commands: int
    """What is written here reaches the init process."""
    cgroup: int | None
    """cgroup.procs of its cgroup."""


class Zygote:
    """State of the forking process."""

    def __init__(self, orders: socket.socket, plan: jail.JailPlan, profile: str) -> None:
        self._orders = orders
        self._plan = plan
        self._sci = profile == "sci"
        self._self_fd = os.pidfd_open(os.getpid())
        self._slots: dict[int, Slot] = {}
        self._children: dict[int, int] = {}
        self._sessions: set[int] = set()
        self._procfs = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self._maps: IO[str] = open("/proc/self/maps")  # noqa: SIM115 - read after the root has gone
        self._status: IO[str] = open("/proc/self/status")  # noqa: SIM115
        self._filter = seccomp.assemble(keep_group=not plan.full)
        self._program = linux.FilterProgram(len(self._filter) // 8, self._filter)
        self._main = types.ModuleType("__main__")
        self._base_data = 0
        self._restore: jail.Restore = []
        self._atexit_base = 0
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> NoReturn:
        """Warm up, wall in, then fork until the supervisor goes."""
        warm.preload(self._sci)
        self._restore = jail.enter(self._plan)
        jail.preset_limits()
        self._prepare()
        self._orders.send(REPORT.pack(READY, 0, 0, 0.0) + json.dumps({"data_mib": self._base_data >> 20}).encode())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        import select

        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    self._reap()
                else:
                    self._obey()

    def _prepare(self) -> None:
        """Everything that a child would otherwise do for itself, once."""
        sys.argv = [guest.FILENAME]
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = warm.writer(1), warm.writer(2)
        os.environ.clear()
        os.environ.update(HOME="/tmp", PATH="/usr/bin:/bin", LANG="C.UTF-8", TMPDIR="/tmp", OMP_NUM_THREADS="1")
        os.umask(0o022)
        self._main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._main
        for name in [name for name in sys.modules if name.split(".")[0] == "sandbox"]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if path and os.path.exists(path)]
        sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
        self._base_data = warm.status_kib(self._status, "VmData") << 10
        self._atexit_base = atexit._ncallbacks()
        gc.collect()
        gc.freeze()
        warm.collapse_heap(self._maps)
        self._maps.close()
        self._status.close()

    def _obey(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._orders, 64, MAX_ORDER_FDS)
        if not message:
            os._exit(0)
        kind, slot, memory_mib, cpu_s = ORDER.unpack(message)
        if kind == SLOT:
            self._make_slot(slot, fds)
        elif kind in (SPAWN, SESSION):
            self._sessions.discard(slot)
            if kind == SESSION:
                self._sessions.add(slot)
            self._spawn(slot, fds, memory_mib, cpu_s)
        elif kind == STOP:
            _kill_group(self._pid_in(slot))
        else:
            self._orders.send(REPORT.pack(CHILD, slot, self._host_pid(slot), 0.0))

    def _pid_in(self, slot: int) -> int:
        return next((pid for pid, place in self._children.items() if place == slot), 0)

    def _host_pid(self, slot: int) -> int:
        """The pid of the slot's child as the supervisor sees it; 0 when there is none."""
        pid = self._pid_in(slot)
        if not pid or not self._plan.full or self._plan.first_uid:
            return pid
        handle = os.pidfd_open(pid)
        with open(os.open(f"self/fdinfo/{handle}", os.O_RDONLY, dir_fd=self._procfs)) as file:
            pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
        os.close(handle)
        return max(pid, 0)

    def _make_slot(self, slot: int, fds: list[int]) -> None:
        """Start the init process of a slot's pid namespace; a slot that exists is replaced."""
        old = self._slots.pop(slot, None)
        if old is not None:
            signal.pidfd_send_signal(old.init, signal.SIGKILL)
            for fd in (old.init, old.commands, old.cgroup):
                if fd is not None:
                    os.close(fd)
        if self._plan.full:
            linux.setns(self._self_fd, linux.CLONE_NEWPID)
            linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _init(fds[0], self._plan.full)
        self._slots[slot] = Slot(init=os.pidfd_open(pid), commands=fds[1], cgroup=fds[2] if len(fds) > 2 else None)
        os.close(fds[0])

    def _spawn(self, slot: int, fds: list[int], memory_mib: int, cpu_s: float) -> None:
        """Fork a child into the slot's pid namespace."""
        try:
            if self._plan.full:
                linux.setns(self._slots[slot].init, linux.CLONE_NEWPID)
            pid = os.fork()
        except OSError as error:  # the slot's init died, or no process may be made: the supervisor replaces the slot
            self._orders.send(REPORT.pack(EXITED, slot, -(error.errno or 1), 0.0))
        else:
            if pid == 0:
                self._child(slot, fds, memory_mib, cpu_s)
            self._children[pid] = slot
        for fd in fds:
            os.close(fd)

    def _child(self, slot: int, fds: list[int], memory_mib: int, cpu_s: float) -> NoReturn:
        """The child's side: walls, job, run. Never returns."""
        ctl = fds[0]
        try:
            signal.set_wakeup_fd(-1)
            _set_handler(signal.SIGCHLD, signal.SIG_DFL)
            cgroup = self._slots[slot].cgroup
            if cgroup is not None:
                os.write(cgroup, b"0")
            jail.own_tmp(self._plan, self._procfs, slot, self._restore)
            os.dup2(fds[1], 1)
            os.dup2(fds[2], 2)
            ctl = _isolate_fds(ctl)
            jail.drop_privileges(self._plan, slot)
            os.setpgid(0, 0)  # else kill(0, ...) would reach the processes of our group that run as the same user
            if not self._plan.full:
                linux.die_with_parent(signal.SIGKILL)
            jail.limit_call(self._base_data, memory_mib, cpu_s)
            linux.install_filter(self._program)
        except BaseException as error:
            guest.give_up(ctl, f"{type(error).__name__}: {error}")
        kind, *job = guest.receive(ctl)
        if kind == "preamble":
            guest.run_preamble(ctl, job[0], job[1], self._main)
            kind, *job = guest.receive(ctl)
        if kind == "session":
            guest.run_session(ctl, self._main, self._atexit_base)
        if kind == "grade":
            linux.name_process(GRADER)
            guest.run_grader(ctl)
        code, stdin = job
        guest.run_program(ctl, code, stdin, self._main, self._atexit_base)

    def _reap(self) -> None:
        os.read(self._wake_read, 512)
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = self._children.pop(pid, None)
            if slot in self._sessions:  # its state lives on in a fork; the supervisor ends it with END
                continue
            if slot is not None:
                if not self._plan.full:
                    _kill_group(pid)
                report = REPORT.pack(EXITED, slot, status, used.ru_utime + used.ru_stime)
                os.write(self._slots[slot].commands, report)


def _kill_group(pid: int) -> None:
    """Kill a child and what it left behind; a child leads a group, which it and its descendants cannot leave."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _isolate_fds(ctl: int) -> int:
    """Keep stdin, stdout, stderr and the control socket, close all else."""
    os.dup2(ctl, _CTL_FD)
    os.set_inheritable(_CTL_FD, False)
    os.closerange(_CTL_FD + 1, 1 << 16)
    return _CTL_FD


def _init(socket_fd: int, full: bool) -> NoReturn:
    """Process 1 of a slot. Dies with the zygote, and with it, by the kernel, everything in its namespace.

    KILL: kill everything else in the namespace. An exit report: the same, reap it, then pass the report on.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is orphaned in the slot is reaped by the kernel
    linux.die_with_parent(signal.SIGKILL)
    os.setsid()
    os.chdir("/")
    os.dup2(socket_fd, _CTL_FD)
    os.closerange(_CTL_FD + 1, 1 << 16)
    while command := os.read(_CTL_FD, REPORT.size):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if len(command) == ONE.size:
                os.kill(max(2, ONE.unpack(command)[1]), signal.SIGKILL)  # never a group, never all
                continue
            if full:
                os.kill(-1, signal.SIGKILL)
            while command != KILL:
                os.waitpid(-1, 0)
        if command == END:
            command = REPORT.pack(EXITED, 0, 0, 0.0)
        if len(command) == REPORT.size:
            os.write(_CTL_FD, command)
    os._exit(0)


def main(plan_text: str, profile: str) -> NoReturn:
    """Entry point of the zygote process; descriptor 0 is its socket to the supervisor."""
    linux.die_with_parent(signal.SIGKILL)
    os.setsid()  # no terminal, and none for the children: a session for each would cost a call 0.1 to 0.4 ms
    orders = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
    plan = jail.JailPlan(**json.loads(plan_text))
    try:
        jail.become_own_root(plan)
        Zygote(orders, plan, profile).serve()
    except jail.Unavailable as error:
        orders.send(REPORT.pack(READY, 1, 0, 0.0) + json.dumps({"missing": str(error)}).encode()[:60000])
        os._exit(2)
    except (BrokenPipeError, ConnectionResetError):  # the supervisor is gone
        os._exit(0)
