"""A small event loop over epoll: descriptors and points in time, each with what to do.

Consumes    descriptors, deadlines
Produces    calls of the given functions
Waits for   readiness of a descriptor or the next deadline
Invariant   single-threaded; a function registered for a closed descriptor is never called
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Loop:
    """Descriptors and timers of one process."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = itertools.count()

    def watch(self, fd: int, action: Callable[[], None], events: int = IN) -> None:
        """Call `action` whenever `fd` is ready (or hung up)."""
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = action

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; to be called before it is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` once, `delay_s` from now. There is no cancelling: the action looks whether it still applies."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), action))

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self._fire()
            timeout_s = self._timers[0][0] - time.monotonic() if self._timers else None
            for fd, _ in self._epoll.poll(None if timeout_s is None else max(timeout_s, 0.0)):
                action = self._watched.get(fd)
                if action is not None:
                    action()

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
