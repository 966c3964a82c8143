"""One shard: takes jobs from the front as far as it can run them, and runs them in its zygotes' slots.

Consumes    jobs (RUN, GRADE), CANCEL
Produces    results and verdicts as each ends; WANT (how many more jobs it can take); LOST and BACK (ids of jobs that
            the front must place elsewhere); READY or REFUSED once
Waits for   jobs, children, zygotes
Unblocked by the front's socket closing: then everything here ends
Invariant   at most one child computes at a time, sleeping ones do not count; no job that was taken is forgotten
"""

from __future__ import annotations

import collections
import json
import os
import re
import socket
import sys
import time
from typing import Any, NoReturn

import msgpack

from sandbox import cgroup
from sandbox.api import Limits, Status, Verdict
from sandbox.jail import JailPlan
from sandbox.jobs import GradeJob, Grading, Program, ProgramJob
from sandbox.loop import Loop
from sandbox.running import Running
from sandbox.slots import Occupant, Slots

RUN, GRADE, CANCEL = "run", "grade", "cancel"
READY, REFUSED, WANT, RESULT, VERDICT, LOST, BACK, EVENT = (
    "ready", "refused", "want", "result", "verdict", "lost", "back", "event",
)  # fmt: skip
SCI_UID_OFFSET = 32
UIDS_PER_SHARD = 64
_AHEAD = 1
"""Jobs kept here beside the one that computes, so that the next starts without asking."""
_STUCK_S = 0.05
_MAX_MESSAGE_BYTES = 64 << 20
_RESTART_S = 1.0
_NEEDS_SCI = re.compile(r"\b(numpy|sympy|math_verify|scipy)\b")


class Supervisor:
    """State of a shard."""

    def __init__(self, front: socket.socket, plan: JailPlan, profile: str) -> None:
        self._front, self._plan, self._profile = front, plan, profile
        self._loop = Loop()
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_MESSAGE_BYTES)
        self._groups = cgroup.detect() if plan.full else None
        self._zygotes: dict[str, Slots] = {}
        self._queue: collections.deque[ProgramJob | GradeJob] = collections.deque()
        self._running: set[Running] = set()
        self._granted = 0
        self._starting = 0
        self._restarted_s = 0.0
        self._scheduling = False
        self._awaited: ProgramJob | GradeJob | None = None

    def serve(self) -> NoReturn:
        """Run until the front goes."""
        for profile in ("lean", "sci") if self._profile == "auto" else (self._profile,):
            self._start_zygote(profile)
            self._starting += 1
        self._loop.watch(self._front.fileno(), self._on_front)
        self._loop.run()
        raise AssertionError("the loop ended")

    def _start_zygote(self, profile: str) -> Slots:
        plan = self._plan
        if profile == "sci" and plan.first_uid:
            plan = JailPlan(full=plan.full, first_uid=plan.first_uid + SCI_UID_OFFSET)
        self._zygotes[profile] = Slots(
            self._loop,
            plan,
            profile,
            self._groups,
            on_ready=self._on_zygote_ready,
            on_free=self._schedule,
            on_lost=self._on_zygote_lost,
        )
        return self._zygotes[profile]

    def _on_zygote_ready(self, zygote: Slots, missing: str) -> None:
        if missing:
            self._send([REFUSED, missing])
            self._close()
        if self._starting:
            self._starting -= 1
            if not self._starting:
                self._send([READY, self._groups is not None])
        self._schedule()

    def _on_zygote_lost(self, zygote: Slots, occupants: list[Occupant]) -> None:
        """A zygote died: the front places its calls elsewhere, a new zygote starts."""
        ids: list[str] = []
        for occupant in occupants:
            if isinstance(occupant, Running) and not occupant.done:
                occupant.finish()
                ids += _ids(occupant)
                self._running.discard(occupant)
        if self._starting:
            self._send([REFUSED, f"the {zygote.profile} zygote ended while it started; its message is in the log"])
            self._close()
        self._send([LOST, ids])
        self._send([EVENT, "zygote_restarts", 1])
        delay_s = _RESTART_S if time.monotonic() - self._restarted_s < _RESTART_S else 0.0
        self._restarted_s = time.monotonic()
        self._loop.after(delay_s, lambda: self._restart(zygote.profile))
        self._schedule()

    def _restart(self, profile: str) -> None:
        self._start_zygote(profile)

    def _on_front(self) -> None:
        try:
            data = self._front.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            self._close()
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._accept(message)
        self._schedule()

    def _accept(self, message: list[Any]) -> None:
        kind, *rest = message
        if kind == RUN:
            name, arrived_s, code, stdin, *limits = rest
            wall_s, cpu_s, memory_mib, output_kib = limits
            job = ProgramJob(
                id=name,
                arrived_s=arrived_s,
                code=code,
                stdin=stdin,
                limits=Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=memory_mib, output_kib=output_kib),
                profile=self._choose(code),
            )
            self._granted -= 1
            self._queue.append(job)
        elif kind == GRADE:
            self._granted -= 1
            self._queue.append(GradeJob(items=[(name, answer, gold) for name, answer, gold in rest[0]]))
        elif kind == CANCEL:
            self._cancel(rest[0])

    def _choose(self, code: str) -> str:
        if self._profile != "auto":
            return self._profile
        return "sci" if _NEEDS_SCI.search(code) else "lean"

    def _cancel(self, name: str) -> None:
        for job in self._queue:
            if isinstance(job, ProgramJob) and job.id == name:
                self._queue.remove(job)
                waited_s = time.monotonic() - job.arrived_s
                self._send([RESULT, [name, Status.CANCELLED.value, "", "", "", 0, 0, 0, False, waited_s, 0.0, 0.0]])
                return
        for child in self._running:
            if isinstance(child, Program) and child.job.id == name:
                child.kill(Status.CANCELLED)

    def _schedule(self) -> None:
        """Start what can be started, then ask for more."""
        if self._scheduling:
            return
        self._scheduling = True
        while self._queue and self._computing() < 1 and self._start(self._queue[0]):
            self._queue.popleft()
        self._scheduling = False
        if self._queue and self._queue[0] is not self._awaited:
            self._awaited = self._queue[0]
            self._loop.after(_STUCK_S, self._hand_back)
        computing = self._computing()
        ahead = 0 if computing and self._long_computation() else _AHEAD
        room = 1 + ahead - computing - len(self._queue) - self._granted
        if room > 0 and self._room():
            self._granted += room
            self._send([WANT, room])

    def _long_computation(self) -> bool:
        since_s = time.monotonic() - _STUCK_S
        return any(child.started_s < since_s and not child.blocked for child in self._running)

    def _room(self) -> bool:
        return not self._starting and any(zygote.has_room() for zygote in self._zygotes.values())

    def _computing(self) -> int:
        return sum(not child.blocked for child in self._running)

    def _start(self, job: ProgramJob | GradeJob) -> bool:
        """Start the job if its zygote has room."""
        profile = job.profile if isinstance(job, ProgramJob) else "sci"
        zygote = self._zygotes.get(profile) or self._start_zygote(profile)
        if not zygote.has_room():
            return False
        child: Running
        if isinstance(job, ProgramJob):
            child = Program(self._loop, zygote, job, on_blocked=self._schedule, on_result=self._on_result)
        else:
            child = Grading(
                self._loop,
                zygote,
                job,
                on_blocked=self._schedule,
                on_verdict=self._on_verdict,
                on_end=self._on_graded,
            )
        self._running.add(child)
        return True

    def _on_result(self, child: Program, fields: list[Any]) -> None:
        self._running.discard(child)
        self._send([RESULT, fields])
        self._schedule()

    def _on_verdict(self, name: str, verdict: Verdict) -> None:
        self._send([VERDICT, name, verdict.value])

    def _on_graded(self, child: Grading, rest: list[tuple[str, str, str]]) -> None:
        self._running.discard(child)
        if rest and child.graded:
            self._queue.appendleft(GradeJob(items=rest))
        elif rest:
            self._send([LOST, [name for name, _, _ in rest]])
        self._schedule()

    def _hand_back(self) -> None:
        """What still waits behind a long computation goes to another shard, if one has room."""
        if not self._queue or self._queue[0] is not self._awaited:
            return
        if not self._long_computation():  # it waits for a zygote, or for a computation that began since
            self._loop.after(_STUCK_S, self._hand_back)
            return
        ids = [name for job in self._queue for name in _ids(job)]
        self._queue.clear()
        self._awaited = None
        self._send([BACK, ids])

    def _send(self, message: list[Any]) -> None:
        try:
            self._front.sendall(msgpack.packb(message, unicode_errors="replace"))
        except OSError:
            self._close()

    def _close(self) -> NoReturn:
        for zygote in self._zygotes.values():
            zygote.close()
        os._exit(0)


def _ids(work: ProgramJob | GradeJob | Running) -> list[str]:
    """The front's ids in a job, or in the job that a child works at and has not settled."""
    if isinstance(work, Grading):
        return [name for name, _, _ in work.job.items[work.graded :]]
    job = work.job if isinstance(work, Program) else work
    if isinstance(job, ProgramJob):
        return [job.id]
    return [name for name, _, _ in job.items] if isinstance(job, GradeJob) else []


def main() -> NoReturn:
    """Entry point: descriptor 0 is the front's socket, the arguments are the plan and the profile."""
    front = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
    Supervisor(front, JailPlan(**json.loads(sys.argv[2])), sys.argv[3]).serve()
