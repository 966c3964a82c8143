"""`rocstar run`: the beginning and the end of a run; it holds no data.

Consumes    a checked recipe, the address of a Ray cluster or none
Produces    the run directory, roles as Ray actors, the progress view, summary.json, the exit code
Waits for   the recipe's resources; then for the goal, a failure, SIGINT or SIGTERM
Unblocked by  the buffer saying "done"; a role that fails again and again; a signal or the loss of Ray's head, after
            which roles are drained
Invariant   when it has ended, however it ended, no process of the run is left on this host, and Ray has ended its
            actors on all others
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
import time
import traceback
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

from buffer.client import PeerSilent, Refused
from buffer.doors import stored_keys
from launch import cluster, early, head, reach, warden
from launch.config import ConfigError
from launch.crew import FIGURES_TIMEOUT_S, POLL_TIMEOUT_S, Crew
from launch.links import Links
from launch.progress import Progress
from launch.reports import Reports
from launch.run_directory import RunDirectory
from launch.summary import write_summary
from launch.supervisor import GiveUp, Kill, Pulse, Supervisor
from launch.threads import in_thread
from launch.tree import Recipe
from launch.view import snapshots

TICK_S = 0.5
STATUS_S = 1.0
"""roles tell their figures once a second: more often there is hardly anything new"""
FAILED_DRAIN_S = 3.0
EXPORT_PATIENCE_S = 3600.0
"""For the last checkpoint and the export of a run that reached its goal: a large model takes many minutes."""
CLIENT_ERRORS = (PeerSilent, Refused)


class Outcome(Enum):
    """How a run ended, and the exit code that says so."""

    REACHED = 0
    FAILED = early.EXIT_FAILED
    INTERRUPTED = early.EXIT_INTERRUPTED


def drive(recipe: Recipe, *, address: str, fingerprint: str) -> int:
    """Runs it, with the problems of this fingerprint; the exit code. The caller must then leave by os._exit.

    Ray is not shut down in this process: that takes up to half a minute. Its processes, where it was started here, are
    ended; a cluster that was joined ends the job's actors when this process is gone.
    """
    recipe = recipe.located()
    directory = RunDirectory.open(recipe, fingerprint)
    early.listen(directory.path)  # until _take_signals
    life = uuid.uuid4().hex[:12]
    marks = {"ROCSTAR_RUN": life}
    scratch = Path(tempfile.mkdtemp(prefix="rocstar-"))  # short: sockets lie in it
    guard = warden.watch_me(marks, scratch)
    if not address:
        os.environ.update(marks)  # Ray's own processes inherit them
    try:
        return asyncio.run(_Driver(recipe, directory, address, life, scratch).run()).value
    finally:
        os.environ.pop("ROCSTAR_RUN", None)
        warden.kill_marked(marks)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


class _Driver:
    def __init__(self, recipe: Recipe, directory: RunDirectory, address: str, life: str, scratch: Path) -> None:
        self._recipe, self._directory, self._address, self._life = recipe, directory, address, life
        self._scratch = scratch
        self._crew = Crew(recipe, directory, life)
        self._interrupted = asyncio.Event()
        self._status: dict[str, Any] = {}
        self._figures: dict[str, Any] = {}
        self._reason = self._lost = ""
        self._end_s = math.inf
        self._started_s = time.monotonic()
        self._progress = Progress(recipe, directory.path)
        self._links = Links(f"rocstar-{life}")
        self._supervisor = Supervisor((), start_timeout_s=1, dead_after_s=1, now_s=0)

    async def run(self) -> Outcome:
        """Start, watch, stop, sum up."""
        self._loop = asyncio.get_running_loop()
        self._take_signals()
        outcome = Outcome.FAILED
        try:
            with self._progress:
                outcome = await self._start_and_watch()
                self._progress.say(f"{outcome.name.lower()}: {self._reason}")
                outcome = await self._stop(outcome)
        except ConfigError:
            raise
        except (TimeoutError, OSError, RuntimeError) as error:
            self._reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # the disk may be what failed
                (self._directory.path / "logs" / "driver.log").write_text(traceback.format_exc())
            outcome = Outcome.FAILED
        return self._conclude(outcome)

    def _conclude(self, outcome: Outcome) -> Outcome:
        """Sums up. A goal whose summary can't be written is not reached."""
        try:
            summary = write_summary(
                self._recipe,
                self._directory.path,
                self._figures,
                snapshots(self._status),
                outcome=outcome.name.lower(),
                reason=self._reason,
                wall_s=time.monotonic() - self._started_s,
            )
        except OSError as error:
            self._progress.say(f"summary.json can't be written: {error}")
            return Outcome.FAILED if outcome is Outcome.REACHED else outcome
        self._progress.conclude(summary)
        return outcome

    async def _start_and_watch(self) -> Outcome:
        connecting = in_thread(self._connect, stays=True)
        stopping: asyncio.Future[Any] = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not connecting.done():
            self._reason = self._lost or "a signal came while nodes were awaited"
            return Outcome.INTERRUPTED
        connecting.result()
        # Beyond this host nothing is open: whatever listens there asks for the run's keys.
        keys = stored_keys(self._directory.path / "keys" / "wire.json") if cluster.num_hosts() > 1 else None
        self._links = Links(f"rocstar-{self._life}", keys)
        self._crew.start(self._scratch, keys)
        self._supervisor = Supervisor(
            self._crew.names,
            start_timeout_s=self._recipe.run.start_timeout_s,
            dead_after_s=self._recipe.buffer.dead_after_s,
            now_s=time.monotonic(),
        )
        with Reports(self._recipe.metrics, self._directory.path) as reports:
            return await self._watch(reports)

    def _take_signals(self) -> None:
        """Done again after Ray's start, which puts a handler of its own for SIGTERM that ends the process."""
        for number in early.SIGNALS:
            self._loop.remove_signal_handler(number)
            self._loop.add_signal_handler(number, self._interrupted.set)

    async def _watch_head(self, where: str) -> None:
        """Its loss is an interruption: what the roles still can, they do, in head.DRAIN_S all together."""
        self._lost = await head.lost(where)
        self._end_s = time.monotonic() + head.DRAIN_S
        self._interrupted.set()

    def _joined(self) -> None:
        self._take_signals()
        self._head = asyncio.create_task(self._watch_head(head.address()))

    def _connect(self) -> None:
        self._progress.say("starting Ray" if not self._address else f"joining Ray at {self._address}")
        cluster.connect(
            self._recipe,
            address=self._address,
            namespace=f"rocstar-{self._life}",
            token=self._directory.path / "keys" / "ray-token",
            scratch=self._scratch,
        )
        self._loop.call_soon_threadsafe(self._joined)
        cluster.wait_for_roles(self._recipe, self._progress.say)

    async def _watch(self, reports: Reports) -> Outcome:
        """Until the end, whichever it is."""
        client = self._links.buffer_client(self._directory.run, role="monitor", name="driver", timeout_s=POLL_TIMEOUT_S)
        asking = asyncio.create_task(self._ask_status(client))
        try:
            while True:
                gave_up = await self._supervise()
                self._progress.show(self._status, self._supervisor.states())
                reports.update(self._status)
                if gave_up and not self._lost:
                    self._reason = gave_up
                    return Outcome.FAILED
                if self._status.get("state") == "done":
                    self._reason = self._goal()
                    return Outcome.REACHED
                if self._interrupted.is_set():
                    why = self._lost or "a signal came"
                    self._reason = f"{why}; go on with `rocstar resume {self._recipe.directory}`"
                    return Outcome.INTERRUPTED
                await asyncio.sleep(TICK_S)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await client.close()

    def _goal(self) -> str:
        after = f"after {self._status['next_step']} of {self._status['steps']} steps"
        if self._status["goal"] == "all_right":
            return (
                f"{after} RoC found nothing more to learn from, the last groups were all right; more steps add nothing"
            )
        if self._status["goal"] == "exhausted":
            return f"{after} no problem is left: problems.epochs are over; more steps add nothing"
        return f"all {self._status['steps']} steps are trained"

    async def _supervise(self) -> str:
        """Polls every role and does what the supervisor says; the reason to give up, or ""."""
        polls = await self._crew.poll()
        if endpoint := (polls.get("buffer-0") or {}).get("endpoint"):
            reach.note(self._directory.path, endpoint, guarded=self._links.keys is not None)
        pulses = {
            name: Pulse(epoch=peer["epoch"], age_s=peer["heartbeat_age_s"])
            for name, peer in self._status.get("peers", {}).items()
        }
        for action in self._supervisor.observe(polls, pulses, now_s=time.monotonic()):
            match action:
                case Kill(name=name, pid=pid, reason=reason):
                    self._progress.say(f"{name} {reason}: its process {pid} is ended, Ray starts another")
                    await self._crew.kill(name, pid)
                case GiveUp(reason=reason):
                    return reason
        return ""

    async def _ask_status(self, client: Any) -> None:
        """Keeps `_status` fresh; while the buffer is away the last one stays, with no ages of heartbeats."""
        while True:
            try:
                self._status = await client.status()
            except CLIENT_ERRORS:
                self._status = {**self._status, "peers": {}}
            await asyncio.sleep(STATUS_S)

    async def _stop(self, outcome: Outcome) -> Outcome:
        """Drains: learner (it checkpoints), rollout and filter, sandbox, at last buffer, each at most run.drain_s.

        A goal whose model could not be exported is not reached: then the outcome changes.
        """
        if not self._crew.names:
            return outcome
        for roles in (("learner",), ("rollout", "filter"), ("sandbox",), ("buffer",)):
            if "buffer" in roles:
                await self._last_figures()
            names = self._crew.of(roles)
            untold = roles in (("sandbox",), ("buffer",))  # of a goal; the others know it from the buffer
            if untold or outcome is not Outcome.REACHED:
                self._crew.stop(names)
            patience_s = self._patience_s(roles, outcome)
            if not await self._crew.ended(names, patience_s):
                self._progress.say(f"{', '.join(names)} did not end in {patience_s:g} s and will be ended")
            if outcome is Outcome.REACHED and "learner" in roles:
                unwell = [name for name in names if not await self._crew.well(name)]
                if unwell:
                    outcome = Outcome.FAILED
                    self._reason += f", but {', '.join(unwell)} failed to export; logs/{unwell[0]}.log says why"
        if not self._lost:  # Ray alone could
            await self._crew.dismiss()
        return outcome

    def _patience_s(self, roles: tuple[str, ...], outcome: Outcome) -> float:
        if outcome is Outcome.FAILED:
            return FAILED_DRAIN_S
        exporting = outcome is Outcome.REACHED and "learner" in roles
        return self._left_s(EXPORT_PATIENCE_S if exporting else self._recipe.run.drain_s)

    def _left_s(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, self._end_s - time.monotonic()))

    async def _last_figures(self) -> None:
        """What the buffer knows at the end: the index and every role's last snapshot."""
        from ray.exceptions import RayError

        client = self._links.buffer_client(self._directory.run, role="monitor", name="driver", timeout_s=POLL_TIMEOUT_S)
        try:
            with contextlib.suppress(TimeoutError, *CLIENT_ERRORS):  # then the one before stands
                self._status = await asyncio.wait_for(client.status(), POLL_TIMEOUT_S)
            self._figures = await self._crew.figures(self._left_s(FIGURES_TIMEOUT_S))
        except (TimeoutError, RayError):
            self._progress.say("the buffer did not tell its last figures")
        finally:
            await client.close()
