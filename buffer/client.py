"""The buffer as its peers see it: every call returns when the buffer has answered, and what it wrote is durable.

Consumes    calls of one role, on one event loop
Produces    requests; their answers, or Fenced, Refused, LeaseOver, PeerSilent
Waits for   the buffer: up to `request_timeout_s` for an answer, restarts of the buffer included (long polls: wait_s
            longer); room in the window of unanswered requests
Unblocked by answers; after a silence the address is resolved anew and everything unanswered is sent again, in order
Invariant   a request is sent again until it is answered or given up; the buffer is idempotent by key

Example:
    client = BufferClient(resolve, run="r1", role="rollout", name="rollout-0")
    welcome = await client.connect()
    await client.loaded(Loaded(lineage=1, version=0, checksum=7, pause_s=0.1))
    leases = await client.lease(want=8, loaded=0, wait_s=10.0)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from buffer.codec import decode, encode
from buffer.connection import Connection, Pending
from buffer.doors import Keys
from buffer.schema import (
    Batch,
    Decision,
    Excluded,
    Finish,
    GroupHeaders,
    Lease,
    Loaded,
    RolloutKey,
    Trajectory,
    Turn,
    Welcome,
)
from buffer.wire import (
    BODIES,
    Checkpoint,
    Dial,
    Hello,
    LeaseRequest,
    Publication,
    Reason,
    TakeRequest,
    Turned,
    pack_head,
)

FETCH_KEYS = 256
"""asked for at once; the buffer answers with as many as fit into one message"""


class Refused(Exception):
    """The buffer said no: `reason` is one of buffer.wire.Reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class LeaseOver(Refused):
    """The rollout is in other hands, or its group is closed: drop the rollout and go on."""


class Fenced(Refused):
    """This life of the peer is over: the process must end; a new one may say HELLO."""


class PeerSilent(Exception):
    """The buffer has not answered in time."""

    def __init__(self, peer: str, waited_s: float) -> None:
        super().__init__(
            f"{peer} has not answered for {waited_s:.1f} s: is its role running, is its address reachable?"
        )
        self.peer, self.waited_s = peer, waited_s


class BufferClient:
    """One life of one peer."""

    def __init__(
        self,
        resolve: Callable[[], Awaitable[str]],
        *,
        run: str,
        role: str,
        name: str,
        request_timeout_s: float = 120.0,
        window: int = 64,
        keys: Keys | None = None,
    ) -> None:
        """`resolve` gives the buffer's present endpoint; `window` requests may be unanswered at a time; `keys` are the
        run's, where the buffer listens beyond loopback.
        """
        self.run, self.role, self.name = run, role, name
        self.epoch = 0
        self._timeout_s = request_timeout_s
        self._window = asyncio.Semaphore(window)
        self._connection = Connection(resolve, name, keys)
        self._seq = 0

    async def connect(self) -> Welcome:
        """Begin a new life: what an earlier one of this name held is free for others."""
        self._connection.renew()
        self.epoch = 0
        welcome: Welcome = await self._ask(
            "hello", Hello(role=self.role, name=self.name, life=self._connection.life), urgent=True
        )
        self.epoch = welcome.epoch
        return welcome

    async def lease(self, want: int, loaded: int, wait_s: float) -> list[Lease]:
        """Up to `want` rollouts for an engine that has acknowledged `loaded`; [] when there is none within `wait_s`."""
        return list(await self._ask("lease", LeaseRequest(want=want, loaded=loaded, wait_s=wait_s), wait_s))

    async def push_turn(self, turn: Turn) -> None:
        """Returns when the turn is durable."""
        await self._ask("turn", turn)

    async def finish(self, finish: Finish) -> None:
        await self._ask("finish", finish)

    async def exclude(self, excluded: Excluded) -> None:
        await self._ask("exclude", excluded)

    async def renew(self, keys: Sequence[RolloutKey]) -> list[RolloutKey]:
        """This engine still works on `keys`, all of them; returns those that are not its own any more: stop them.

        A lease that goes unnamed for `dead_after_s` is given to others: its answer was lost.
        """
        return list(await self._ask("renew", tuple(keys), urgent=True))

    async def loaded(self, loaded: Loaded) -> None:
        await self._ask("loaded", loaded)

    async def next_group(self, wait_s: float) -> GroupHeaders | None:
        return await self._ask("next_group", wait_s, wait_s)

    async def decide(self, decision: Decision) -> None:
        await self._ask("decide", decision)

    async def take(self, step: int, wait_s: float) -> Batch | None:
        """The batch of `step`; None when it is not there within `wait_s`, or the run's goal is reached."""
        return await self._ask("take", TakeRequest(step=step, wait_s=wait_s), wait_s)

    async def fetch(self, keys: Sequence[RolloutKey]) -> list[Trajectory]:
        """The trajectories of `keys`, in their order; arrays are writable."""
        out: list[Trajectory] = []
        while len(out) < len(keys):
            out += await self._ask("fetch", tuple(keys[len(out) : len(out) + FETCH_KEYS]))
        return out

    async def record_publication(self, lineage: int, version: int, checksum: int | None = None) -> None:
        """Before the first byte of the version is sent; engines must acknowledge its `checksum`."""
        await self._ask("publication", Publication(lineage=lineage, version=version, checksum=checksum))

    async def record_checkpoint(self, step: int, kept: Sequence[int] = ()) -> None:
        """Checkpoint of version `step` is complete; `kept` are all on disk now (default: this and the one before)."""
        await self._ask("checkpoint", Checkpoint(version=step, kept=tuple(kept)))

    async def heartbeat(self, snapshot: dict[str, Any]) -> str:
        """Say that this peer lives, and how it does; returns the run's state: running | evaluating | done."""
        return await self._ask("heartbeat", snapshot, urgent=True)

    async def status(self) -> dict[str, Any]:
        """What the buffer knows of the run and its roles; needs no `connect`."""
        return await self._ask("status", None, urgent=True)

    async def set_dial(self, name: str, value: float) -> None:
        """Turn a live dial (buffer/dials.py), e.g. staleness.max_staleness; durable when this returns."""
        await self._ask("dial", Dial(name=name, value=value))

    async def dials(self) -> list[Turned]:
        """Every live dial's records, oldest first: what the run began with, then each change."""
        return list(await self._ask("dials", None, urgent=True))

    async def failed(self, message: str) -> None:
        """Say that this life ends by an error."""
        await self._ask("failed", message, urgent=True)

    async def close(self) -> None:
        """BYE, if the buffer answers soon; then close."""
        if self.epoch:
            with contextlib.suppress(Refused, PeerSilent, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._ask("bye", None, urgent=True)
        self.epoch = 0
        await self._connection.close()

    async def _ask(self, kind: str, record: Any, wait_s: float = 0.0, *, urgent: bool = False) -> Any:
        """One request and its answer; urgent ones (heartbeats) don't queue for the window."""
        request, answer = BODIES[kind]
        body, payload = encode(request, record)
        if urgent:
            return await self._exchange(kind, answer, body, payload, wait_s)
        async with self._window:
            return await self._exchange(kind, answer, body, payload, wait_s)

    async def _exchange(self, kind: str, answer: Any, body: bytes, payload: bytes, wait_s: float) -> Any:
        self._seq += 1
        frames = [pack_head(kind, self._seq, self.epoch, self.run), body]
        pending = Pending(kind, self._seq, [*frames, payload] if payload else frames, wait_s)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                verdict, reply = await self._connection.exchange(pending)
        except TimeoutError as error:
            raise PeerSilent(f"buffer at {self._connection.endpoint}", time.monotonic() - started_s) from error
        if verdict == "nack":
            raise _refused(*decode(tuple[str, str], reply[0]))
        data = reply[1] if len(reply) > 1 else b""
        return decode(answer, reply[0], data, writable=True)


def _refused(reason: str, message: str) -> Refused:
    kinds = {Reason.FENCED: Fenced, Reason.LEASE_OVER: LeaseOver}
    return kinds.get(Reason(reason), Refused)(reason, message)
