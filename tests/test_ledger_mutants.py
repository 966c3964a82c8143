"""Each sentence of the staleness law is needed: leaving one out breaks some random history.

A row: the sentence; the mutant that leaves it out; what breaks (promise: a token too old is trained, or nothing else
would be left; deadlock; growth: more is active than the bound; weights: a batch is lost, or two histories of them are
in use; rule: nothing but the sentence itself, read literally); the histories it is tried on and the seed to start from,
which only saves time: the search goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from buffer.leases import Leases
from buffer.ledger import Ledger
from buffer.membership import AckDeadlines
from buffer.peers import Peers
from tests.law import mutants_restart as restart
from tests.law import mutants_taking as taking
from tests.law import mutants_tickets as tickets
from tests.law.judge import Violation, plan_of
from tests.law.shell import Shell
from tests.law.world import World, run_history

SEARCHED = 300
"""histories tried before a mutant counts as survived"""

ANY: dict[str, Any] = {}
CHAOS = {"events": 250, "num_engines": 3}
ALONE = {"events": 400, "num_engines": 1, "num_rollouts": 1, "P": 1, "S": 1, "steps": 20, "problems": 200, "drop": 0.0}
LONG = ALONE | {"num_engines": 2}
TWO = {"events": 250, "num_engines": 3, "num_rollouts": 1, "S": 1}
MOVED = {"events": 250, "moves_S": True, "S": 3}


@dataclass(frozen=True, slots=True)
class Row:
    sentence: str
    mutant: type
    breaks: str
    plan: dict[str, Any] = field(default_factory=dict)
    first: int = 0


TABLE = [
    Row("at most B tickets are active: taken ones count", tickets.BoundOfOutstanding, "growth"),
    Row("at most B tickets are active: finished ones count", tickets.BoundWithoutFinished, "growth"),
    Row("B = (S + 1) P", tickets.BoundOneMore, "growth"),
    Row("nothing else bounds work", tickets.AnotherBound, "rule"),
    Row("account over what is outstanding, never over a cumulative count", tickets.CumulativeBound, "deadlock"),
    Row("a joiner that is still loading holds nothing back", tickets.JoinerHolds, "rule", ANY, 1),
    Row("live from the first acknowledgement of a version >= acked", tickets.LiveAtAnyAck, "rule", ALONE, 6),
    Row("live until it dies or is fenced", tickets.DeadStay, "deadlock"),
    Row("acked is the least version of the live engines", tickets.AckedIsNewest, "growth", ANY, 3),
    Row("acked is one integer in the ledger", tickets.AckedForgotten, "promise", ALONE, 19),
    Row("acked never falls", tickets.AckedNotDurable, "promise", ALONE, 19),
    Row("membership and acknowledgements are durable", tickets.MembersForgotten, "rule", ANY, 4),
    Row("members of the previous life expire from the buffer's start", tickets.PreviousLifeStays, "rule"),
    Row("an acknowledgement counts whatever its lineage", tickets.AckByLineage, "rule", CHAOS, 2),
    Row("base = acked", tickets.BaseIsPublished, "rule", LONG | {"num_engines": 3, "S": 2}, 6),
    Row("deadline = base + S, base being acked", tickets.DeadlineFromPublished, "promise", ANY, 3),
    Row("deadline = base + S", tickets.DeadlineLater, "promise", ANY, 3),
    Row("a lease goes only to an engine whose loaded version >= base", tickets.AnyVersionMayLease, "promise", LONG),
    Row("earliest deadline first", tickets.LatestDeadlineFirst, "rule", ANY, 1),
    Row("re-leasing keeps base and deadline", tickets.LeaseRenews, "promise", TWO),
    Row("with no live engine nothing is issued", tickets.IssueWithoutEngine, "rule", ANY, 2),
    Row("step k's tickets are released when acked >= k + 1", tickets.ReleaseEarly, "growth"),
    Row("... and not when they are taken", tickets.ReleaseAtTake, "growth"),
    Row("engines may skip versions", tickets.ReleaseExact, "deadlock", ALONE | {"S": 2}),
    Row("raising acked and releasing are one transaction", tickets.TwoTransactions, "promise", ANY, 1),
    Row("... in no order", tickets.TwoTransactionsReleaseFirst, "growth", ANY, 1),
    Row("issuing reads acked after the release", tickets.AckedBeforeRelease, "promise deadlock"),
    Row("with no live engine nothing is released by (a)", tickets.ReleaseWithoutEngine, "growth", ANY, 4),
    Row("a dropped group is released at once", tickets.DropKeepsTicket, "deadlock"),
    Row("a dropped group is released always", tickets.DropOnlyWithEngine, "deadlock", ANY, 9),
    Row("each drop is counted by reason", tickets.DropUncounted, "rule"),
    Row("the problem of a dropped group counts as used", tickets.DropReturnsProblem, "rule"),
    Row("every group that is due is in the batch", taking.DueMayMiss, "promise", ANY, 5),
    Row("the learner waits for groups that are due", taking.DueNotWaited, "promise", ANY, 1),
    Row("the other places go to finished groups", taking.UnfinishedTaken, "promise"),
    Row("oldest first", taking.NewestFirst, "rule"),
    Row("no need(j) exceeds the places left", taking.NoNeed, "promise deadlock", ANY, 5),
    Row("the chosen count as gone in need(j)", taking.ChosenStillCounted, "deadlock"),
    Row("a batch is short only when the source is exhausted", taking.ShortAnyTime, "promise", ANY, 1),
    Row("a short batch is all that is outstanding, and waits for it", taking.ShortWithoutWaiting, "promise", ANY, 1),
    Row("a batch is short when fewer than P are outstanding", taking.NeverShort, "deadlock", ANY, 1),
    Row("between epochs issuing goes on", taking.EpochsApart, "deadlock"),
    Row("what is outstanding at the goal is counted as unused", taking.GoalLeavesGroups, "deadlock"),
    Row("a ticket keeps the deadline it was issued with", taking.MovedDeadlines, "promise deadlock", ANY, 1),
    Row("issuing pauses until active <= the new B", taking.OldBoundStays, "growth", ANY, 1),
    Row("the check uses S at issue", taking.CheckByCurrentS, "promise", MOVED),
    Row("the group timeout counts from the first lease", restart.TimeoutFromIssue, "rule", ANY, 8),
    Row("... and not from the newest", restart.TimeoutFromLastLease, "rule", ANY, 8),
    Row("it is stopped while no engine is live", restart.TimeoutRunsWithoutEngine, "rule", ANY, 8),
    Row("a group past it is closed", restart.NoTimeout, "deadlock", ANY, 4),
    Row("a stuck group with too little is dropped", restart.StuckAlwaysKept, "rule", ANY, 4),
    Row("a stuck group with enough is kept", restart.StuckAlwaysDropped, "rule", {"num_rollouts": 4}),
    Row("late turns are refused as fenced", restart.LateIsHeard, "rule"),
    Row("a lease has a heartbeat", restart.NoExpiry, "rule"),
    Row("asking again for a batch returns the record", restart.TakenAnew, "weights", ANY, 4),
    Row("batches stay until no kept checkpoint needs them", restart.PrunedAtPublication, "weights", ANY, 4),
    Row("a publication is recorded before its first byte", restart.PublishedBeforeRecord, "weights", ANY, 4),
    Row("nothing is published until max(c, last published)", restart.PublishesFromCheckpoint, "weights", LONG),
    Row("that version is published again", restart.NoRepublication, "deadlock"),
    Row("... under a new lineage", restart.SameLineage, "weights"),
    Row("a lower lineage or epoch is refused", restart.OldEpochsHeard, "rule"),
    Row("acknowledgement deadlines stop without a learner", restart.DeadlinesRunWithoutLearner, "rule", CHAOS, 7),
    Row(
        "an engine that misses its deadline is fenced",
        restart.LateEnginesStay,
        "deadlock",
        {"num_engines": 3, "S": 1},
        12,
    ),
]


def world_with(mutant: type) -> type[World]:
    """A world in which this part is the mutant."""
    if issubclass(mutant, World):
        return mutant
    if issubclass(mutant, Shell):
        return type("MutantWorld", (World,), {"shell_class": mutant})
    parts = {
        Ledger: "ledger_class",
        Leases: "leases_class",
        Peers: "peers_class",
        AckDeadlines: "deadlines_class",
    }
    part = next(name for base, name in parts.items() if issubclass(mutant, base))
    return type("MutantWorld", (World,), {"shell_class": type("MutantShell", (Shell,), {part: mutant})})


def first_violation(row: Row) -> tuple[int, Violation] | None:
    for seed in range(row.first, row.first + SEARCHED):
        try:
            run_history(plan_of(seed, **row.plan), world_with(row.mutant), literal=row.breaks == "rule")
        except Violation as violation:
            return seed, violation
    return None


@pytest.mark.parametrize("row", TABLE, ids=[row.mutant.__name__ for row in TABLE])
def test_leaving_out_a_sentence_breaks_some_history(row: Row) -> None:
    found = first_violation(row)
    assert found is not None, f"without {row.sentence!r} {SEARCHED} histories keep the law"
    seed, violation = found
    assert violation.kind in row.breaks.split(), f"seed {seed}: {violation}"
    run_history(plan_of(seed, **row.plan))


def test_every_mutant_is_in_the_table() -> None:
    listed = {row.mutant for row in TABLE}
    for module in (tickets, taking, restart):
        own = {
            value
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        assert own <= listed
