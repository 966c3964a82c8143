"""Leases: which rollout of a ticketed group is in whose hands, in which attempt, until when.

Consumes    groups to work on, requests of engines (name, epoch, loaded version), heartbeats, finished and excluded
            rollouts, lost engines, the time as an argument
Produces    (group, rollout, attempt) grants; complete and timed-out groups; refusals of late messages
Waits for   nothing: a pure state machine
Invariant   a rollout is in at most one pair of hands, its attempt number never repeats; base and deadline of a group
            never change; a train rollout goes only to an engine whose loaded version >= base, an evaluation rollout
            only to one whose loaded version is exactly the one evaluated

Example, 2 rollouts per group: engine a is granted (7, 0, attempt 1) and (7, 1, attempt 1), finishes (7, 0) and dies;
`release_engine` makes (7, 1) wait again; engine b is granted (7, 1, attempt 2); what a still sends is fenced.

The shell keeps on disk: a `RolloutState` per rollout that was ever granted, written with the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from buffer.membership import StoppableClock
from buffer.schema import Kind, RolloutKey
from buffer.tickets import FencedError, LedgerError

Hold: TypeAlias = Literal["waiting", "leased", "done", "excluded"]


@dataclass(kw_only=True, slots=True)
class RolloutState:
    """Where one rollout stands; engine and epoch say who has it while it is leased."""

    group: int
    rollout: int
    hold: Hold = "waiting"
    attempt: int = 0
    """of the newest grant; 0 before the first"""
    engine: str = ""
    epoch: int = -1
    expires_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Group:
    group: int
    base: int
    deadline: int
    kind: Kind
    rollouts: list[RolloutState]
    first_leased_s: float | None = None
    """on the clock that stops while no engine is live"""
    num_waiting: int = 0

    @property
    def num_open(self) -> int:
        return sum(r.hold in ("waiting", "leased") for r in self.rollouts)

    def may_go_to(self, loaded: int) -> bool:
        return loaded == self.base if self.kind == "eval" else loaded >= self.base


def worth_closing(rewards: Sequence[float], group_size: int) -> bool:
    """Whether a stuck group is closed with the rollouts it has, whose rewards these are; else it is dropped."""
    return len(rewards) >= group_size and len(set(rewards)) > 1


class Leases:
    """The rollouts of all open groups."""

    def __init__(self, num_rollouts: int, lease_s: float, group_timeout_s: float) -> None:
        """`num_rollouts` of a train group (2G); `lease_s` until a lease that is not renewed is over."""
        self.num_rollouts = num_rollouts
        self.lease_s = lease_s
        self.group_timeout_s = group_timeout_s
        self._groups: dict[int, _Group] = {}
        self._clock = StoppableClock()

    def open(self, group: int, base: int, deadline: int, kind: Kind, num_rollouts: int | None = None) -> None:
        """Offer a group. `num_rollouts` None: that of a train group, one for an evaluation (base: its version)."""
        if group in self._groups:
            raise LedgerError(f"group {group} is open already; group numbers of both kinds share one space")
        count = num_rollouts or (1 if kind == "eval" else self.num_rollouts)
        rollouts = [RolloutState(group=group, rollout=i) for i in range(count)]
        self._groups[group] = _Group(
            group=group, base=base, deadline=deadline, kind=kind, rollouts=rollouts, num_waiting=count
        )

    def restore(self, states: Iterable[RolloutState], now_s: float) -> None:
        """Put the rollouts of groups opened before to where they stood on disk; others wait.

        Leases run anew from `now_s`, and so does the timeout of each group that had a lease.
        """
        self._clock.advance(now_s, False)
        for state in states:
            group = self._groups.get(state.group)
            if group is None or state.rollout >= len(group.rollouts):
                raise LedgerError(f"group {state.group}, rollout {state.rollout}: on disk, but the group is not open")
            group.rollouts[state.rollout] = replace(state, expires_s=now_s + self.lease_s)
            if state.attempt > 0 and group.first_leased_s is None:
                group.first_leased_s = self._clock.total_s

    @property
    def groups(self) -> list[int]:
        return list(self._groups)

    def state(self, group: int, rollout: int) -> RolloutState | None:
        """Where a rollout stands, for the shell's row; None when its group is not open."""
        found = self._groups.get(group)
        return found.rollouts[rollout] if found is not None and 0 <= rollout < len(found.rollouts) else None

    def num_waiting(self, loaded: int) -> int:
        """Rollouts that an engine with this loaded version could be granted now."""
        return sum(g.num_waiting for g in self._groups.values() if g.may_go_to(loaded))

    def held_by(self, engine: str) -> list[RolloutKey]:
        return [(r.group, r.rollout) for r in self._leased() if r.engine == engine]

    def grant(
        self,
        engine: str,
        epoch: int,
        loaded: int,
        want: int,
        now_s: float,
        num_bytes: Callable[[int, int], int] = lambda group, rollout: 0,
        max_bytes: int = 0,
    ) -> list[tuple[int, int, int]]:
        """Up to `want` waiting rollouts as (group, rollout, attempt), whose `num_bytes` of durable turns sum to no more
        than `max_bytes`, the first excepted: all are told in one message.

        Earliest deadline first; then the group with the fewest rollouts open, which completes soonest; then the oldest.
        """
        groups = [g for g in self._groups.values() if g.num_waiting and g.may_go_to(loaded)]
        granted: list[tuple[int, int, int]] = []
        total_bytes = 0
        for group in sorted(groups, key=lambda g: (g.deadline, g.num_open, g.group)):
            for state in group.rollouts:
                if len(granted) >= want:
                    return granted
                if state.hold == "waiting":
                    total_bytes += num_bytes(state.group, state.rollout)
                    if granted and total_bytes > max_bytes:
                        return granted
                    self._give(group, state, engine, epoch, now_s)
                    granted.append((state.group, state.rollout, state.attempt))
        return granted

    def _give(self, group: _Group, state: RolloutState, engine: str, epoch: int, now_s: float) -> None:
        state.hold, state.engine, state.epoch = "leased", engine, epoch
        group.num_waiting -= 1
        state.attempt += 1
        state.expires_s = now_s + self.lease_s
        if group.first_leased_s is None:
            group.first_leased_s = self._clock.total_s

    def renew(self, engine: str, epoch: int, keys: Iterable[RolloutKey], now_s: float) -> list[RolloutKey]:
        """The engine still works on these. Returns those that are not its own any more: it stops them."""
        lost: list[RolloutKey] = []
        for group, rollout in keys:
            state = self.state(group, rollout)
            if state is None or state.hold != "leased" or (state.engine, state.epoch) != (engine, epoch):
                lost.append((group, rollout))
            else:
                state.expires_s = now_s + self.lease_s
        return lost

    def check(self, group: int, rollout: int, attempt: int, engine: str, epoch: int) -> None:
        """Whether a turn, a finish or an exclusion may be heard.

        Raises:
            FencedError: the group is closed, or the rollout is not in these hands in this attempt.
        """
        self._held(group, rollout, attempt, engine, epoch)

    def done(self, group: int, rollout: int, attempt: int, engine: str, epoch: int) -> bool:
        """The rollout has its score. Returns whether the group is complete."""
        self._held(group, rollout, attempt, engine, epoch).hold = "done"
        return self.is_complete(group)

    def excluded(self, group: int, rollout: int, attempt: int, engine: str, epoch: int) -> bool:
        """The rollout can't be finished, and not by the model's fault. Returns whether the group is complete."""
        self._held(group, rollout, attempt, engine, epoch).hold = "excluded"
        return self.is_complete(group)

    def is_complete(self, group: int) -> bool:
        """Every rollout is done or excluded."""
        found = self._groups.get(group)
        return found is not None and found.num_open == 0

    def release_engine(self, engine: str, epoch: int | None = None) -> list[RolloutKey]:
        """The engine's life (or every life of it) is over: what it had waits for another."""
        return self._free(r for r in self._leased() if r.engine == engine and epoch in (None, r.epoch))

    def expired(self, now_s: float) -> list[RolloutKey]:
        """Rollouts whose lease nobody renewed in time; they wait again."""
        return self._free(r for r in self._leased() if r.expires_s < now_s)

    def timed_out(self, now_s: float, engine_live: bool) -> list[int]:
        """Incomplete groups leased first more than `group_timeout_s` ago; time without a live engine does not count.

        `engine_live` describes the time since the last call: called at each tick and when the first engine becomes
        live or the last one ceases to be. The shell closes these groups (`worth_closing`).
        """
        total_s = self._clock.advance(now_s, engine_live)
        late = (g for g in self._groups.values() if g.num_open and g.first_leased_s is not None)
        return [g.group for g in late if total_s - (g.first_leased_s or 0.0) > self.group_timeout_s]

    def close(self, group: int) -> list[int]:
        """The group is over for the engines: what still comes is fenced. Returns the rollouts that are done."""
        found = self._groups.pop(group, None)
        return [] if found is None else [r.rollout for r in found.rollouts if r.hold == "done"]

    def _leased(self) -> list[RolloutState]:
        return [r for g in self._groups.values() for r in g.rollouts if r.hold == "leased"]

    def _free(self, states: Iterable[RolloutState]) -> list[RolloutKey]:
        freed = list(states)
        for state in freed:
            state.hold, state.engine, state.epoch = "waiting", "", -1
            self._groups[state.group].num_waiting += 1
        return [(state.group, state.rollout) for state in freed]

    def _held(self, group: int, rollout: int, attempt: int, engine: str, epoch: int) -> RolloutState:
        state = self.state(group, rollout)
        who = f"group {group}, rollout {rollout}, attempt {attempt} of {engine} in epoch {epoch}"
        if state is None:
            raise FencedError(f"{who}: the group is closed; drop the rollout")
        if state.hold != "leased" or (state.engine, state.epoch, state.attempt) != (engine, epoch, attempt):
            holder = f" by {state.engine} in epoch {state.epoch}" if state.hold == "leased" else ""
            raise FencedError(f"{who}: it is {state.hold}{holder}, attempt {state.attempt}; drop the rollout")
        return state
