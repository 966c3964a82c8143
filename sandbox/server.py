"""A sandbox node's front: takes calls and answers over ZeroMQ, places them on shards, streams the results back.

Consumes    RUN, CHECK, CANCEL, ACK, PING, HELLO, BYE of clients
Produces    RESULTS and VERDICTS as each ends, WELCOME and PONG with the client's window
Waits for   clients and shards; a shard that dies is started again
Unblocked by stop(); `failed()` tells of a shard that can't be started any more: the node is of no use then
Invariant   every request that was well-formed gets one outcome; beyond the queue's bound it is `overloaded` at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import zmq

from buffer.doors import Keys, guard
from sandbox import host, messages, wire
from sandbox.api import Call, Check, Result, Status, Verdict
from sandbox.dispatch import Dispatch, Entry
from sandbox.settings import SandboxSettings
from sandbox.shard import Shard, StartRefused

_LOG = logging.getLogger(__name__)
_TICK_S = 1.0
_CLIENT_TTL_S = 30.0
_RESTART_S = 0.5
_MAX_STARTS = 4
"""Starts of a shard in a row that are refused, each followed by a longer wait, before the node gives up."""
_FEW_CORES = 2
"""On more than these a shard keeps a second zygote of each kind warm, to take a dead one's place."""


@dataclass(slots=True)
class _Client:
    """Somebody who sends requests."""

    tenant: str
    heard_s: float
    results: list[Any]
    verdicts: list[Any]


class SandboxServer:
    """One sandbox node."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._limits = settings.limits()
        self._dispatch = Dispatch(settings.queue_bound, self._deliver)
        self._shards: list[Shard] = []
        self._clients: dict[bytes, _Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._port: wire.Port | None = None
        self._guarded: zmq.Context[Any] | None = None
        self._flushing = False
        self._stopping = False
        self.failure: StartRefused | None = None
        """Why the node is of no use any more."""
        self._failed = asyncio.Event()

    async def start(self, bind: str = "tcp://127.0.0.1:0", *, keys: Keys | None = None) -> str:
        """Start the shards and listen; the endpoint to connect to.

        Args:
            bind: ZeroMQ endpoint; port 0 takes a free one.
            keys: of the run; required beyond loopback.

        Raises:
            DoorError: it would listen beyond loopback without keys.
            StartRefused: the host lacks a piece of isolation.
        """
        self._guarded = zmq.Context() if keys else None
        sock = (self._guarded or zmq.Context.instance()).socket(zmq.ROUTER)
        try:
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
            wire.set_bounds(sock)
            guard(sock, bind, keys)
            sock.bind(bind)
            await asyncio.gather(*(self._start_shard(index) for index in range(self._settings.num_workers())))
        except BaseException:
            sock.close(linger=0)
            await self.stop()
            raise
        self._port = wire.Port(sock, self._on_message)
        self._spawn(self._tick())
        endpoint = sock.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    async def stop(self) -> None:
        """Stop listening and end every process of the node."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._port is not None:
            self._flush()
            for identity in self._clients:
                self._send(identity, wire.REFUSED, wire.CLOSING)
            self._port.close()
        await asyncio.gather(*(shard.stop() for shard in self._shards))
        if self._guarded is not None:
            await asyncio.to_thread(self._guarded.term)

    async def failed(self) -> None:
        """Returns when `failure` is set."""
        await self._failed.wait()

    def limit(self, *, wall_s: float, cpu_s: float) -> None:
        """Seconds that a call gets from now on, unless it states its own; calls that have come keep theirs."""
        self._limits = replace(self._limits, wall_s=wall_s, cpu_s=cpu_s)

    def snapshot(self) -> dict[str, Any]:
        """Cumulative counters and histograms, and present numbers, for metrics."""
        histograms = {name: histogram.snapshot() for name, histogram in self._dispatch.histograms.items()}
        present = {"waiting": self._dispatch.num_waiting, "placed": self._dispatch.num_placed}
        present |= {"clients": len(self._clients), "shards": len(self._shards)}
        return asdict(self._dispatch.counts) | present | {"histograms": histograms}

    async def _start_shard(self, index: int) -> None:
        shard = Shard(self._on_report, lambda ended: self._on_shard_end(ended, index))
        self._shards.append(shard)
        settings = self._settings
        sessions = -(-settings.sessions // settings.num_workers())
        try:
            plan = host.plan(settings.isolation == "full", index)
            standby = len(os.sched_getaffinity(0)) > _FEW_CORES
            wishes = ["spare"] * settings.spare + ["standby"] * standby
            await shard.start(plan, settings.profile, sessions, settings.preamble, wishes)
        except StartRefused:
            self._shards.remove(shard)
            await shard.stop()
            raise

    def _on_shard_end(self, shard: Shard, index: int) -> None:
        """A supervisor died with all below it: place its work elsewhere and start another."""
        self._shards.remove(shard)
        self._dispatch.counts.shard_restarts += 1
        self._dispatch.drop_place(shard, time.monotonic())
        if not self._stopping:
            self._spawn(self._restart_shard(index))
        self._place()

    async def _restart_shard(self, index: int) -> None:
        """Start a shard anew."""
        if self._dispatch.counts.shard_restarts > 3:
            await asyncio.sleep(_RESTART_S)
        for attempt in range(_MAX_STARTS):
            try:
                await self._start_shard(index)
            except StartRefused as error:
                _LOG.error("sandbox shard %d: %s", index, error)
                if attempt + 1 == _MAX_STARTS:
                    self.failure = StartRefused(f"shard {index} can't be started any more: {error}")
                    self._failed.set()
                await asyncio.sleep(_RESTART_S * 2**attempt)
            else:
                break
        self._place()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._dispatch.expire(now_s)
            for identity, client in list(self._clients.items()):
                if client.heard_s < now_s - _CLIENT_TTL_S:
                    del self._clients[identity]

    def _on_message(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        try:
            if len(rest) != 1:
                raise wire.Malformed(f"{len(rest)} frames instead of 1")
            kind, *parts = wire.unpack(rest[0])
            self._on_request(identity, kind, parts)
        except wire.Malformed as error:
            self._send(identity, wire.REFUSED, str(error))

    def _on_request(self, identity: bytes, kind: str, parts: list[Any]) -> None:
        now_s = time.monotonic()
        if kind == wire.HELLO:
            self._welcome(identity, parts, now_s)
            return
        client = self._clients.get(identity)
        if client is None:  # it was silent for long, or this node is new: it has to begin again
            self._send(identity, wire.REFUSED, wire.HELLO_FIRST)
            return
        client.heard_s = now_s
        if kind == wire.PING:
            self._send(identity, wire.PONG, self._window())
        elif kind == wire.BYE:
            del self._clients[identity]
        elif kind in (wire.RUN, wire.CHECK, wire.ACK, wire.CANCEL, wire.END):
            if len(parts) != 1 or not isinstance(parts[0], list):
                raise wire.Malformed(f"{kind} takes one list")
            self._on_list(identity, client.tenant, kind, parts[0], now_s)
        else:
            raise wire.Malformed(f"unknown kind {kind[:40]!r}")

    def _welcome(self, identity: bytes, parts: list[Any], now_s: float) -> None:
        match parts:
            case [wire.VERSION, str(tenant)]:
                self._clients[identity] = _Client(tenant, now_s, [], [])
                self._send(identity, wire.WELCOME, wire.VERSION, len(self._shards), self._window())
            case _:
                raise wire.Malformed(f"hello takes version {wire.VERSION} and the name of the run")

    def _on_list(self, identity: bytes, tenant: str, kind: str, items: list[Any], now_s: float) -> None:
        for item in items:
            if kind == wire.RUN:
                call, priority = wire.read_call(item, self._limits)
                self._add_call(tenant, identity, call, priority, now_s)
            elif kind == wire.CHECK:
                match item:
                    case [str(name), str(answer), str(gold)]:
                        self._dispatch.add(tenant, identity, Check(id=name, answer=answer, gold=gold), 0, now_s)
                    case _:
                        raise wire.Malformed("a check is [id, answer, gold]")
            elif isinstance(item, str) and kind == wire.ACK:
                self._dispatch.acknowledge(tenant, item)
            elif isinstance(item, str) and kind == wire.END:
                self._dispatch.end_session(tenant, item)
            elif isinstance(item, str):
                self._dispatch.cancel(tenant, item, now_s)
        self._place()

    def _add_call(self, tenant: str, identity: bytes, call: Call, priority: int, now_s: float) -> None:
        why = wire.unfit(call)
        if why:
            result = Result(id=call.id, status=Status.BAD_REQUEST, exception=f"bad request: {why}")
            self._clients[identity].results.append(wire.result_fields(result))
            self._flush_soon()
        else:
            self._dispatch.add(tenant, identity, call, priority, now_s)

    def _window(self) -> int:
        """Requests that one client should have in flight at most, so that all together fit the queue."""
        return max(1, self._settings.queue_bound // max(1, len(self._clients)))

    def _place(self) -> None:
        self._dispatch.place([*self._shards])

    def _on_report(self, shard: Shard, message: list[Any]) -> None:
        now_s = time.monotonic()
        kind, *rest = message
        if kind == messages.RESULT:
            self._dispatch.finish(rest[0][0], wire.read_result(rest[0]), now_s)
        elif kind == messages.VERDICT:
            for number, verdict in rest[0]:
                self._dispatch.finish(number, Verdict(verdict), now_s)
        elif kind == messages.LOST:
            self._dispatch.lose(rest[0], now_s)
        elif kind == messages.BACK:
            self._dispatch.return_unstarted(rest[0])
        elif kind == messages.EVENT:
            counts = self._dispatch.counts
            setattr(counts, rest[0], getattr(counts, rest[0]) + rest[1])
        self._place()

    def _deliver(self, entry: Entry) -> None:
        client = self._clients.get(entry.client)
        if client is None:
            return
        if isinstance(entry.outcome, Verdict):
            client.verdicts.append([entry.work.id, entry.outcome.value])
        else:
            client.results.append(wire.result_fields(replace(entry.outcome, id=entry.work.id)))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Send what has gathered at the end of this turn of the loop, one message per client."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        for identity, client in self._clients.items():
            if client.results:
                self._send(identity, wire.RESULTS, client.results, self._window())
                client.results = []
            if client.verdicts:
                self._send(identity, wire.VERDICTS, client.verdicts, self._window())
                client.verdicts = []

    def _send(self, identity: bytes, *parts: Any) -> None:
        if self._port is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._port.send(identity, wire.pack(*parts))
