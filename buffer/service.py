"""What the buffer answers: each kind of request applied to the run's state, in the order of arrival.

Consumes    requests of peers (records, already decoded), the time as an argument
Produces    answers; PARKED for a long poll that has to wait; Read for one that needs the disk
Waits for   nothing: no sockets, no clocks; the server asks parked requests again after every change
Invariant   an answer leaves only after the unit that was current when it was given is durable
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from buffer.codec import decode
from buffer.dials import on_dial
from buffer.evaluation import advance
from buffer.handlers_actor import on_exclude, on_finish, on_loaded, on_turn
from buffer.handlers_group import on_decide, on_next_group, on_take
from buffer.handlers_learner import observe_lag, on_checkpoint, on_publication
from buffer.peers import Peer
from buffer.report import status
from buffer.run_state import Now, RunState
from buffer.schema import Batch, Lease, RolloutKey, Trajectory, Welcome
from buffer.storage import Storage
from buffer.wire import Hello, LeaseRequest, Reason, Refusal

PARKED = object()
"""the answer to a long poll that has to wait"""
MAX_KEYS = 1 << 16
MAX_WANT = 1024
MAX_FETCH_BYTES = 2 << 20
"""of trajectories or durable turns in one reply: the client asks again for the rest, the event loop never handles great
messages"""
MAX_SNAPSHOT_BYTES = 256 << 10
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Read:
    """An answer that a reading thread makes, after the current unit is durable."""

    make: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a living peer (HELLO and status come without)."""

    kind: str
    seq: int
    record: Any
    frames: list[bytes]
    peer: Peer


class Service:
    """The buffer without its sockets."""

    def __init__(self, run: RunState, storage: Storage) -> None:
        self.run, self._storage = run, storage
        self._plain: dict[str, Callable[[Request, Now], Any]] = {
            "lease": self._lease,
            "turn": lambda q, now: on_turn(run, storage, q.peer, q.record, q.frames, now),
            "finish": lambda q, now: on_finish(run, storage, q.peer, q.record, now),
            "exclude": lambda q, now: on_exclude(run, storage, q.peer, q.record, now),
            "renew": self._renew,
            "loaded": lambda q, now: on_loaded(run, q.peer, q.record, now),
            "next_group": lambda q, now: on_next_group(run, q.peer) or PARKED,
            "decide": lambda q, now: on_decide(run, q.record, now),
            "take": self._take,
            "fetch": self._fetch,
            "publication": lambda q, now: on_publication(run, q.peer, q.record, now),
            "checkpoint": lambda q, now: on_checkpoint(run, q.peer, q.record, now),
            "heartbeat": self._heartbeat,
            "dial": lambda q, now: on_dial(run, q.record, now),
            "dials": lambda q, now: tuple(run.turned),
            "failed": lambda q, now: self._failed(q.peer, q.record),
            "bye": lambda q, now: self.end_peer(q.peer, "gone"),
        }

    def answer(self, request: Request, now: Now) -> Any:
        """The answer's value, PARKED, or a Read.

        Raises:
            Refusal: the request is answered with NACK.
        """
        request.peer.heard_s = now.s
        return self._plain[request.kind](request, now)

    def hello(self, hello: Hello, now: Now) -> Welcome:
        """A life begins: what its name held before is free again."""
        run = self.run
        before = run.peers.by_name.get(hello.name)
        peer, is_new = run.peers.hello(hello, now.s)
        peer.heard_s = now.s
        if is_new:
            if before is not None:
                before.state = "replaced"
                self._release(before)
            run.put(peer.row(now.unix_s))
            if peer.role == "rollout":
                run.write_released(run.ledger.join(peer.name, peer.epoch))
        return Welcome(
            epoch=peer.epoch,
            acked=run.ledger.acked,
            published_lineage=run.published[0],
            published_version=run.published[1],
            next_step=run.ledger.next_step,
            state=run.state,
        )

    def end_peer(self, peer: Peer, state: str) -> None:
        """This life is over: said so itself, or found dead."""
        peer.state = state
        self.run.put(("UPDATE peers SET state = ? WHERE name = ?", (state, peer.name)))
        self.run.meters.count(f"peers_{state}/{peer.role}")
        self._release(peer)

    def _failed(self, peer: Peer, message: str) -> None:
        """Its last words go to this role's log and stay in `status` until its next life."""
        peer.error = message[:MAX_ERROR_CHARS]
        print(f"{peer.name}: epoch {peer.epoch} failed: {peer.error}", flush=True)
        self.end_peer(peer, "failed")

    def _release(self, peer: Peer) -> None:
        run = self.run
        run.free(run.leases.release_engine(peer.name))
        for group in run.groups.values():
            if group.deciding == peer.name:
                group.deciding = ""
        if peer.role == "rollout":
            run.write_released(run.ledger.remove(peer.name))

    def tick(self, now: Now, *, stalled: bool) -> None:
        """Expire what is overdue. `stalled`: this process itself was stopped, or its disk, so nobody is silent."""
        run = self.run
        limit_s = run.settings.dead_after_s
        if stalled:
            for peer in run.peers.by_name.values():
                peer.heard_s = now.s
        for peer in run.peers.silent(limit_s, now.s):
            if peer.role != "learner":  # it says nothing while it compiles; its next life fences it
                self.end_peer(peer, "dead")
        leader = run.peers.leader(run.published[0])
        serving = leader is not None and now.s - leader.heard_s < limit_s
        for member in run.deadlines.late(run.ledger.live, now.s, serving):
            self.end_peer(run.peers.by_name[member.name], "dead")
        run.free(run.leases.expired(now.s))
        for number in run.leases.timed_out(now.s, bool(run.ledger.live)):
            run.score(run.groups[number], now, timed_out=True)

    def settle(self, now: Now) -> None:
        """After changes: the run's phase and new tickets, before parked requests are asked again."""
        observe_lag(self.run, now)
        advance(self.run, now)
        self.run.issue(now)

    # Requests that need more than the run's state

    def _lease(self, request: Request, now: Now) -> Any:
        run, peer, want = self.run, request.peer, request.record
        assert isinstance(want, LeaseRequest)
        if request.seq in peer.granted:  # sent again: the reply was lost
            granted = [g for g in peer.granted[request.seq] if self._holds(peer, g)]
        else:
            member = next((m for m in run.ledger.members if m.name == peer.name), None)
            if member is None or member.version < want.loaded:
                known = "none" if member is None else member.version
                raise Refusal(Reason.NOT_ALLOWED, f"loaded = {want.loaded}, acknowledged is {known}: acknowledge first")
            if not 1 <= want.want <= MAX_WANT:
                raise Refusal(Reason.NOT_ALLOWED, f"want = {want.want} is not in 1..{MAX_WANT}")
            if peer.offers_seen == run.offers:
                return PARKED
            granted = run.leases.grant(
                peer.name, peer.epoch, member.version, want.want, now.s, self._num_bytes, MAX_FETCH_BYTES
            )
            if not granted:
                peer.offers_seen = run.offers
                return PARKED
            peer.remember_grant(request.seq, granted)
            self._write_grants(peer, request.seq, granted, now)
        leases = [self._lease_of(group, rollout, attempt) for group, rollout, attempt in granted]
        resumed = [i for i, lease in enumerate(leases) if run.groups[lease.group].rollouts[lease.rollout].num_turns]
        return Read(lambda: self._with_turns(leases, resumed)) if resumed else tuple(leases)

    def _num_bytes(self, group: int, rollout: int) -> int:
        return self.run.groups[group].rollouts[rollout].num_bytes

    def _holds(self, peer: Peer, granted: tuple[int, int, int]) -> bool:
        state = self.run.leases.state(granted[0], granted[1])
        return state is not None and (state.engine, state.epoch, state.attempt) == (peer.name, peer.epoch, granted[2])

    def _write_grants(self, peer: Peer, seq: int, granted: list[tuple[int, int, int]], now: Now) -> None:
        run = self.run
        for group, rollout, attempt in granted:
            run.put(
                (
                    "INSERT INTO rollouts (group_id, rollout, state, attempt, engine, epoch, lease_seq, leased_unix_s) "
                    "VALUES (?, ?, 'leased', ?, ?, ?, ?, ?) ON CONFLICT (group_id, rollout) DO UPDATE SET "
                    "state = 'leased', attempt = excluded.attempt, engine = excluded.engine, epoch = excluded.epoch, "
                    "lease_seq = excluded.lease_seq, leased_unix_s = excluded.leased_unix_s",
                    (group, rollout, attempt, peer.name, peer.epoch, seq, now.unix_s),
                )
            )
        for group in dict.fromkeys(group for group, _, _ in granted):
            if run.groups[group].kind == "train":
                run.write_tickets(run.ledger.lease(group))
            run.put(
                (
                    "UPDATE groups SET first_leased_unix_s = ?, state = 'leased' "
                    "WHERE group_id = ? AND first_leased_unix_s IS NULL",
                    (now.unix_s, group),
                )
            )
        run.meters.count("rollouts_leased", len(granted))

    def _lease_of(self, group: int, rollout: int, attempt: int) -> Lease:
        work = self.run.groups[group]
        return Lease(
            group=group,
            rollout=rollout,
            attempt=attempt,
            kind=work.kind,
            base=work.base,
            deadline=work.deadline,
            seed=self.run.seed_of(group, rollout),
            problem=work.problem,
        )

    def _with_turns(self, leases: list[Lease], resumed: list[int]) -> tuple[Lease, ...]:
        for i in resumed:
            turns = self._storage.turns((leases[i].group, leases[i].rollout))
            leases[i] = replace(leases[i], turns=tuple(turns))
        return tuple(leases)

    def _renew(self, request: Request, now: Now) -> tuple[RolloutKey, ...]:
        if len(request.record) > MAX_KEYS:
            raise Refusal(Reason.TOO_LARGE, f"{len(request.record)} keys exceed {MAX_KEYS}")
        peer, leases = request.peer, self.run.leases
        lost = leases.renew(peer.name, peer.epoch, request.record, now.s)
        since_s = now.s + self.run.settings.lease_s - self.run.settings.dead_after_s
        for granted in peer.granted.values():
            for one in granted:
                state = leases.state(one[0], one[1])
                if state is not None and self._holds(peer, one) and state.expires_s < since_s:
                    state.expires_s = min(state.expires_s, now.s - 1.0)  # it does not know of it: the answer was lost
        return tuple(lost)

    def _take(self, request: Request, now: Now) -> Any:
        step = request.record.step
        if step < self.run.ledger.next_step and step not in self.run.batches:
            return Read(lambda: self._recorded(step))
        record = on_take(self.run, step, now)
        return PARKED if record is None else decode(Batch, record)

    def _recorded(self, step: int) -> Batch:
        rows = self._storage.rows("SELECT record FROM batches WHERE step = ?", (step,))
        if not rows:
            raise Refusal(Reason.UNKNOWN_KEY, f"step {step} has no recorded batch")
        return decode(Batch, rows[0][0])

    def _fetch(self, request: Request, now: Now) -> Read:
        keys = request.record
        if not 1 <= len(keys) <= MAX_KEYS:
            raise Refusal(Reason.NOT_ALLOWED, f"{len(keys)} keys are not in 1..{MAX_KEYS}")

        def make() -> tuple[Trajectory, ...]:
            out = self._storage.trajectories(keys, MAX_FETCH_BYTES)
            if not out:
                raise Refusal(Reason.UNKNOWN_KEY, f"group {keys[0][0]}, rollout {keys[0][1]} has no durable turn")
            return tuple(out)

        return Read(make)

    def _heartbeat(self, request: Request, now: Now) -> str:
        if len(request.frames[0]) > MAX_SNAPSHOT_BYTES:
            raise Refusal(Reason.TOO_LARGE, f"snapshot of {len(request.frames[0])} bytes exceeds {MAX_SNAPSHOT_BYTES}")
        request.peer.snapshot, request.peer.unlogged = request.record, True
        return self.run.state

    def status(self, now: Now) -> dict[str, Any]:
        return status(self.run, now)
