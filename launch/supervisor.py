"""Which roles are well: what the driver does about each, decided from what it saw.

Consumes    answers of the roles to `poll` (None: no answer; GONE: Ray has no process for it), heartbeats as the
            buffer saw them, the time
Produces    `Kill`s and at most one `GiveUp`
Waits for   nothing: a pure state machine
Invariant   a role that starts is given run.start_timeout_s, without the time that it waits for another role; one that
            hangs longer is ended, which counts as a failure. One that ran is given buffer.dead_after_s, its heartbeat
            PULSE_PATIENCE times that from this life's first one on. One that fails MAX_FAILURES times without having
            run for WELL_AFTER_S in between ends the run, and so does one that never answers, or that Ray has not
            started again for buffer.dead_after_s
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GONE = "gone"
"""A state: the process ended, and Ray starts no other. For a moment it may be told of one that Ray does start again."""
MAX_FAILURES = 4
WELL_AFTER_S = 60.0
PULSE_PATIENCE = 3.0
"""A process that answers the driver but not the buffer may be inside a long call: it is given more time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End the role's process; Ray starts another."""

    name: str
    pid: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """The run has failed."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What the buffer knows of a peer's heartbeat."""

    epoch: int
    """life of the peer, as the buffer counts them"""
    age_s: float


@dataclass(kw_only=True, slots=True)
class _Watched:
    since_s: float
    """when this life was first seen, or asked for"""
    heard_s: float
    pid: int = 0
    answered: bool = False
    """this life has: there is a process to end"""
    state: str = "starting"
    epoch: int = 0
    """newest that the buffer told"""
    epoch_before: int = 0
    """that of the life before this one"""
    failures: int = 0
    failed_pid: int = 0
    error: str = ""
    gone_since_s: float | None = None


class Supervisor:
    """The roles of one run.

    Example:
        actions = supervisor.observe({"rollout-0": None}, {"rollout-0": Pulse(epoch=3, age_s=12.0)}, now_s=100.0)
    """

    def __init__(self, names: Iterable[str], *, start_timeout_s: float, dead_after_s: float, now_s: float) -> None:
        self._roles = {name: _Watched(since_s=now_s, heard_s=now_s) for name in names}
        self._start_timeout_s, self._dead_after_s = start_timeout_s, dead_after_s

    def observe(
        self, polls: Mapping[str, Mapping[str, Any] | None], pulses: Mapping[str, Pulse], *, now_s: float
    ) -> list[Kill | GiveUp]:
        """What to do now. `pulses` is empty while the buffer is away."""
        actions: list[Kill | GiveUp] = []
        for name, poll in polls.items():
            role = self._roles[name]
            if poll is not None and poll["state"] == GONE:
                role.gone_since_s = now_s if role.gone_since_s is None else role.gone_since_s
            elif poll is not None:
                self._hear(role, poll, now_s)
            pulse = pulses.get(name)
            action = self._judge(name, role, pulse, now_s)
            if pulse is not None:
                role.epoch = pulse.epoch
            if action is not None:
                actions.append(action)
        return actions

    def states(self) -> dict[str, str]:
        """By name: starting, waiting (started, for another role's first word), running, ended or failed."""
        return {name: role.state for name, role in self._roles.items()}

    def ended(self, role: str) -> bool:
        """All of a role's bodies have come to their end."""
        return all(watched.state == "ended" for name, watched in self._roles.items() if name.startswith(f"{role}-"))

    def starting(self) -> list[str]:
        return [name for name, role in self._roles.items() if role.state in ("starting", "waiting", "failed")]

    def _hear(self, role: _Watched, poll: Mapping[str, Any], now_s: float) -> None:
        role.gone_since_s = None
        if poll["pid"] != role.pid:
            role.pid, role.state, role.epoch_before = poll["pid"], "starting", role.epoch
            role.since_s = role.heard_s = now_s
        if poll["state"] == "running" and role.state != "running":
            role.since_s = now_s
        if poll["state"] == "waiting":
            role.since_s += now_s - role.heard_s  # that other role has a deadline of its own
        role.heard_s, role.state, role.answered = now_s, poll["state"], True
        if role.state == "running" and now_s - role.since_s > WELL_AFTER_S:
            role.failures = 0
        if role.state == "failed" and role.failed_pid != role.pid:
            role.failures, role.failed_pid, role.error = role.failures + 1, role.pid, poll["error"]

    def _judge(self, name: str, role: _Watched, pulse: Pulse | None, now_s: float) -> Kill | GiveUp | None:
        if role.failures >= MAX_FAILURES:
            return GiveUp(reason=f"{name} failed {role.failures} times, the last time with {role.error}")
        if role.gone_since_s is not None and role.state != "ended" and now_s - role.gone_since_s > self._dead_after_s:
            return GiveUp(
                reason=f"{name} is not started again: run.max_restarts is used up; it ended with "
                f"{role.error or 'no word'}"
            )
        if role.state in ("starting", "waiting") and now_s - role.since_s > self._start_timeout_s:
            return self._late(name, role, now_s)
        if role.state != "running":
            return None
        unheard_s = now_s - role.heard_s
        if unheard_s > self._dead_after_s:
            return self._kill(name, role, f"has not answered the driver for {unheard_s:.1f} s", now_s)
        if pulse is not None and pulse.epoch > role.epoch_before and pulse.age_s > PULSE_PATIENCE * self._dead_after_s:
            return self._kill(name, role, f"has sent the buffer no heartbeat for {pulse.age_s:.1f} s", now_s)
        return None

    def _late(self, name: str, role: _Watched, now_s: float) -> Kill | GiveUp:
        reason = f"has not started in run.start_timeout_s = {self._start_timeout_s:g} s"
        if not role.answered:
            return GiveUp(reason=f"{name} {reason}: no process of it has answered")
        role.failures, role.failed_pid, role.error = role.failures + 1, role.pid, f"a start that hung: it {reason}"
        return self._kill(name, role, reason, now_s)

    def _kill(self, name: str, role: _Watched, reason: str, now_s: float) -> Kill:
        role.state, role.since_s, role.heard_s, role.epoch_before = "starting", now_s, now_s, role.epoch
        role.answered = False
        return Kill(name=name, pid=role.pid, reason=reason)
