"""Who speaks: one entry per name, its present life (epoch), what it last said.

Consumes    HELLO, heartbeats, the time as an argument
Produces    the epoch of a life; refusals of earlier lives and of strangers
Waits for   nothing
Invariant   an epoch is durable before it is told; it only grows; a life that was declared dead is not heard again
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from buffer.journal import Statement
from buffer.wire import Hello, Reason, Refusal

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(-[a-z0-9]{1,16})?")
LEADER = "learner-0"
"""the learner's rank 0, which alone publishes, and puts checkpoints on record"""
MAX_PEERS = 4096
MAX_GRANTS = 64
"""requests of a peer whose leases are remembered: as many as its window holds"""
ROLES = ("rollout", "filter", "learner", "sandbox", "driver", "monitor", "buffer")


@dataclass(kw_only=True, slots=True)
class Peer:
    """One name and its present life."""

    name: str
    role: str
    epoch: int
    life: str
    state: str = "alive"
    """alive | dead | gone (BYE) | failed | replaced (by a new life; this one is not listed any more)"""
    error: str = ""
    """why it failed, in its own words"""
    heard_s: float = 0.0
    unlogged: bool = False
    """its snapshot is not in metrics/ yet"""
    snapshot: dict[str, Any] = field(default_factory=dict)
    granted: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """what recent lease requests, by seq, were answered: a request sent again gets the same"""

    offers_seen: int = -1
    """RunState.offers when a lease request of it found nothing"""

    def row(self, unix_s: float) -> Statement:
        return (
            "INSERT INTO peers (name, role, epoch, life, hello_unix_s, state) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET role = excluded.role, epoch = excluded.epoch, life = excluded.life, "
            "hello_unix_s = excluded.hello_unix_s, state = excluded.state, loaded_lineage = -1, loaded_version = -1",
            (self.name, self.role, self.epoch, self.life, unix_s, self.state),
        )

    def remember_grant(self, seq: int, granted: list[tuple[int, int, int]]) -> None:
        self.granted[seq] = granted
        while len(self.granted) > MAX_GRANTS:
            del self.granted[min(self.granted)]


class Peers:
    """All names that ever said HELLO."""

    def __init__(self) -> None:
        self.by_name: dict[str, Peer] = {}

    def hello(self, hello: Hello, now_s: float) -> tuple[Peer, bool]:
        """The peer's entry, and whether a new life began (else its HELLO was sent twice).

        Raises:
            Refusal: a name or role that can't be, or too many names.
        """
        if not NAME.fullmatch(hello.name) or hello.role not in ROLES or not 8 <= len(hello.life) <= 64:
            raise Refusal(
                Reason.NOT_ALLOWED, f"role {hello.role[:40]!r}, name {hello.name[:40]!r}: expected ROLE-N of {ROLES}"
            )
        before = self.by_name.get(hello.name)
        if before is not None and before.life == hello.life:
            if before.state != "alive":
                raise Refusal(Reason.FENCED, f"{before.name}: this life is {before.state}; start a new process")
            return before, False
        if before is None and len(self.by_name) >= MAX_PEERS:
            raise Refusal(Reason.NOT_ALLOWED, f"{MAX_PEERS} names are known already")
        epoch = before.epoch + 1 if before is not None else 1
        peer = Peer(name=hello.name, role=hello.role, epoch=epoch, life=hello.life, heard_s=now_s)
        self.by_name[hello.name] = peer
        return peer, True

    def check(self, name: str, epoch: int) -> Peer:
        """The living peer of this name and epoch.

        Raises:
            Refusal: a stranger, or a life that is over.
        """
        peer = self.by_name.get(name)
        if peer is None:
            raise Refusal(Reason.FENCED, f"{name[:40]!r} is unknown here: say HELLO")
        if peer.epoch != epoch or peer.state != "alive":
            raise Refusal(
                Reason.FENCED,
                f"{name}: epoch {epoch} is over (epoch {peer.epoch} is {peer.state}); end this process, a new life "
                "may say HELLO",
            )
        return peer

    def leader(self, lineage: int) -> Peer | None:
        """Rank 0 of the learner while the life goes on whose versions have this lineage; other ranks count lives of
        their own.
        """
        peer = self.by_name.get(LEADER)
        return peer if peer is not None and peer.state == "alive" and peer.epoch == lineage else None

    def living(self, role: str) -> list[Peer]:
        return [peer for peer in self.by_name.values() if peer.role == role and peer.state == "alive"]

    def silent(self, dead_after_s: float, now_s: float) -> list[Peer]:
        """Living peers not heard for longer than `dead_after_s`."""
        return [p for p in self.by_name.values() if p.state == "alive" and now_s - p.heard_s > dead_after_s]
