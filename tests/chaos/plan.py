"""What chaos does, to whom and when: a pure function of the seed.

Consumes    a seed, the roles, the mean gap
Produces    blows without end; every len(roles) + 1 of them hold one kill of each role
Waits for   nothing
Invariant   the same arguments give the same blows, however many are asked for and however the run goes
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

ROLES = ("sandbox", "rollout", "filter", "buffer", "learner")

Kind = Literal["kill", "stop", "pause", "cut", "child"]
EXTRAS: tuple[Kind, ...] = ("stop", "pause", "cut", "child")

SHORT_GAP_SHARE = 0.15
SHORT_GAP_S = (1.0, 3.0)
"""Some blows fall while the one before is still being made up for."""
PAUSE_S = (0.5, 20.0)
"""Some pauses end before the stopped process counts as dead, some after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """kill: SIGKILL of the role's process. stop: SIGSTOP for good. pause: SIGSTOP, later SIGCONT. cut: its connections
    to the buffer are reset. child: SIGKILL of one of its descendants.
    """

    number: int
    gap_s: float
    """after the blow before, or after the run's first turn"""
    role: str
    kind: Kind
    pause_s: float
    """of a pause"""
    pick: float
    """in [0, 1): which of several processes"""


def plan(seed: int, roles: Sequence[str] = ROLES, *, gap_s: float = 20.0) -> Iterator[Blow]:
    """Blows in order, without end."""
    dice = random.Random(seed)
    number = 0
    while True:
        kills: list[tuple[str, Kind]] = [(role, "kill") for role in roles]
        dice.shuffle(kills)
        kills.insert(dice.randrange(len(kills) + 1), (dice.choice(roles), dice.choice(EXTRAS)))
        for role, kind in kills:
            short = dice.random() < SHORT_GAP_SHARE
            yield Blow(
                number=number,
                gap_s=dice.uniform(*SHORT_GAP_S) if short else gap_s * dice.uniform(0.5, 1.5),
                role=role,
                kind=kind,
                pause_s=dice.uniform(*PAUSE_S),
                pick=dice.random(),
            )
            number += 1
