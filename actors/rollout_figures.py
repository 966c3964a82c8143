"""What a rollout actor measures: of its turns, its rollouts, its engine's rate at each concurrency, its swaps.

Consumes    turns, outcomes, generations, occupancy
Produces    figures in `Meters`
Waits for   nothing but the engine whose generations it measures
Invariant   the engine's capacity is read from rate(concurrency), never from busy time: an engine batches, so it is busy
            long before it is full

The rate curve: a generation of n tokens that took t seconds, while c generations ran on average, adds n to
`rate_tokens@c` and t to `rate_s@c` (c rounded to a power of the square root of 2). At c the engine makes
c * rate_tokens@c / rate_s@c tokens per second.
"""

import math
import time
from collections.abc import Sequence

from actors.engine import Engine, Generation, Occupancy
from buffer.meters import Meters
from buffer.schema import Excluded, Finish, Turn

__all__ = ["MeteredEngine", "count_outcome", "count_swap", "count_turn", "show_occupancy"]

TOKEN_EDGES = tuple(float(2**i) for i in range(4, 18))


class MeteredEngine:
    """An engine whose generations are measured."""

    def __init__(self, engine: Engine, meters: Meters) -> None:
        self._engine, self._meters = engine, meters
        self._running = 0
        self._integral = 0.0
        """of running generations over time"""
        self._since_s = time.monotonic()

    async def generate(
        self, context: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float | None = None
    ) -> Generation:
        started_s, before = self._change(+1)
        try:
            generation = await self._engine.generate(
                context, max_new_tokens=max_new_tokens, stop_ids=stop_ids, temperature=temperature
            )
        finally:
            ended_s, after = self._change(-1)
        concurrency = (after - before) / max(ended_s - started_s, 1e-9)
        bucket = near_power(concurrency)
        self._meters.count(f"rate_tokens@{bucket}", len(generation.token_ids))
        self._meters.count(f"rate_s@{bucket}", ended_s - started_s)
        self._meters.count("context_tokens", len(context))
        self._meters.count("context_tokens_cached", generation.cached_tokens)
        return generation

    def _change(self, by: int) -> tuple[float, float]:
        now_s = time.monotonic()
        self._integral += self._running * (now_s - self._since_s)
        self._since_s = now_s
        self._running += by
        return now_s, self._integral


def near_power(concurrency: float) -> int:
    """The power of the square root of 2 that is nearest, as a whole number: 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, ..."""
    return round(2 ** (round(2 * math.log2(max(concurrency, 1.0))) / 2))


def count_turn(meters: Meters, turn: Turn) -> None:
    """A turn that was just made."""
    meters.count("turns")
    meters.count("tokens_generated", len(turn.output_ids))
    meters.observe("generate_s", turn.generate_s)
    meters.observe("turn_tokens", len(turn.output_ids), edges=TOKEN_EDGES)
    if len(turn.version_runs) > 1:
        meters.count("turns_of_several_versions")
    if turn.status:
        meters.count(f"calls/{turn.status}")
        meters.observe("tool_queue_s", turn.tool_queue_s)
        meters.observe("tool_run_s", turn.tool_run_s)


def count_outcome(meters: Meters, outcome: Finish | Excluded) -> None:
    """A rollout whose outcome is durable."""
    if isinstance(outcome, Excluded):
        meters.count("rollouts_excluded")
        meters.count(f"excluded/{outcome.reason}")
        return
    meters.count("rollouts_finished")
    meters.count(f"ended/{outcome.end}")
    meters.count(f"verdict/{outcome.verdict}")
    meters.observe("rollout_tokens", outcome.num_tokens, edges=TOKEN_EDGES)
    meters.observe("tool_s", outcome.tool_s)


def count_swap(meters: Meters, version: tuple[int, int], receive_s: float, pause_s: float) -> None:
    """A version that was just loaded."""
    meters.count("swaps")
    meters.observe("receive_s", receive_s)
    meters.observe("pause_s", pause_s)
    meters.gauge("lineage", version[0])
    meters.gauge("version", version[1])


def show_occupancy(meters: Meters, occupancy: Occupancy) -> None:
    """How full the engine says it is."""
    meters.gauge("requests_running", occupancy.running)
    meters.gauge("requests_waiting", occupancy.waiting)
    meters.gauge("kv_tokens", occupancy.kv_tokens)
    meters.gauge("kv_capacity_tokens", occupancy.kv_capacity_tokens)
