"""The body of each role: what runs inside its Ray actor.

Consumes    a role's spec; endpoints of other roles, by name
Produces    a running buffer, sandbox, RoC filter, rollout actor or learner rank
Waits for   the run's end, which each role learns from the buffer; or being cancelled, which is the order to stop
Invariant   each package's settings arrive here and nowhere else; nothing below knows of Ray or of recipes. A role
            listens on loopback, or with keys at the address by which Ray knows its host
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from buffer.client import PeerSilent, Refused
from buffer.dials import OWN
from buffer.wire import NEWEST, Turned, value_at
from launch.cluster import ranks_apart
from launch.config import live_dials
from launch.links import Links
from launch.roles import Role, RoleSpec
from sandbox.settings import SandboxSettings

LOOPBACK = "127.0.0.1"
RENDEZVOUS_CHECK_S = 1.0
FAREWELL_S = 2.0


class RankRestarted(RuntimeError):
    """Rank 0 of the learner began another life: this rank belongs to the one before."""


class RanksApart(RuntimeError):
    """The learner's ranks are on several hosts, where their collectives could be read and joined by anybody."""


def _links(spec: RoleSpec) -> Links:
    return Links(spec.namespace, spec.wire_keys)


def _here(spec: RoleSpec) -> str:
    """Where this role listens: on loopback when all roles are on this host."""
    if spec.keys is None:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


async def buffer(spec: RoleSpec, role: Role) -> None:
    """Holds the run until it is told to stop."""
    from actors.problems import Problem, ProblemStream
    from buffer import schema
    from buffer.server import BufferServer
    from launch.pinned import pin

    recipe = spec.settings()
    stream = ProblemStream(recipe.problems, recipe.run.seed)
    pin(Path(spec.directory), recipe.problems, stream.fingerprint())

    def record(problem: Problem) -> schema.Problem:
        return schema.Problem(**asdict(problem))

    def problem_at(index: int) -> schema.Problem | None:
        return None if stream.exhausted(index) else record(stream.at(index))

    server = BufferServer(
        recipe.buffer_settings(),
        Path(spec.directory),
        spec.run,
        problem_at,
        [record(p) for p in stream.heldout],
        live={name: attrgetter(name)(recipe) for name in live_dials() if name not in OWN},
    )
    bind = f"tcp://{_here(spec)}:{recipe.buffer.port or 0}"
    role.listening(await server.start(bind, spec.wire_keys))
    role.stage("running")
    try:
        await server.run_until_stopped()
    except asyncio.CancelledError:
        await server.stop()
        raise


async def sandbox(spec: RoleSpec, role: Role) -> None:
    """Runs calls until it is told to stop; its figures go to the buffer, as those of every role."""
    from buffer.usage import Usage
    from sandbox.server import SandboxServer

    recipe = spec.settings()
    started_s, usage = time.monotonic(), Usage()
    server = SandboxServer(recipe.sandbox)
    role.listening(await server.start(f"tcp://{_here(spec)}:0", keys=spec.wire_keys))
    role.stage("running")
    client = _links(spec).buffer_client(spec.run, role=spec.role, name=spec.name)
    try:
        await client.connect()
        while True:
            now_s = time.monotonic()
            snapshot = _sandbox_snapshot(spec, server.snapshot(), now_s - started_s)
            await client.heartbeat(snapshot | {"usage": usage.read(now_s)})
            if server.failure is not None:
                raise server.failure
            server.limit(**live_limits(recipe.sandbox, await client.dials()))
            await asyncio.sleep(recipe.buffer.heartbeat_s)
    except Exception as error:  # the buffer must not take this end for a good one
        with contextlib.suppress(Refused, PeerSilent, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await client.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        await client.close()
        await server.stop()


def live_limits(settings: SandboxSettings, turned: Iterable[Turned]) -> dict[str, float]:
    """Seconds of a call, as they are turned now."""
    names, turned = ("wall_s", "cpu_s"), list(turned)
    found = {name: value_at(turned, f"sandbox.{name}", NEWEST) for name in names}
    return {name: getattr(settings, name) if value is None else value for name, value in found.items()}


def _sandbox_snapshot(spec: RoleSpec, figures: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """A node serves many calls at once, so it keeps no clock; its figures are counters and present numbers."""
    present = {key: figures.pop(key) for key in ("waiting", "placed", "clients", "shards")}
    statuses = {f"status/{status}": count for status, count in figures.pop("statuses").items()}
    histograms = figures.pop("histograms")
    return {
        "role": spec.role,
        "name": spec.name,
        "wall_s": wall_s,
        "clock": {},
        "waits_for": "" if present["placed"] else "calls",
        "counters": figures | statuses,
        "gauges": present,
        "histograms": histograms,
    }


async def filter_(spec: RoleSpec, role: Role) -> None:
    """Decides groups until the run is done."""
    from actors.roc_filter import RocFilter

    recipe = spec.settings()
    body = RocFilter(
        recipe.roc,
        recipe.run.seed,
        _links(spec).to("buffer-0"),
        spec.name,
        run=spec.run,
        heartbeat_s=recipe.buffer.heartbeat_s,
        keys=spec.wire_keys,
    )
    role.stage("running")
    await body.run()


async def learner(spec: RoleSpec, role: Role) -> None:
    """Trains until the run is done. A rank that is not the first ends when the first begins another life."""
    from learner.learner import Learner
    from learner.trainer import TrainerSpec

    recipe = spec.settings()
    links = _links(spec)
    watching = await _join_ranks(spec, role, links, recipe.learner.ranks)
    body = Learner(
        TrainerSpec(
            run=spec.run,
            model=Path(recipe.model.path),
            directory=Path(spec.directory),
            temperature=recipe.rollout.temperature,
            learner=recipe.learner,
            loss=recipe.loss,
            publish=recipe.publish_settings(),
        ),
        resolve=links.to("buffer-0"),
        rank=spec.index,
        world=recipe.learner.ranks,
        heartbeat_s=recipe.buffer.heartbeat_s,
        bind=f"tcp://{_here(spec)}:0",
        keys=spec.wire_keys,
        on_phase=lambda phase, step: role.stage("running"),  # the first is that it has restored what it starts from
    )
    role.listening(body.weights_endpoint or "none")
    ended = await _whichever_first(body.run, watching)
    print(f"{spec.name}: {ended}", flush=True)


async def _join_ranks(spec: RoleSpec, role: Role, links: Links, world: int) -> Callable[[], Awaitable[None]] | None:
    """Sets what torch reads to find the other ranks; for ranks after the first, what to watch meanwhile."""
    os.environ.update(RANK=str(spec.index), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=LOOPBACK)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if spec.index == 0:
        os.environ["MASTER_PORT"] = port = str(_free_port())
        role.rendezvous = f"{_here(spec)} {port}"
        return None
    limit_s = spec.settings().run.start_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            meeting = await links.rendezvous("learner-0")
    except TimeoutError as error:
        raise RankRestarted(
            f"learner-0 told {spec.name} no place to meet in run.start_timeout_s = {limit_s:g} s"
        ) from error
    host, _, os.environ["MASTER_PORT"] = meeting.partition(" ")
    if host != _here(spec):
        raise RanksApart(ranks_apart(world, {host: 1, _here(spec): 1}))  # a node that joined after the driver looked

    async def watch() -> None:
        while await links.rendezvous("learner-0") == meeting:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(RENDEZVOUS_CHECK_S)
        raise RankRestarted("learner-0 began another life: this rank starts again with it")

    return watch


async def _whichever_first(body: Callable[[], Awaitable[Any]], watching: Callable[[], Awaitable[None]] | None) -> Any:
    """The body's result, unless what is watched raises first; being cancelled cancels the body alone."""
    if watching is None:
        return await body()
    task, watcher = asyncio.ensure_future(body()), asyncio.ensure_future(watching())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
    if not task.done():
        watcher.result()
    watcher.cancel()
    return task.result()


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


async def rollout(spec: RoleSpec, role: Role) -> None:
    """Generates until the run is done."""
    from actors.rollout import RolloutActor

    recipe = spec.settings()
    links = _links(spec)
    body = RolloutActor(
        model=Path(recipe.model.path),
        rollout=recipe.rollout,
        weights=recipe.weights,
        chat=recipe.chat,
        buffer_resolve=links.to("buffer-0"),
        sandbox_resolve=links.to_all("sandbox", recipe.sandbox.nodes),
        weights_resolve=links.to("learner-0"),
        name=spec.name,
        run=spec.run,
        heartbeat_s=recipe.buffer.heartbeat_s,
        keys=spec.wire_keys,
        on_stage=role.stage,
    )
    await body.run()


BODIES: dict[str, Callable[[RoleSpec, Role], Awaitable[None]]] = {
    "buffer": buffer,
    "sandbox": sandbox,
    "filter": filter_,
    "rollout": rollout,
    "learner": learner,
}
