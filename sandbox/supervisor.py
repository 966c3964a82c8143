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
import socket
import sys
import time
from typing import Any, NoReturn

import msgpack

from sandbox import cgroup
from sandbox.api import Status
from sandbox.grading import Graders, Grading
from sandbox.jail import JailPlan, raise_file_limit
from sandbox.jobs import Coding, GradeJob, ProgramJob, job_ids, program_job
from sandbox.loop import Loop
from sandbox.messages import BACK, CANCEL, END, EVENT, GRADE, LOST, READY, REFUSED, RESULT, RUN, VERDICT, WANT
from sandbox.running import Running
from sandbox.sessions import Session
from sandbox.slots import Occupant, Slots
from sandbox.spares import Spares
from sandbox.zygotes import Zygotes

_LASTING = 2
"""Places for a spare and a grader at rest."""
MAX_CALLS = 32
"""Calls in slots at once, sleeping ones included."""
_AHEAD = 1
"""Jobs kept here beside the one that computes, so that the next starts without asking."""
_STUCK_S = 0.05
_MAX_MESSAGE_BYTES = 64 << 20


class Supervisor:
    """State of a shard."""

    def __init__(
        self, front: socket.socket, plan: JailPlan, profile: str, max_sessions: int, preamble: str, wishes: list[str]
    ) -> None:
        self._front, self._plan, self._profile, self._max_sessions = front, plan, profile, max_sessions
        self._preamble = preamble
        self._sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._loop = Loop()
        self._spares = Spares(
            self._loop,
            "spare" in wishes,
            lambda: not self._running and not self._queue,
            on_blocked=self._schedule,
            on_result=self._on_result,
        )
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_MESSAGE_BYTES)
        self._groups = cgroup.detect() if plan.full else None
        self._zygotes = Zygotes(
            self._loop,
            plan,
            self._groups,
            MAX_CALLS + max_sessions + _LASTING,
            standby="standby" in wishes,
            on_ready=self._on_zygote_ready,
            on_free=self._schedule,
            on_lost=self._on_zygote_lost,
        )
        self._graders = Graders(
            self._loop, on_blocked=self._schedule, on_verdicts=self._on_verdicts, on_end=self._on_graded
        )
        self._queue: collections.deque[ProgramJob | GradeJob] = collections.deque()
        self._running: set[Running] = set()
        self._granted = 0
        self._starting = 0
        self._scheduling = False
        self._awaited: ProgramJob | GradeJob | None = None

    def serve(self) -> NoReturn:
        """Run until the front goes."""
        for profile in ("lean", "sci") if self._profile == "auto" else (self._profile,):
            self._zygotes.of(profile)
            self._starting += 1
        self._loop.watch(self._front.fileno(), self._on_front)
        self._loop.run()
        raise AssertionError("the loop ended")

    def _on_zygote_ready(self, missing: str) -> None:
        if missing:
            self._send([REFUSED, missing])
            self._close()
        if self._starting:
            self._starting -= 1
            if not self._starting:
                self._send([READY, self._groups is not None])
        self._schedule()

    def _on_zygote_lost(self, zygote: Slots, occupants: list[Occupant]) -> None:
        """A zygote died: the front places its calls elsewhere."""
        ids: list[int] = []
        self._spares.drop(zygote)
        for occupant in occupants:
            if isinstance(occupant, Session):
                occupant.lose()
            elif isinstance(occupant, Running) and not occupant.done:
                ids += occupant.unsettled()
                occupant.finish()
                self._running.discard(occupant)
        if self._starting:
            self._send([REFUSED, f"the {zygote.profile} zygote ended while it started; its message is in the log"])
            self._close()
        self._send([LOST, ids])
        self._send([EVENT, "zygote_restarts", 1])
        self._schedule()

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
            job = program_job(rest, self._profile, self._preamble)
            self._granted -= 1
            self._queue.append(job)
        elif kind == GRADE:
            self._granted -= 1
            self._queue.append(GradeJob(items=[(name, answer, gold) for name, answer, gold in rest[0]]))
        elif kind == CANCEL:
            self._cancel(rest[0])
        elif kind == END and rest[0] in self._sessions:
            self._sessions[rest[0]].end()

    def _cancel(self, name: int) -> None:
        for job in self._queue:
            if isinstance(job, ProgramJob) and job.id == name:
                self._queue.remove(job)
                self._refuse(job, Status.CANCELLED, "")
                return
        for child in self._running:
            if isinstance(child, Coding) and child.job is not None and child.job.id == name:
                child.kill(Status.CANCELLED)

    def _refuse(self, job: ProgramJob, status: Status, why: str) -> None:
        """Answer a job that is not run."""
        waited_s = time.monotonic() - job.arrived_s
        self._send([RESULT, [job.id, status.value, "", "", why, 0, 0, 0, False, waited_s, 0.0, 0.0]])

    def _schedule(self) -> None:
        """Start what can be started, then ask for more."""
        if self._scheduling:
            return
        self._scheduling = True
        for job in list(self._queue):  # one whose zygote is still starting lets the others pass
            if self._computing() < 1 and self._start(job):
                self._queue.remove(job)
        self._scheduling = False
        if self._queue and self._queue[0] is not self._awaited:
            self._awaited = self._queue[0]
            self._loop.after(_STUCK_S, self._hand_back)
        computing = self._computing()
        if not self._running and not self._queue:
            self._spares.idle()
        ahead = 0 if computing and self._long_computation() else _AHEAD
        room = 1 + ahead - computing - len(self._queue) - self._granted
        if room > 0 and self._room():
            self._granted += room
            self._send([WANT, room])

    def _long_computation(self) -> bool:
        since_s = time.monotonic() - _STUCK_S
        return any(child.started_s < since_s and not child.blocked for child in self._running)

    def _room(self) -> bool:
        return not self._starting and len(self._running) < MAX_CALLS

    def _computing(self) -> int:
        return sum(not child.blocked for child in self._running)

    def _start(self, job: ProgramJob | GradeJob) -> bool:
        """Start the job if its zygote has room."""
        profile = job.profile if isinstance(job, ProgramJob) else "sci"
        if isinstance(job, ProgramJob) and job.session in self._sessions:
            self._run_cell(self._sessions[job.session], job)
            return True
        if isinstance(job, ProgramJob) and job.session and (not job.first or not self._plan.full):
            why = "" if self._plan.full else "bad request: sessions need sandbox.isolation = full"
            self._refuse(job, Status.BAD_REQUEST if why else Status.SESSION_LOST, why)
            return True
        zygote = self._zygotes.of(profile)
        if len(self._running) >= MAX_CALLS or not zygote.has_room():
            return False
        if isinstance(job, ProgramJob) and job.session:
            self._run_cell(self._new_session(zygote, job), job)
        elif isinstance(job, ProgramJob):
            program = self._spares.take(zygote, job) or self._spares.make(zygote, job.limits)
            self._running.add(program)
            program.run(job)
        else:
            grader = self._graders.take(zygote)
            self._running.add(grader)
            grader.run(job)
        return True

    def _new_session(self, zygote: Slots, job: ProgramJob) -> Session:
        """Begin a session; beyond their number the one that rested longest is ended."""
        if len(self._sessions) >= self._max_sessions:
            resting = next((session for session in self._sessions.values() if not session.busy), None)
            if resting is not None:
                resting.end()
                self._send([EVENT, "sessions_evicted", 1])
        session = Session(
            self._loop,
            zygote,
            job.session,
            job.limits,
            job.lead(),
            on_blocked=self._schedule,
            on_result=self._on_result,
            on_lost=self._on_session_lost,
        )
        self._sessions[job.session] = session
        return session

    def _run_cell(self, session: Session, job: ProgramJob) -> None:
        if session.busy:
            self._refuse(job, Status.BAD_REQUEST, "bad request: the session is still at another cell")
            return
        self._sessions.move_to_end(job.session)
        self._running.add(session)
        session.run(job)

    def _on_session_lost(self, session: Session) -> None:
        self._sessions.pop(session.name, None)
        self._running.discard(session)

    def _on_result(self, child: Coding, fields: list[Any]) -> None:
        self._running.discard(child)
        self._send([RESULT, fields])
        self._schedule()

    def _on_verdicts(self, verdicts: list[tuple[int, str]]) -> None:
        self._send([VERDICT, verdicts])

    def _on_graded(self, child: Grading, rest: list[tuple[int, str, str]]) -> None:
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
        staying = [job for job in self._queue if isinstance(job, ProgramJob) and job.session in self._sessions]
        ids = [name for job in self._queue if job not in staying for name in job_ids(job)]
        self._queue = collections.deque(staying)
        self._awaited = None
        self._send([BACK, ids])

    def _send(self, message: list[Any]) -> None:
        try:
            self._front.sendall(msgpack.packb(message, unicode_errors="replace"))
        except OSError:
            self._close()

    def _close(self) -> NoReturn:
        self._zygotes.close()
        os._exit(0)


def main() -> NoReturn:
    """Entry point: descriptor 0 is the front's socket; plan, profile, sessions, preamble, wishes are the arguments."""
    raise_file_limit()
    front = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
    plan = JailPlan(**json.loads(sys.argv[2]))
    Supervisor(front, plan, sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6:]).serve()
