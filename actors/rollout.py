"""The rollout actor: leases rollouts, runs them on its engine, follows the learner's versions.

Consumes    leases, published versions, the run's state
Produces    turns, scores, exclusions, acknowledgements of versions; figures with each heartbeat
Waits for   its engine to start; the first version; leases while there is room; the engine, the sandbox and the buffer
            within each rollout
Unblocked by a publication; tickets; rollouts that end
Invariant   a version is acknowledged only after it is loaded whole; a lease is begun only on weights it may be run on;
            a failed rollout is data, a dead engine or a fenced life ends the actor (and Ray starts another)
"""

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from actors.chat import Chat, ChatSettings
from actors.engine import Engine, EngineDied, seed_of_life
from actors.episode import Episode, InfrastructureFailed
from actors.live import NEWEST, obey
from actors.rollout_figures import MeteredEngine, count_outcome, count_turn, show_occupancy
from actors.scheduler import KvScheduler
from actors.settings import RolloutSettings, WeightsSettings
from actors.version_follower import VersionFollower
from actors.weights import WeightClient
from buffer.client import BufferClient, Fenced, LeaseOver, PeerSilent, Refused
from buffer.doors import Keys
from buffer.meters import Meters
from buffer.schema import Excluded, Finish, Lease, RolloutKey, Turn
from buffer.usage import Usage
from sandbox.client import SandboxClient

LEASE_WAIT_S = 10.0
RETRY_S = 0.5  # before leases are asked for again after a refusal
ENGINE_SILENT_S = 60.0
"""An engine that does not say for so long how full it is counts as dead; loading a version is not counted."""


class RolloutActor:
    """Example: `await RolloutActor(model=path, ..., name="rollout-0", run="3f2a").run()`."""

    def __init__(
        self,
        *,
        model: Path,
        rollout: RolloutSettings,
        weights: WeightsSettings,
        chat: ChatSettings,
        buffer_resolve: Callable[[], Awaitable[str]],
        sandbox_resolve: Callable[[], Awaitable[Sequence[str]]],
        weights_resolve: Callable[[], Awaitable[str]],
        name: str,
        run: str,
        heartbeat_s: float = 1.0,
        evaluation_temperature: float = 1.0,
        keys: Keys | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`model`: folder with config.json and tokenizer; `run`: wire id; `*_resolve`: the present endpoints;
        `on_stage` is told "starting", "waiting" (for a first version) or "running" (it is loaded and acknowledged).
        """
        self._model, self._settings, self._weights_settings, self._chat_settings = model, rollout, weights, chat
        self._name, self._run, self._heartbeat_s = name, run, heartbeat_s
        self._evaluation_temperature, self._on_stage = evaluation_temperature, on_stage
        self._buffer = BufferClient(
            buffer_resolve, run=run, role="rollout", name=name, window=4 * rollout.concurrency, keys=keys
        )
        self._sandbox = SandboxClient(sandbox_resolve, tenant=run, keys=keys)
        self._weights = WeightClient(weights_resolve, keys=keys)
        self._meters = Meters("rollout", name, time.monotonic(), Usage().read)
        self._rollouts: dict[RolloutKey, asyncio.Task[bool]] = {}  # those without an outcome yet
        self._ended = asyncio.Event()  # a rollout has ended since it was last cleared
        self._engine: Engine  # this and what follows: once the engine has started
        self._metered: MeteredEngine
        self._chat: Chat
        self._scheduler: KvScheduler
        self._versions: VersionFollower

    async def run(self) -> None:
        """Works until the run is done.

        Raises:
            Fenced: this life is over.
            EngineDied: so is this engine.
        """
        epoch = (await self._buffer.connect()).epoch
        await self._obey_dials()
        tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._work(epoch))]
        try:
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        except Exception as error:
            await self._say_failed(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    async def _beat(self) -> None:
        """Says that this actor lives and what it works on; returns when the run is done."""
        while True:
            self._meters.gauge("rollouts", len(self._rollouts))
            with contextlib.suppress(PeerSilent):  # the client has been asking all the while; so it does again
                if await self._buffer.heartbeat(self._meters.snapshot(time.monotonic())) == "done":
                    return
                await self._renew()
                await self._obey_dials()
            await asyncio.sleep(self._heartbeat_s)

    async def _obey_dials(self) -> None:
        turned, runs = await self._buffer.dials(), hasattr(self, "_versions")
        settings = (self._settings, self._weights_settings)
        self._settings, self._weights_settings = obey(turned, self._engine.loaded[1] if runs else NEWEST, *settings)
        if runs:
            self._scheduler.allow(self._settings.concurrency)
            self._versions.settings = self._weights_settings

    async def _renew(self) -> None:
        held = dict(self._rollouts)
        lost = await self._buffer.renew(list(held)) if held else []
        for key in (one for one in lost if self._rollouts.get(one) is held[one]):
            self._stop(key)

    async def _work(self, epoch: int) -> None:
        self._tell_clock("engine to start")
        self._chat = await asyncio.to_thread(Chat.load, self._model, self._chat_settings)
        self._engine = await Engine.start(
            self._model, self._settings, self._weights_settings, seed=seed_of_life(self._run, self._name, epoch)
        )
        self._metered = MeteredEngine(self._engine, self._meters)
        self._scheduler = KvScheduler(
            capacity_tokens=self._engine.kv_capacity_tokens,
            max_length=self._settings.max_length,
            concurrency=self._settings.concurrency,
            block_tokens=self._engine.block_tokens,
        )
        self._versions = VersionFollower(
            self._engine,
            self._weights,
            self._weights_settings,
            self._meters,
            acknowledge=lambda loaded: self._durably(lambda: self._buffer.loaded(loaded)),
            changed=self._tell_clock,
        )
        self._tell_clock()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._versions.run())
                group.create_task(self._watch_engine())
                group.create_task(self._lease(group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch_engine(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._versions.swapping:
                continue
            try:
                async with asyncio.timeout(ENGINE_SILENT_S):
                    show_occupancy(self._meters, await self._engine.occupancy())
            except TimeoutError as error:
                if not self._versions.swapping:
                    raise EngineDied(f"the engine did not answer for {ENGINE_SILENT_S} s") from error

    async def _lease(self, group: asyncio.TaskGroup) -> NoReturn:
        """Takes as many rollouts as there is room for."""
        await self._versions.acknowledged.wait()
        while True:
            self._ended.clear()
            room = self._scheduler.room()
            self._meters.gauge("room", room)
            if room == 0:
                await self._ended.wait()
                continue
            with contextlib.suppress(PeerSilent):
                for lease in await self._ask_for_leases(room, self._engine.loaded[1]):
                    self._begin(lease, group)

    async def _ask_for_leases(self, room: int, version: int) -> list[Lease]:
        try:
            return await self._buffer.lease(room, version, LEASE_WAIT_S)
        except Fenced:
            raise
        except Refused as refusal:  # the version is loaded and not acknowledged yet
            self._meters.count(f"leases_refused/{refusal.reason}")
            await asyncio.sleep(RETRY_S)
            return []

    def _begin(self, lease: Lease, group: asyncio.TaskGroup) -> None:
        key, version = (lease.group, lease.rollout), self._engine.loaded[1]
        if version < lease.base or (lease.kind == "eval" and version != lease.base):
            self._meters.count("leases_of_other_versions")  # not renewed, so others get it
            return
        self._stop(key)
        name = (*key, lease.attempt)
        episode = Episode(
            lease,
            engine=self._metered,
            chat=self._chat,
            sandbox=self._sandbox,
            push=lambda turn: self._push(name, episode, turn),
            settings=self._settings,
            temperature=self._evaluation_temperature if lease.kind == "eval" else None,
        )
        self._scheduler.admit(name, episode.context_tokens)
        task = self._rollouts[key] = group.create_task(self._rollout(name, episode))
        task.add_done_callback(lambda done: self._forget(name, done))
        self._tell_clock()

    async def _rollout(self, name: tuple[int, int, int], episode: Episode) -> bool:
        """One rollout from its lease to its outcome; says whether it ran to its own end."""
        try:
            outcome = await self._outcome(name, episode)
            self._rollouts.pop(name[:2], None)  # a lease that ends by this outcome must not look like one that was lost
            await self._durably(
                lambda: self._buffer.finish(outcome) if isinstance(outcome, Finish) else self._buffer.exclude(outcome)
            )
            count_outcome(self._meters, outcome)
            return isinstance(outcome, Finish)
        except LeaseOver:
            self._meters.count("rollouts_lease_over")
        except Fenced:
            raise
        except Refused as refusal:
            self._meters.count(f"rollouts_refused/{refusal.reason}")
            print(f"{self._name}: group {name[0]}, rollout {name[1]}: {refusal}", flush=True)
        return False

    async def _outcome(self, name: tuple[int, int, int], episode: Episode) -> Finish | Excluded:
        """The one place where a rollout's failures are attributed."""
        try:
            return await episode.run()
        except (EngineDied, Refused):
            raise
        except Exception as error:
            if not isinstance(error, InfrastructureFailed):
                traceback.print_exc()
                error = InfrastructureFailed("failed", repr(error))
            print(f"{self._name}: group {name[0]}, rollout {name[1]} is excluded: {error!s:.300}", flush=True)
            return Excluded(group=name[0], rollout=name[1], attempt=name[2], reason=error.reason)

    async def _push(self, name: tuple[int, int, int], episode: Episode, turn: Turn) -> None:
        self._scheduler.grow(name, episode.context_tokens)
        count_turn(self._meters, turn)
        started_s = time.monotonic()
        await self._durably(lambda: self._buffer.push_turn(turn))
        self._meters.observe("push_s", time.monotonic() - started_s)

    async def _durably(self, say: Callable[[], Awaitable[None]]) -> None:
        """Says something until the buffer has it: what was generated outlives a buffer that is away."""
        while True:
            try:
                return await say()
            except PeerSilent as silence:
                self._meters.count("buffer_silent")
                print(f"{self._name}: {silence}", flush=True)

    def _stop(self, key: RolloutKey) -> None:
        """A rollout that is not this engine's any more."""
        if (task := self._rollouts.get(key)) is not None:
            self._meters.count("rollouts_stopped")
            task.cancel()

    def _forget(self, name: tuple[int, int, int], task: asyncio.Task[bool]) -> None:
        """However it ended, even before it began: what it held is free."""
        self._scheduler.release(name, completed=not task.cancelled() and task.exception() is None and task.result())
        if self._rollouts.get(name[:2]) is task:
            del self._rollouts[name[:2]]
        self._ended.set()
        self._tell_clock()

    def _tell_clock(self, starting: str = "") -> None:
        state, waits_for, stage = "busy", "", "running"
        if starting or not self._versions.acknowledged.is_set():
            state, waits_for = "down", starting or "first version"
            stage = "starting" if starting or self._versions.found else "waiting"
        elif self._versions.swapping:
            state, waits_for = "sync", "weights"
        elif not self._rollouts:
            state, waits_for = "starved", "leases"
        self._meters.clock.enter(state, time.monotonic(), waits_for)
        self._on_stage(stage)

    async def _say_failed(self, error: Exception) -> None:
        with contextlib.suppress(Refused, PeerSilent, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._buffer.failed(f"{type(error).__name__}: {error}")

    async def _close(self) -> None:
        self._weights.close()
        await self._sandbox.close()
        if hasattr(self, "_engine"):
            await self._engine.close()
        await self._buffer.close()
