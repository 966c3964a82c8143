"""Taking: agrees with another statement of the rule, keeps what the next step needs, never stalls when all is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer import taking
from buffer.tickets import LedgerError, Ticket
from tests.law.judge import reference_batch


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, list[Ticket]]:
    """Outstanding groups that keep the invariant at step 5."""
    P = draw(st.integers(1, 4))
    deadlines: list[int] = []
    for ahead in draw(st.lists(st.integers(0, 4), max_size=5 * P)):
        more = sorted([*deadlines, 5 + ahead])
        if all(i < (d - 5 + 1) * P for i, d in enumerate(more)):
            deadlines.append(5 + ahead)
    done = draw(st.lists(st.booleans(), min_size=len(deadlines), max_size=len(deadlines)))
    pool = [
        Ticket(group=i, problem_index=i, base=0, deadline=d, state="finished" if done[i] else "leased")
        for i, d in enumerate(deadlines)
    ]
    return P, pool


@settings(max_examples=200, deadline=None, database=None)
@given(case=pools(), exhausted=st.booleans())
def test_taking_agrees_with_putting_deadlines_into_places(case: tuple[int, list[Ticket]], exhausted: bool) -> None:
    P, pool = case
    batch = taking.choose(5, P, pool, exhausted=exhausted)
    assert sorted(t.group for t in batch or []) == reference_batch(5, P, pool, exhausted)
    if batch is not None:
        rest = sorted(t.deadline for t in pool if t not in batch)
        assert all(i < (d - 6 + 1) * P for i, d in enumerate(rest))


@settings(max_examples=100, deadline=None, database=None)
@given(case=pools())
def test_when_everything_is_finished_there_is_a_batch(case: tuple[int, list[Ticket]]) -> None:
    P, pool = case
    done = [replace(t, state="finished") for t in pool]
    assert (taking.choose(5, P, done, exhausted=False) is not None) == (len(done) >= P)


def test_the_examples_of_taking() -> None:
    def pool(*groups: tuple[int, int, bool]) -> list[Ticket]:
        return [
            Ticket(group=g, problem_index=g, base=0, deadline=d, state="finished" if f else "leased")
            for g, d, f in groups
        ]

    taken = taking.choose(4, 2, pool((7, 5, True), (8, 5, False), (9, 5, False), (10, 6, True)), exhausted=False)
    assert [t.group for t in taken or []] == [7, 10]
    waits = pool((7, 5, True), (8, 5, False), (9, 5, False), (11, 5, False), (10, 6, True))
    assert taking.choose(4, 2, waits, exhausted=False) is None
    with pytest.raises(LedgerError, match=r"deadline 5\): still outstanding at step 6"):
        taking.choose(6, 2, waits, exhausted=False)
