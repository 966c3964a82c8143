"""The whole system, for real: Ray, vLLM, the sandbox, the buffer, DeepSpeed; a few steps of the repository's models."""

from __future__ import annotations

import json
import signal

import pytest

from tests.whole_run import ENDLESS, Command, sound

pytestmark = pytest.mark.slow


def test_three_steps_train_end_in_order_and_leave_nothing_behind(command: Command) -> None:
    command.ended(command.run("run.steps=3"), 0)
    command.nothing_left()
    summary, figures = command.summary(), sound(command.directory)
    assert (summary["outcome"], summary["learner_steps"], figures["groups_trained"]) == ("reached", 3, 6)
    assert summary["age_max"] <= summary["max_staleness"] == 1
    assert summary["heldout_finished_start"] == summary["heldout_finished_end"] == 16
    names = {"buffer-0", "filter-0", "learner-0", "rollout-0", "sandbox-0"}
    assert names == set(summary["roles"])
    assert names <= {path.stem for path in (command.directory / "metrics").iterdir()}
    for name in ("buffer-0", "filter-0", "learner-0"):
        role = summary["roles"][name]
        assert sum(role["clock"].values()) == pytest.approx(role["wall_s"], rel=0.01)
    assert (command.directory / "export" / "config.json").exists()

    command.ended(command.start("resume", str(command.directory), "--set", "run.steps=4"), 0)
    assert command.summary()["reason"] == "all 4 steps are trained"
    figures = sound(command.directory)
    assert figures["groups_trained"] == 8
    assert set(figures["evaluations"]) == {"start", "step_3_life_1", "end"}


def test_a_run_goes_on_after_its_driver_was_killed_and_after_either_signal(command: Command) -> None:
    driver = command.run(*ENDLESS)
    command.until_step(1)
    driver.kill()
    driver.wait()
    command.nothing_left(within_s=15.0)

    taken = command.steps_taken()
    driver = command.start("resume", str(command.directory))
    command.until_step(taken)
    driver.send_signal(signal.SIGTERM)
    command.ended(driver, 75)
    command.nothing_left()
    assert command.summary()["outcome"] == "interrupted"

    taken = command.steps_taken()
    driver = command.start("resume", str(command.directory))
    command.until_step(taken)
    driver.send_signal(signal.SIGINT)
    command.ended(driver, 75)
    command.nothing_left()

    steps = command.steps_taken() + 2
    command.ended(command.start("resume", str(command.directory), "--set", f"run.steps={steps}"), 0)
    command.nothing_left()
    assert command.summary()["learner_steps"] == steps
    assert sound(command.directory)["groups_trained"] == 2 * steps


def test_another_model_and_template_train_by_their_recipe_alone(command: Command) -> None:
    command.ended(command.run("run.steps=3", "staleness.max_staleness=0", recipe="tiny-llama"), 0)
    command.nothing_left()
    summary, figures = command.summary(), sound(command.directory)
    assert (summary["outcome"], figures["groups_trained"], summary["age_max"]) == ("reached", 6, 0)
    assert sum(row["calls"] for row in figures["versions"]) > 0  # in correct rollouts: its calls are understood
    steps = [json.loads(line) for line in (command.directory / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert max(step["logprob_diff_max"] for step in steps) < 1e-3  # the engine serves each version the learner made
