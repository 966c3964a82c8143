"""Who is there: heartbeats and deadlines to acknowledge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buffer.membership import AckDeadlines, Member, Presence
from buffer.tickets import FencedError


def test_peers_of_the_previous_life_expire_from_the_start() -> None:
    presence = Presence(10.0)
    presence.restore([("rollout-0", 3), ("rollout-1", 1)], 100.0)
    presence.heard("rollout-0", 3, 105.0)
    assert presence.silent(110.0) == []
    assert presence.silent(110.5) == [("rollout-1", 1)]
    with pytest.raises(FencedError, match="epoch 2 is over"):
        presence.heard("rollout-0", 2, 111.0)


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
