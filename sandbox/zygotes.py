"""The zygotes of one supervisor: one per profile, and a standby of each where there are cores to keep one warm.

Consumes    the profiles that are asked for; the start and the death of zygotes
Produces    the zygote to run in; word of the calls that died with one
Waits for   the start of a zygote, which warms up for a second
Unblocked by a standby, which takes a dead one's place at once
Invariant   a profile has one zygote in use; one that keeps dying is started once a second, one that dies before it is
            warm after ever longer, and MAX_STARTS of those in a row mean that none can be had here any more
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from sandbox.cgroup import Groups
from sandbox.jail import JailPlan
from sandbox.loop import Loop
from sandbox.slots import Occupant, Slots

_RESTART_S = 1.0
MAX_STARTS = 4
"""Starts in a row that come to nothing."""


class Zygotes:
    """Zygotes by profile."""

    def __init__(
        self,
        loop: Loop,
        plan: JailPlan,
        groups: Groups | None,
        max_slots: int,
        *,
        standby: bool,
        on_ready: Callable[[str], None],
        on_free: Callable[[], None],
        on_lost: Callable[[Slots, list[Occupant]], None],
    ) -> None:
        """Nothing runs yet.

        Args:
            on_ready: one can be used, or (with the reason) none can ever be.
            on_free: a slot is free again.
            on_lost: one that was in use died, with what was in its slots; another takes its place.
        """
        self._loop, self._plan, self._groups, self._max_slots = loop, plan, groups, max_slots
        self._wants_standby = standby
        self._on_ready, self._on_free, self._on_lost = on_ready, on_free, on_lost
        self._used: dict[str, Slots] = {}
        self._standby: dict[str, Slots] = {}
        self._restarted_s = 0.0
        self._failed_starts = 0

    def of(self, profile: str) -> Slots:
        """The zygote of a profile; it may still be warming up."""
        if profile not in self._used:
            self._used[profile] = self._start(profile)
        return self._used[profile]

    def _start(self, profile: str) -> Slots:
        plan = self._plan
        if profile == "sci" and plan.first_uid:  # the two zygotes of a shard share its uids
            plan = JailPlan(full=plan.full, first_uid=plan.first_uid + plan.uids // 2, uids=plan.uids // 2)
        return Slots(
            self._loop,
            plan,
            profile,
            self._groups,
            self._max_slots,
            on_ready=self._started,
            on_free=self._on_free,
            on_lost=self._lost,
        )

    def _started(self, zygote: Slots, missing: str) -> None:
        self._failed_starts = 0
        if self._used.get(zygote.profile) is zygote:
            self._want_standby(zygote.profile)
            self._on_ready(missing)

    def _want_standby(self, profile: str) -> None:
        if self._wants_standby and profile not in self._standby:
            self._standby[profile] = self._start(profile)

    def _lost(self, zygote: Slots, occupants: list[Occupant]) -> None:
        profile = zygote.profile
        if not zygote.started:
            self._failed_starts += 1
        if self._failed_starts >= MAX_STARTS:
            self._on_ready(f"{MAX_STARTS} zygotes in a row ended before they were warm; their messages are in the log")
            return
        delay_s = _RESTART_S if time.monotonic() - self._restarted_s < _RESTART_S else 0.0
        if self._failed_starts:
            delay_s = _RESTART_S * 2 ** (self._failed_starts - 1)
        self._restarted_s = time.monotonic()
        if self._standby.get(profile) is zygote:
            del self._standby[profile]
            self._loop.after(max(delay_s, _RESTART_S), functools.partial(self._want_standby, profile))
            return
        standby = self._standby.pop(profile, None)
        if standby is not None:
            self._used[profile] = standby
            self._loop.after(delay_s, functools.partial(self._want_standby, profile))
        else:
            self._loop.after(delay_s, functools.partial(self._restart, profile))
        self._on_lost(zygote, occupants)

    def _restart(self, profile: str) -> None:
        self._used[profile] = self._start(profile)

    def close(self) -> None:
        """End them all."""
        for zygote in (*self._used.values(), *self._standby.values()):
            zygote.close()
