"""What the driver does about roles that are silent, stuck, or fail again and again."""

from __future__ import annotations

from typing import Any

import pytest

from launch.supervisor import GONE, MAX_FAILURES, PULSE_PATIENCE, WELL_AFTER_S, GiveUp, Kill, Pulse, Supervisor

NAME = "rollout-0"


def poll(state: str, pid: int = 1, error: str = "") -> dict[str, Any]:
    return {"state": state, "pid": pid, "error": error}


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor([NAME], start_timeout_s=100.0, dead_after_s=10.0, now_s=0.0)


def test_a_role_that_starts_is_left_alone_until_its_time_is_over(supervisor: Supervisor) -> None:
    for now_s in range(0, 100, 5):
        assert supervisor.observe({NAME: poll("starting") if now_s else None}, {}, now_s=now_s) == []
    assert supervisor.starting() == [NAME]
    (action,) = supervisor.observe({NAME: poll("starting")}, {}, now_s=106.0)
    assert isinstance(action, Kill)
    assert (action.name, action.pid) == (NAME, 1)
    assert "has not started in run.start_timeout_s = 100 s" in action.reason
    assert supervisor.observe({NAME: None}, {}, now_s=107.0) == []


def test_a_role_that_never_answers_ends_the_run(supervisor: Supervisor) -> None:
    assert supervisor.observe({NAME: None}, {}, now_s=99.0) == []
    (action,) = supervisor.observe({NAME: None}, {}, now_s=101.0)
    assert isinstance(action, GiveUp)
    assert "rollout-0 has not started in run.start_timeout_s = 100 s" in action.reason


def test_a_role_that_ray_does_not_start_again_ends_the_run(supervisor: Supervisor) -> None:
    assert supervisor.observe({NAME: poll("failed", error="OSError: no space")}, {}, now_s=1.0) == []
    for now_s in (2.0, 11.0):
        assert supervisor.observe({NAME: {"state": GONE}}, {}, now_s=now_s) == []
    assert supervisor.observe({NAME: poll("starting", pid=2)}, {}, now_s=12.5) == []  # it was started after all
    assert supervisor.observe({NAME: {"state": GONE}}, {}, now_s=20.0) == []
    (action,) = supervisor.observe({NAME: {"state": GONE}}, {}, now_s=31.0)
    assert isinstance(action, GiveUp)
    assert action.reason.startswith("rollout-0 is not started again: run.max_restarts is used up")
    assert "no space" in action.reason


def test_starts_that_hang_are_failures_and_the_last_one_ends_the_run(supervisor: Supervisor) -> None:
    now_s, actions = 0.0, list[Kill | GiveUp]()
    for life in range(1, MAX_FAILURES + 1):
        for _ in range(4):
            now_s += 40.0
            actions += supervisor.observe({NAME: poll("starting", life)}, {}, now_s=now_s)
    assert [type(action) for action in actions] == [Kill] * MAX_FAILURES
    (action,) = supervisor.observe({NAME: None}, {}, now_s=now_s + 1)
    assert isinstance(action, GiveUp)
    assert "a start that hung" in action.reason


def test_a_start_is_not_charged_with_the_wait_for_another_role(supervisor: Supervisor) -> None:
    """An engine waits for the first version as long as the learner takes; then it has what is left to load it in."""
    assert supervisor.observe({NAME: poll("starting")}, {}, now_s=1.0) == []
    for now_s in (60.0, 200.0, 900.0):
        assert supervisor.observe({NAME: poll("waiting")}, {}, now_s=now_s) == []
    assert supervisor.starting() == [NAME]
    assert supervisor.observe({NAME: poll("starting")}, {}, now_s=990.0) == []
    (action,) = supervisor.observe({NAME: poll("starting")}, {}, now_s=1010.0)
    assert isinstance(action, Kill)


def test_a_role_that_falls_silent_while_it_waits_is_killed(supervisor: Supervisor) -> None:
    supervisor.observe({NAME: poll("waiting", pid=7)}, {}, now_s=50.0)
    assert supervisor.observe({NAME: None}, {}, now_s=140.0) == []
    (action,) = supervisor.observe({NAME: None}, {}, now_s=151.0)
    assert isinstance(action, Kill)


def test_a_role_that_stops_answering_is_killed_once(supervisor: Supervisor) -> None:
    supervisor.observe({NAME: poll("running", pid=7)}, {}, now_s=1.0)
    assert supervisor.observe({NAME: None}, {}, now_s=10.0) == []
    (action,) = supervisor.observe({NAME: None}, {}, now_s=11.5)
    assert isinstance(action, Kill)
    assert (action.name, action.pid) == (NAME, 7)
    assert supervisor.observe({NAME: None}, {}, now_s=12.0) == []


def test_a_role_without_heartbeat_is_killed_though_it_answers(supervisor: Supervisor) -> None:
    for now_s, age_s in ((1.0, 0.5), (20.0, 10.0 * PULSE_PATIENCE)):
        assert supervisor.observe({NAME: poll("running")}, {NAME: Pulse(epoch=1, age_s=age_s)}, now_s=now_s) == []
    (action,) = supervisor.observe({NAME: poll("running")}, {NAME: Pulse(epoch=1, age_s=31.0)}, now_s=32.0)
    assert isinstance(action, Kill)
    assert "no heartbeat for 31.0 s" in action.reason


def test_the_heartbeat_of_an_earlier_life_does_not_count_against_the_next(supervisor: Supervisor) -> None:
    supervisor.observe({NAME: poll("running", pid=1)}, {NAME: Pulse(epoch=1, age_s=0.0)}, now_s=1.0)
    supervisor.observe({NAME: poll("running", pid=2)}, {NAME: Pulse(epoch=1, age_s=5.0)}, now_s=6.0)
    assert supervisor.observe({NAME: poll("running", pid=2)}, {NAME: Pulse(epoch=1, age_s=99.0)}, now_s=100.0) == []
    (action,) = supervisor.observe({NAME: poll("running", pid=2)}, {NAME: Pulse(epoch=2, age_s=99.0)}, now_s=101.0)
    assert isinstance(action, Kill)


def test_a_role_that_fails_again_and_again_ends_the_run(supervisor: Supervisor) -> None:
    for life in range(1, MAX_FAILURES):
        for _ in range(3):
            assert supervisor.observe({NAME: poll("failed", life, "ValueError: no")}, {}, now_s=float(life)) == []
        supervisor.observe({NAME: None}, {}, now_s=life + 0.5)
    (action,) = supervisor.observe({NAME: poll("failed", 99, "ValueError: no")}, {}, now_s=10.0)
    assert isinstance(action, GiveUp)
    assert "ValueError: no" in action.reason


def test_failures_far_apart_do_not_end_the_run(supervisor: Supervisor) -> None:
    now_s = 0.0
    for life in range(1, 3 * MAX_FAILURES):
        supervisor.observe({NAME: poll("running", life)}, {}, now_s=now_s)
        now_s += WELL_AFTER_S + 1
        supervisor.observe({NAME: poll("running", life)}, {}, now_s=now_s)
        assert supervisor.observe({NAME: poll("failed", life, "x")}, {}, now_s=now_s) == []


def test_a_role_that_ended_is_not_missed(supervisor: Supervisor) -> None:
    supervisor.observe({NAME: poll("running")}, {}, now_s=1.0)
    supervisor.observe({NAME: poll("ended")}, {}, now_s=2.0)
    assert supervisor.observe({NAME: None}, {}, now_s=500.0) == []
    assert supervisor.ended("rollout")
