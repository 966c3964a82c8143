"""The RoC filter: the role that decides which rollouts of a finished group are trained.

Consumes    headers of finished groups, from the buffer
Produces    a Decision per group, to the buffer; figures of what RoC saw and kept
Waits for   the next finished group (clock: starved); the run's end, told by the heartbeat
Unblocked by  a group's last rollout being closed
Invariant   holds nothing: a filter that dies leaves its group undecided, another asks and chooses the same
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from actors.roc import RocSettings, select
from buffer.client import BufferClient, Fenced, PeerSilent, Refused
from buffer.doors import Keys
from buffer.meters import Meters
from buffer.schema import Decision, GroupHeaders
from buffer.usage import Usage

WAIT_S = 5.0
"""of one request for the next group"""
PENALTY_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


class RocFilter:
    """Example: `await RocFilter(settings, 1, resolve, "filter-0", run="3f2a").run()`."""

    def __init__(
        self,
        settings: RocSettings,
        run_seed: int,
        resolve: Callable[[], Awaitable[str]],
        name: str,
        *,
        run: str,
        heartbeat_s: float = 1.0,
        keys: Keys | None = None,
    ) -> None:
        """`resolve` gives the buffer's present endpoint; `run` is the wire id of the run."""
        self._settings = settings
        self._run_seed = run_seed
        self._heartbeat_s = heartbeat_s
        self._client = BufferClient(resolve, run=run, role="filter", name=name, keys=keys)
        self._meters = Meters("filter", name, time.monotonic(), Usage().read)

    async def run(self) -> None:
        """Decides groups until the run is done.

        Raises:
            Fenced: this life is over; the process must end.
            PeerSilent: the buffer has not answered for long.
        """
        await self._client.connect()
        tasks = {asyncio.create_task(self._decide()), asyncio.create_task(self._beat())}
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        except (Fenced, PeerSilent):
            raise
        except Exception as error:  # the one boundary: the buffer must not take this end for a good one
            with contextlib.suppress(Refused, PeerSilent):
                await self._client.failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

    async def _decide(self) -> NoReturn:
        while True:
            self._meters.clock.enter("starved", time.monotonic(), "finished group")
            headers = await self._client.next_group(WAIT_S)
            self._meters.clock.enter("busy", time.monotonic())
            if headers is None:
                continue
            decision = select(headers, self._settings, self._run_seed)
            self._meters.clock.enter("blocked", time.monotonic(), "buffer to record a decision")
            await self._client.decide(decision)
            measure(self._meters, headers, decision)

    async def _beat(self) -> None:
        """Tells the figures; returns when the run is done."""
        while True:
            state = await self._client.heartbeat(self._meters.snapshot(time.monotonic()))
            if state == "done":
                return
            await asyncio.sleep(self._heartbeat_s)


def measure(meters: Meters, headers: GroupHeaders, decision: Decision) -> None:
    """Count a decision, and the penalties of right rollouts before and after it."""
    meters.count(f"groups_dropped/{decision.drop_reason}" if decision.drop_reason else "groups_kept")
    meters.count("rollouts_seen", len(headers.rollouts))
    meters.count("rollouts_absent", headers.num_rollouts - len(headers.rollouts))
    meters.count("rollouts_kept", len(decision.keep))
    for finish, p_err, p_format in zip(headers.rollouts, decision.p_err, decision.p_format, strict=True):
        if finish.reward > 0:
            sides = ("right", "right_kept") if finish.rollout in decision.keep else ("right",)
            for side in sides:
                meters.count(f"rollouts_{side}")
                meters.observe(f"p_err_{side}", p_err, edges=PENALTY_EDGES)
                meters.observe(f"p_format_{side}", p_format, edges=PENALTY_EDGES)
