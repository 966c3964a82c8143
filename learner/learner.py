"""The learner role: take, check, fetch, train, checkpoint, record, publish, again.

Consumes    recorded batches and their trajectories from the buffer
Produces    versions, published under this life's lineage; checkpoints; the exported model; metrics
Waits for   the batch of the next step (the buffer), the other ranks (a collective), its own device and disk
Unblocked by  a batch; the run's end, told with every heartbeat; `request_stop`; rank_timeout_s, step_timeout_s
Invariant   a version is recorded as published before its first byte is sent; after a restart from checkpoint c, steps
            c, c+1, ... are recomputed with their recorded batches and nothing is published until the learner is at
            max(c, last published): so each batch is in the surviving weights exactly once, and engines never go back

Every rank is a process with its own Learner. Rank 0 alone talks about the run (take, record, publish); it tells the
others each command through the process group, and all carry it out. A rank that dies closes its connections, which
ends the others' collectives: all raise, and whoever watches restarts all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from buffer.client import BufferClient, PeerSilent, Refused
from buffer.doors import Keys
from buffer.meters import Meters
from buffer.schema import Batch, Trajectory, Welcome
from buffer.usage import Usage
from buffer.wire import Reason, value_at
from learner.ranks import Command
from learner.step_log import StepLog
from learner.trainer import StepReport, Trainer, TrainerSpec
from learner.weights import WeightServer

TAKE_WAIT_S = 2.0
"""One request for a batch is held this long; in between the other ranks hear that rank 0 lives."""
FAREWELL_S = 2.0

Phase = Literal["restored", "taken", "trained", "checkpointed", "packed", "recorded", "published"]
Ended = Literal["done", "interrupted"]
_T = TypeVar("_T")


class StepHung(Exception):
    """A command takes longer than it may: its device or its disk may never answer."""


class Learner:
    """One rank of the learner.

    Example:
        learner = Learner(spec, resolve=resolve)            # one rank
        ended = await learner.run()                         # "done", or "interrupted" after request_stop()
    After `run` raised, the process must be ended (os._exit): a thread may still be inside a collective.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        resolve: Callable[[], Awaitable[str]],
        rank: int = 0,
        world: int = 1,
        heartbeat_s: float = 1.0,
        bind: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        on_phase: Callable[[Phase, int], None] = lambda phase, step: None,
    ) -> None:
        self._spec, self._rank, self._world, self._heartbeat_s = spec, rank, world, heartbeat_s
        self._on_phase = on_phase
        name = f"learner-{rank}"
        self._client = BufferClient(resolve, run=spec.run, role="learner", name=name, keys=keys)
        self._server = WeightServer(bind, keys, max_mib_per_s=spec.publish.max_mib_per_s) if rank == 0 else None
        self._meters = Meters("learner", name, time.monotonic(), Usage().read)
        self._meters.clock.enter("down", time.monotonic(), waits_for="the engine's start")
        self._log = StepLog(self._meters, spec.directory / "metrics" / "steps.jsonl" if rank == 0 else None)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner-engine")
        self._stop = asyncio.Event()
        self._state = "running"
        self._saved = -1
        self._command, self._command_s = "", 0.0
        self._trainer: Trainer

    @property
    def weights_endpoint(self) -> str:
        """Where engines get weights; "" on ranks other than 0."""
        return "" if self._server is None else self._server.endpoint

    def request_stop(self) -> None:
        """End after the step at hand, with a checkpoint."""
        self._stop.set()

    async def run(self) -> Ended:
        """Until the buffer says that the run is done, or a stop is requested. Being cancelled is such a request.

        Raises:
            Fenced: another life of the learner has taken over.
            StalenessError, BatchError, NonFiniteGradient, CheckpointError: training must not go on; the last also when
            the batches after the newest checkpoint that is whole are gone.
        """
        welcome = await self._client.connect()
        life = asyncio.create_task(self._live(welcome), name="learner-life")
        pulse = asyncio.create_task(self._pulse(), name="learner-pulse")
        try:
            try:
                await asyncio.wait({life, pulse}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self.request_stop()
                await asyncio.wait({life, pulse}, return_when=asyncio.FIRST_COMPLETED)
            if pulse.done():
                life.cancel()
                pulse.result()  # it ends only by raising
            ended = life.result()
            await self._client.heartbeat(self._meters.snapshot(time.monotonic()))
            self._thread.shutdown()
            return ended
        except Exception as error:
            await self._tell_failure(error)
            raise
        finally:
            pulse.cancel()
            await self._client.close()
            if self._server is not None:
                self._server.close()

    async def _tell_failure(self, error: Exception) -> None:
        """So that the buffer need not wait for silence; if it cannot be told, silence tells it."""
        with contextlib.suppress(Refused, PeerSilent, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._client.failed(f"{type(error).__name__}: {error}"[:2000])

    async def _pulse(self) -> None:
        """Heartbeats with metrics; raises what should end this life."""
        while True:
            self._state = await self._client.heartbeat(self._meters.snapshot(time.monotonic()))
            if self._server is not None:
                for key, value in self._server.counts.items():
                    self._meters.gauge(f"weights_{key}", value)
                if self._server.failure is not None:
                    raise self._server.failure
            spent_s, limit_s = time.monotonic() - self._command_s, self._spec.learner.step_timeout_s
            if self._command and spent_s > limit_s:
                what = f"{self._command}: {spent_s:.1f} s exceed learner.step_timeout_s = {limit_s:g}"
                raise StepHung(f"{what}; look at the device and the disk, or raise it if steps take that long")
            await asyncio.sleep(self._heartbeat_s)

    async def _live(self, welcome: Welcome) -> Ended:
        self._trainer = await self._in_thread(lambda: Trainer(self._spec, rank=self._rank, world=self._world))
        next_step: int = (await self._client.status())["next_step"]
        self._saved = await self._in_thread(lambda: self._trainer.restore(next_step))
        self._log.restored(self._trainer.totals)
        self._on_phase("restored", self._saved)
        if self._rank == 0:
            return await self._lead(welcome)
        return await self._follow()

    async def _follow(self) -> Ended:
        """Ranks other than 0: carry out what rank 0 tells."""
        while True:
            self._enter("starved", "rank 0")
            command: Command = await self._in_thread(self._trainer.ranks.tell)
            if command.kind == "end":
                return "done"
            await self._carry_out(command)

    async def _lead(self, welcome: Welcome) -> Ended:
        lineage = welcome.epoch
        await self._recompute(max(self._trainer.version, welcome.published_version))
        if not self._stop.is_set():
            await self._publish(lineage)
        while True:
            if self._stop.is_set():
                ended: Ended = "interrupted"
                break
            step = self._trainer.version
            batch = await self._take(step)
            if batch is None:
                if self._state == "done":
                    ended = "done"
                    break
                await self._order(Command(kind="idle"))
                continue
            await self._train(batch, recomputed=False)
            if self._trainer.version % self._spec.learner.checkpoint_every == 0:
                await self._checkpoint()
            await self._publish(lineage)
        await self._checkpoint()
        if ended == "done":
            await self._order(Command(kind="export"))
        await self._order(Command(kind="end"))
        return ended

    async def _recompute(self, target: int) -> None:
        """From the checkpoint to `target`, with the recorded batches, publishing nothing."""
        while self._trainer.version < target and not self._stop.is_set():
            step = self._trainer.version
            self._enter("down", f"recomputing step {step} of {target}")
            with self._on_record(step):
                batch = await self._client.take(step, TAKE_WAIT_S)
            if batch is None:
                await self._order(Command(kind="idle"))
                continue
            await self._train(batch, recomputed=True)

    @contextlib.contextmanager
    def _on_record(self, step: int) -> Iterator[None]:
        """Say what it means when a recorded batch or its payload is gone."""
        try:
            yield
        except Refused as refused:
            if refused.reason != Reason.UNKNOWN_KEY:
                raise
            raise self._trainer.lost(step, refused.message) from refused

    async def _take(self, step: int) -> Batch | None:
        self._enter("starved", f"the batch of step {step}, or the run's end, from the buffer")
        if (batch := await self._client.take(step, TAKE_WAIT_S)) is not None:
            self._on_phase("taken", step)
        return batch

    async def _train(self, batch: Batch, *, recomputed: bool) -> None:
        started_s = time.monotonic()
        lr = value_at(await self._client.dials(), "learner.lr", batch.step)
        report: StepReport = await self._order(Command(kind="train", batch=batch, lr=lr))
        self._log.step(report, step_s=time.monotonic() - started_s, recomputed=recomputed)
        self._on_phase("trained", report.step)

    async def _checkpoint(self) -> None:
        if self._trainer.version in (self._saved, 0):
            return
        started_s = time.monotonic()
        kept: tuple[int, ...] = await self._order(Command(kind="save"))
        self._saved = self._trainer.version
        self._meters.observe("checkpoint_s", time.monotonic() - started_s)
        self._on_phase("checkpointed", self._saved)
        await self._client.record_checkpoint(self._saved, kept)

    async def _publish(self, lineage: int) -> None:
        """Record first, then send: what was never recorded no engine can have."""
        assert self._server is not None, "rank 0 publishes"
        version = self._trainer.version
        started_s = time.monotonic()
        packed = await self._order(Command(kind="pack", lineage=lineage))
        self._on_phase("packed", version)
        await self._client.record_publication(lineage, version, packed.manifest.checksum)
        self._on_phase("recorded", version)
        self._server.publish(packed)
        self._on_phase("published", version)
        self._meters.observe("publish_s", time.monotonic() - started_s)
        self._meters.gauge("version", version)

    async def _order(self, command: Command) -> Any:
        """Rank 0: tell all ranks, and do it."""
        if self._world == 1 and command.kind in ("idle", "end"):
            return None
        if self._world > 1:
            await self._in_thread(lambda: self._trainer.ranks.tell(command))
        return await self._carry_out(command)

    async def _carry_out(self, command: Command) -> Any:
        trainer, batch = self._trainer, command.batch
        if command.kind == "train":
            assert batch is not None, "a train command carries its batch"
            trajectories = await self._fetch(batch)
            self._enter("busy")
            return await self._in_thread(lambda: trainer.train(batch, trajectories, command.lr), "train")
        self._enter("sync" if command.kind == "pack" else "busy", "the other ranks" if self._world > 1 else "")
        works = {"save": trainer.save, "pack": lambda: trainer.pack(command.lineage), "export": trainer.export}
        return await self._in_thread(works[command.kind], command.kind) if command.kind in works else None

    async def _fetch(self, batch: Batch) -> list[Trajectory]:
        """This rank's share."""
        self._enter("starved", f"trajectories of step {batch.step} from the buffer")
        started_s = time.monotonic()
        share = self._trainer.share(batch)
        with self._on_record(batch.step):
            trajectories = await self._client.fetch(share) if share else []
        self._meters.observe("fetch_s", time.monotonic() - started_s)
        return trajectories

    async def _in_thread(self, call: Callable[[], _T], command: str = "") -> _T:
        """`command` may take step_timeout_s: _pulse looks."""
        self._command, self._command_s = command, time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._command = ""

    def _enter(self, state: str, waits_for: str = "") -> None:
        self._meters.clock.enter(state, time.monotonic(), waits_for)
