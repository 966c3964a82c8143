"""KV-aware admission: what is promised of it, over random histories, and that it beats reserving the longest length."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduler import KvScheduler

MAX_LENGTH = 1000
ROUNDS = 1200


def scheduler(capacity: int = 20_000, concurrency: int = 200, lengths: list[int] | None = None) -> KvScheduler:
    made = KvScheduler(capacity_tokens=capacity, max_length=MAX_LENGTH, concurrency=concurrency)
    for index, length in enumerate(lengths or []):
        made.admit(("measured", index), 50)
        made.grow(("measured", index), length)
        made.release(("measured", index), completed=True)
    return made


lengths = st.lists(st.integers(50, MAX_LENGTH), max_size=60)
held = st.lists(st.integers(1, MAX_LENGTH), max_size=40)


def test_with_nothing_measured_the_greatest_length_is_reserved() -> None:
    assert scheduler(capacity=20_000).room() == 20


def test_measured_lengths_make_room() -> None:
    assert 80 <= scheduler(capacity=20_000, lengths=[190, 200, 210] * 100).room() <= 20_000 // 190


def test_a_cache_smaller_than_one_rollout_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"rollout\.max_length = 1000.*lower rollout\.max_length to 999"):
        KvScheduler(capacity_tokens=999, max_length=1000, concurrency=4)


def test_a_key_cannot_run_twice() -> None:
    made = scheduler()
    made.admit("a", 5)
    with pytest.raises(ValueError, match="running already"):
        made.admit("a", 5)


@given(lengths, held, st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_never_above_concurrency_and_never_stuck(seen: list[int], contexts: list[int], concurrency: int) -> None:
    made = scheduler(concurrency=concurrency, lengths=seen)
    for index, tokens in enumerate(contexts):
        if made.running < concurrency:
            made.admit(index, tokens)
    assert 0 <= made.room() <= concurrency - made.running
    for index in range(made.running):
        made.release(index, completed=index % 2 == 0)
    assert made.running == 0 == made.held_tokens
    assert made.room() >= 1


@given(lengths, held, st.integers(0, 39), st.integers(1, 500))
@settings(max_examples=150, deadline=None)
def test_a_rollout_that_ends_never_takes_room_away(seen: list[int], contexts: list[int], which: int, by: int) -> None:
    made = scheduler(lengths=seen)
    for index, tokens in enumerate(contexts):
        made.admit(index, tokens)
    if which >= len(contexts):
        return
    before = made.room()
    made.release(which, completed=False)
    assert made.room() >= before


@given(st.lists(st.integers(50, MAX_LENGTH), min_size=1, max_size=60), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_longer_measured_lengths_never_make_more_room(seen: list[int], longer: int) -> None:
    assert scheduler(lengths=[min(MAX_LENGTH, n + longer) for n in seen]).room() <= scheduler(lengths=seen).room()


@given(held)
@settings(max_examples=100, deadline=None)
def test_one_more_admitted_leaves_at_least_the_room_minus_what_it_is_worth(contexts: list[int]) -> None:
    """Taking `room()` rollouts leaves no room: nothing is promised twice."""
    made = scheduler(lengths=[200] * 50, concurrency=10_000)
    for index, tokens in enumerate(contexts):
        made.admit(index, 50)
        made.grow(index, tokens)
    room = made.room()
    for index in range(room):
        made.admit(("new", index), 50)
    assert made.room() == 0


def simulate(seed: int, capacity: int, reserve: bool) -> tuple[int, float]:
    """Rollouts of heavy-tailed lengths, growing in step: how many ended, and the share of rounds over capacity."""
    rng = random.Random(seed)
    made = scheduler(capacity=capacity, concurrency=500)
    running: dict[int, tuple[int, int]] = {}
    ended, over, name = 0, 0, 0
    for _ in range(ROUNDS):
        room = capacity // MAX_LENGTH - len(running) if reserve else made.room()
        for _ in range(room):
            name += 1
            running[name] = (50, min(MAX_LENGTH, int(50 + rng.lognormvariate(4.8, 0.9))))
            made.admit(name, 50)
        for key, (tokens, final) in list(running.items()):
            made.grow(key, tokens + 10)
            running[key] = (tokens + 10, final)
            if tokens + 10 >= final:
                made.release(key, completed=True)
                del running[key]
                ended += 1
        over += made.held_tokens > capacity
    return ended, over / ROUNDS


@pytest.mark.parametrize("seed", [1, 2])
def test_heavy_tails_run_at_least_twice_as_many_and_rarely_exceed_the_cache(seed: int) -> None:
    measured, over = simulate(seed, 20_000, reserve=False)
    reserved, _ = simulate(seed, 20_000, reserve=True)
    assert measured >= 2 * reserved
    assert over <= 0.05
