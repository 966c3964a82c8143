"""How many more rollouts an engine takes: as many as its KV cache will hold, by measured lengths.

Consumes    rollouts admitted, their growth, their ends; the KV cache's size in tokens
Produces    `room()`: rollouts that may be leased now
Waits for   nothing: a pure state machine without clocks
Invariant   what an ended rollout held is free again, however it ended; at most `concurrency` run; an idle engine takes
            at least one; more held, or longer rollouts seen, never make more room

The forecast. Let all running rollouts grow by s tokens. One that holds c tokens is then still running with probability
P(length > c + s | length > c), and holds c + s. The sum of these expectations, plus a margin of `DEVIATIONS` standard
deviations, must stay within the cache for every s up to the longest possible rollout. Reserving the longest length for
a rollout's whole life, as is commonly done, is the special case in which nothing has been measured yet: the lengths
that count are the last `WINDOW` ended ones and, always, one rollout of the greatest length that settings allow.

Example, a cache of 8192 tokens and rollouts of at most 1024: 8 at first; with measured lengths of about 200, 40.
"""

from collections import deque
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

__all__ = ["KvScheduler"]

WINDOW = 512
"""Ended rollouts whose lengths count: a few steps' worth, so that the forecast follows training."""
STEPS = 32
"""Intervals of s; within each, all who live at its start are taken to hold what they would at its end."""
DEVIATIONS = 2.0
"""Margin. Exceeding the cache is not fatal (the engine evicts and recomputes), so a rare excess is allowed."""

Floats = npt.NDArray[np.float64]


class KvScheduler:
    """Admission of one engine."""

    def __init__(self, *, capacity_tokens: int, max_length: int, concurrency: int, block_tokens: int = 1) -> None:
        if capacity_tokens < max_length:
            raise ValueError(
                f"the KV cache holds {capacity_tokens} tokens, less than one rollout of rollout.max_length = "
                f"{max_length}: raise rollout.kv_cache_mib or lower rollout.max_length to {capacity_tokens}"
            )
        self._capacity = capacity_tokens
        self._max_length = max_length
        self._concurrency = concurrency
        self._slack = (block_tokens - 1) / 2  # a rollout's last block is half empty on average
        self._held: dict[Hashable, int] = {}
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._prompts: deque[int] = deque(maxlen=WINDOW)
        self._sorted: Floats = np.array([float(max_length)])
        self._edges: Floats = max_length * np.linspace(0.0, 1.0, STEPS + 1) ** 2  # finer where most rollouts end

    def allow(self, concurrency: int) -> None:
        """At most so many from now on; those that run beyond it go on to their ends."""
        self._concurrency = concurrency

    @property
    def running(self) -> int:
        return len(self._held)

    @property
    def held_tokens(self) -> int:
        """Tokens of the running rollouts' contexts, as last told."""
        return sum(self._held.values())

    def admit(self, key: Hashable, prompt_tokens: int) -> None:
        """A rollout begins with this context."""
        if key in self._held:
            raise ValueError(f"rollout {key} is running already")
        self._held[key] = prompt_tokens
        self._prompts.append(prompt_tokens)

    def grow(self, key: Hashable, context_tokens: int) -> None:
        """A running rollout's context is now this long."""
        if key not in self._held:
            raise ValueError(f"rollout {key} is not running")
        self._held[key] = context_tokens

    def release(self, key: Hashable, *, completed: bool) -> None:
        """A rollout has ended; its length is measured if it ran to its own end (one cut off says too little)."""
        length = self._held.pop(key)
        if completed:
            self._lengths.append(length)
            self._sorted = np.sort(np.array([*self._lengths, self._max_length], dtype=np.float64))

    def room(self) -> int:
        """Rollouts that may be leased now."""
        free = self._concurrency - len(self._held)
        if free <= 0:
            return 0
        if self._concurrency * (self._max_length + self._slack) <= self._capacity:
            return free  # the cache cannot be what is short
        mean, variance = self._forecast(np.array(list(self._held.values()), dtype=np.float64))
        prompt = float(np.mean(self._prompts)) if self._prompts else 0.0
        one_mean, one_variance = self._forecast(np.array([prompt]))
        low, high = 0, free  # the forecast grows with the number taken, so the largest that fits is found by halving
        while low < high:
            middle = (low + high + 1) // 2
            need = mean + middle * one_mean + DEVIATIONS * np.sqrt(variance + middle * one_variance)
            low, high = (middle, high) if float(need.max()) <= self._capacity else (low, middle - 1)
        return max(low, 0 if self._held else 1)

    def _forecast(self, held: Floats) -> tuple[Floats, Floats]:
        """Mean and variance of the tokens that these rollouts hold, in each interval of growth. [STEPS] each"""
        later = np.minimum(held[:, None] + self._edges[None, :], self._max_length)  # [N, STEPS + 1]
        alive = self._survivors(later[:, :-1]) / self._survivors(np.minimum(held, self._max_length))[:, None]
        size = later[:, 1:] + self._slack
        return (size * alive).sum(axis=0), (size * size * alive * (1.0 - alive)).sum(axis=0)

    def _survivors(self, tokens: Floats) -> Floats:
        """How many measured lengths are at least this; never 0, because the greatest length is among them."""
        return (len(self._sorted) - np.searchsorted(self._sorted, tokens, side="left")).astype(np.float64)
