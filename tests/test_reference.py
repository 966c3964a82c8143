"""The plain loop itself: what it samples is what it trains, and a step is the gradient it says."""

from typing import Any

import numpy as np
import pytest
import torch

from actors.chat import Chat, ChatSettings
from actors.problems import FamilySettings, ProblemSettings, ProblemStream
from actors.roc import RocSettings
from launch.tiny import TinySettings, new_model, train_tokenizer
from sandbox.api import Status
from tests.reference.execute import Executor
from tests.reference.loop import KeptGroup, LoopSettings, SyncLoop, advantages, recorded_gradient
from tests.reference.sampler import Episode, Limits, sample_episodes

PROBLEMS = ProblemSettings(families=(FamilySettings(name="products", options={"max_digits": 1}),), num_heldout=4)
TINY = TinySettings(vocabulary=320, num_layers=2, width=32, num_heads=2, num_kv_heads=1, mlp_width=64)
LIMITS = Limits(max_new_tokens=12, temperature=0.8)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Chat, ProblemStream]:
    tokenizer = train_tokenizer(TINY, ["x"])
    return new_model(TINY, tokenizer, seed=1), Chat(tokenizer, ChatSettings()), ProblemStream(PROBLEMS, seed=1)


@pytest.fixture(scope="module")
def episodes(parts: tuple[Any, Chat, ProblemStream]) -> list[Episode]:
    model, chat, stream = parts
    problems = [stream.at(index % 3) for index in range(12)]
    with Executor() as executor:
        return sample_episodes(model, chat, problems, executor.run, LIMITS, torch.Generator().manual_seed(1))


def test_logprobs_at_sampling_are_those_of_a_forward_pass(
    parts: tuple[Any, Chat, ProblemStream], episodes: list[Episode]
) -> None:
    model, _, _ = parts
    for number, episode in enumerate(episodes):
        trajectory = episode.trajectory(0, number)
        ids = torch.tensor(episode.ids)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / LIMITS.temperature, dim=-1)
        found = logp.gather(1, ids[1:, None])[:, 0].numpy()
        sampled = trajectory.sampled[1:]
        assert sampled.any()
        np.testing.assert_allclose(found[sampled], trajectory.logprobs[1:][sampled], atol=1e-5)


def test_the_gradient_at_age_zero_is_that_of_the_policy_gradient(
    parts: tuple[Any, Chat, ProblemStream], episodes: list[Episode]
) -> None:
    model, _, _ = parts
    rewards = [float(number % 3 == 0) for number in range(12)]
    kept = KeptGroup(
        trajectories=tuple(episode.trajectory(0, number) for number, episode in enumerate(episodes)),
        rewards=tuple(rewards),
    )
    found = recorded_gradient(model, [kept], LIMITS.temperature)
    model.zero_grad()
    total = torch.zeros(())
    for episode, advantage in zip(episodes, advantages(rewards), strict=True):
        ids = torch.tensor(episode.ids)
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / LIMITS.temperature, dim=-1)
        mask = torch.tensor(episode.sampled[1:])
        total = total - advantage * logp.gather(1, ids[1:, None])[:, 0][mask].sum()
    (total / sum(sum(episode.sampled) for episode in episodes)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_turn_ends_at_its_limit_and_a_budget_is_kept(episodes: list[Episode]) -> None:
    for episode in episodes:
        assert episode.end in ("answer", "no_call", "length", "turns")
        assert sum(episode.sampled) <= LIMITS.max_new_tokens * LIMITS.max_turns
        assert len(episode.ids) <= LIMITS.max_length_tokens


def test_a_loop_of_all_wrong_groups_stops_instead_of_spinning(parts: tuple[Any, Chat, ProblemStream]) -> None:
    model, chat, stream = parts
    settings = LoopSettings(group_size=2, groups_per_step=2, roc=RocSettings(mode="off"), limits=LIMITS)
    with Executor() as executor:
        loop = SyncLoop(model, chat, stream, executor.run, settings, seed=1)
        assert loop.step(max_dropped=4) is None
    assert loop.next_step == 0
    assert loop.next_group >= 4


def test_the_executor_survives_what_it_runs() -> None:
    with Executor(wall_s=0.3) as executor:
        assert executor.run("while True: pass").status is Status.TIMEOUT
        assert executor.run("import os; os._exit(1)").status is Status.SIGNAL
        assert executor.run("print(6 * 7)").to_text() == "42"
        assert executor.run("x = 1\nprnt(x)").to_text() == "NameError: name 'prnt' is not defined (line 2)"
        assert executor.run("print(1").to_text() == "SyntaxError: '(' was never closed (line 1)"
