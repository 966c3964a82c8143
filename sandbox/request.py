"""What a client asked for and has no answer to yet.

Consumes    the message of a call or of an answer to grade
Produces    a future of its outcome
Waits for   nothing itself
Invariant   at most one node has it at a time
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sandbox.api import Result, Verdict
from sandbox.node import Node


class CheckFailed(RuntimeError):
    """No node could grade an answer: an infrastructure failure; the rollout is excluded, not wrong."""


@dataclass(slots=True, eq=False)
class Request:
    """Something asked for and not answered."""

    id: str
    kind: str
    fields: list[Any]
    future: asyncio.Future[Result | Verdict]
    tries: int = 0
    node: Node | None = None
    avoid: Node | None = None
    home: Node | None = None
    """The node that alone can answer: the one where its session lives."""
    served: Node | None = None
    """The node that answered."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
