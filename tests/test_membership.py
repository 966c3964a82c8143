"""Deadlines to acknowledge a version."""

from __future__ import annotations

from dataclasses import replace

from buffer.membership import AckDeadlines, Member


def test_acknowledgement_deadlines_stop_without_a_learner_and_count_from_the_last_acknowledgement() -> None:
    deadlines = AckDeadlines(10.0)
    slow, fast = Member(name="slow", epoch=1, version=0), Member(name="fast", epoch=1, version=1)
    deadlines.late([slow, fast], 0.0, True)
    deadlines.published(1)
    assert deadlines.late([slow, fast], 9.0, True) == []
    assert deadlines.late([slow, fast], 50.0, False) == []
    assert deadlines.late([slow, fast], 52.0, True) == [slow]
    deadlines.published(2)
    slow = replace(slow, version=1)
    assert deadlines.late([slow, fast], 60.0, True) == []
    assert deadlines.late([slow, fast], 65.0, True) == [fast]
