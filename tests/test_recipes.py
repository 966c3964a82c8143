"""The recipes and models of the repository: valid, each pair of cold start and training about the same problems, each
model read by what ships beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.chat import Chat
from actors.problems import ProblemStream
from actors.tool_call import ToolCall
from launch.cold_start import ColdStartSettings
from launch.config import load, read_toml, validate
from launch.preflight import check
from launch.tree import Recipe

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path for path in (ROOT / "launch" / "recipes").glob("*.toml") if not path.name.endswith("-sft.toml"))
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def cold_start_of(path: Path) -> ColdStartSettings:
    recipe = path.with_name(f"{path.stem}-sft.toml")
    return validate(ColdStartSettings, read_toml(recipe), str(recipe))


def chat_of(recipe: Recipe) -> tuple[Any, Chat]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    return tokenizer, Chat(tokenizer, recipe.chat)


@each_recipe
def test_a_run_of_the_recipe_would_start(path: Path, tmp_path: Path) -> None:
    check(load(path, [f"run.directory={tmp_path / 'run'}"]))


@each_recipe
def test_training_goes_on_where_the_cold_start_ended(path: Path) -> None:
    recipe, made = load(path), cold_start_of(path)
    assert recipe.model.path == made.output
    assert recipe.problems == made.problems  # or held-out problems were demonstrated
    longest = {"max_observation_tokens": 0}
    assert recipe.chat.model_copy(update=longest) == made.chat.model_copy(update=longest)


@each_recipe
def test_an_episode_is_what_the_models_template_writes_and_reads_back(path: Path) -> None:
    recipe = load(path)
    tokenizer, chat = chat_of(recipe)
    problem = ProblemStream(recipe.problems, seed=1).heldout[0]
    arguments = {"code": "print(1)", "input": ""}
    call = f"go</reason><tool_call>{json.dumps({'name': chat.settings.tool_name, 'arguments': arguments})}</tool_call>"
    answer = f"so</reason><answer>\\boxed{{{problem.answer}}}</answer>"
    turns = [chat.turn_ids(call), chat.turn_ids(answer)]
    ids = chat.prompt_ids(problem.problem) + turns[0] + chat.observation_ids("1") + turns[1]
    messages = [
        {"role": "user", "content": problem.problem},
        {"role": "assistant", "content": recipe.chat.generation_prefix + call},
        {
            "role": recipe.chat.observation_role,
            "content": recipe.chat.observation_open + "1" + recipe.chat.observation_close,
        },
        {"role": "assistant", "content": recipe.chat.generation_prefix + answer},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(tokenizer.decode(ids))
    assert len(ids) < recipe.rollout.max_length
    parsed = [chat.parse(turn) for turn in turns]
    assert all(turn.ended for turn in parsed)
    assert parsed[0].call == ToolCall(**arguments)
    assert (parsed[1].call, parsed[1].answer, parsed[1].answer_well_formed) == (None, problem.answer, True)


def test_the_models_differ_in_all_that_a_run_must_not_rely_on() -> None:
    recipes = [load(path) for path in RECIPES]
    configs = [json.loads((Path(recipe.model.path) / "config.json").read_text()) for recipe in recipes]
    for seen in (
        {config["model_type"] for config in configs},
        {config["tie_word_embeddings"] for config in configs},
        {recipe.chat.observation_role for recipe in recipes},
        {chat_of(recipe)[0].chat_template for recipe in recipes},
        {tuple(sorted(family.name for family in recipe.problems.families)) for recipe in recipes},
    ):
        assert len(seen) > 1
