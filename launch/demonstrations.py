"""Demonstrations for a cold start: how a problem is solved with the tool, well and badly, from an item's metadata.

Consumes    reasoning-gym items, `DemonstrationSettings`, a function that executes code and gives the observation's text
Produces    `Demonstration`s: the model's turns and what came back
Waits for   the executor
Invariant   the demonstration of an index depends on the settings, the seed and the index alone

Three kinds, in stated shares: a guess without the tool, which is wrong; a faulty call, its error, then the right call;
the right call at once. Reinforcement learning starts from a model that does all three.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.chat import Chat
from actors.problems import ProblemError, draw

Execute = Callable[[str], str]
"""Code to the text of its observation."""


class DemonstrationSettings(BaseModel):
    """The `[demonstrations]` table of an SFT recipe; what the two shares leave are right calls at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    guess_share: float = Field(default=0.6, ge=0, le=1)
    """Answers without a call, wrong."""
    faulty_share: float = Field(default=0.18, ge=0, le=1)
    """A faulty call first, then the right one."""
    guesses_from: float = Field(default=0.0, ge=0, le=1)
    """Part of the demonstrations that comes before the first guess, the other kinds in their proportion. A guess
    teaches nothing about copying numbers, which takes a new model longest. Takes sft.shuffle = false."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "DemonstrationSettings":
        if self.guess_share + self.faulty_share > 1:
            raise ValueError(
                f"demonstrations.guess_share + faulty_share = {self.guess_share + self.faulty_share}: at most 1"
            )
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One demonstrated episode."""

    problem: str
    turns: tuple[str, ...]
    """The model's turns, without generation prefix and end of turn."""
    observations: tuple[str, ...]
    """What came back after each turn but the last."""


def _expression(metadata: Mapping[str, Any]) -> str:
    return f"print({metadata['expression']})"


def _of_numbers(function: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda metadata: f"import math; print(math.{function}({', '.join(map(str, metadata['numbers']))}))"


SOLUTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "products": _expression,
    "chain_sum": _expression,
    "gcd": _of_numbers("gcd"),
    "lcm": _of_numbers("lcm"),
    "count_bits": lambda metadata: f"print(bin({metadata['number']}).count('1'))",
    "count_primes": lambda metadata: (
        f"print(sum(all(n % d for d in range(2, n)) for n in range({metadata['start']}, {metadata['end']} + 1)))"
    ),
}
"""Code that solves an item, by family."""


def faulty(code: str, random: Random) -> str:
    """The code with one beginner's fault: a parenthesis left open, a misspelt name, an import forgotten."""
    faults = [code[:-1], code.replace("print", "prnt")]
    if code.startswith("import math; "):
        faults.append(code.removeprefix("import math; "))
    return random.choice(faults)


def demonstrate(
    settings: DemonstrationSettings,
    tool_name: str,
    problem: str,
    item: Mapping[str, Any],
    seed: int,
    execute: Execute,
    *,
    part: float = 1.0,
) -> Demonstration:
    """One episode about an item, of a kind drawn by the seed; `part` of all demonstrations came before it."""
    family = str(item["metadata"]["source_dataset"])
    if family not in SOLUTIONS:
        raise ProblemError(f"no demonstration is known for family {family}: there are {', '.join(SOLUTIONS)}")
    random = Random(draw("demonstration", seed))
    kind = random.uniform(settings.guess_share if part < settings.guesses_from else 0, 1)
    if kind < settings.guess_share:
        return Demonstration(problem=problem, turns=(_answer("I guess.", _wrong(item, random)),), observations=())
    code = SOLUTIONS[family](item["metadata"])
    calls = [("I compute.", code)]
    if kind < settings.guess_share + settings.faulty_share:
        calls = [("I compute.", faulty(code, random)), ("I fix it.", code)]
    turns = tuple(_call(words, tool_name, text) for words, text in calls)
    observations = tuple(execute(text) for _, text in calls)
    return Demonstration(
        problem=problem, turns=(*turns, _answer("I read it.", str(item["answer"]))), observations=observations
    )


def encode(chat: Chat, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
    """Tokens of an episode, and which of them are the model's."""
    ids = chat.prompt_ids(demonstration.problem)
    ours = [False] * len(ids)
    for place, turn in enumerate(demonstration.turns):
        tokens = chat.turn_ids(turn)
        ids, ours = ids + tokens, ours + [True] * len(tokens)
        if place < len(demonstration.observations):
            tokens = chat.observation_ids(demonstration.observations[place])
            ids, ours = ids + tokens, ours + [False] * len(tokens)
    return ids, ours


def _call(words: str, tool_name: str, code: str) -> str:
    call = json.dumps({"name": tool_name, "arguments": {"code": code, "input": ""}})
    return f"{words}</reason><tool_call>{call}</tool_call>"


def _answer(words: str, answer: str) -> str:
    return f"{words}</reason><answer>\\boxed{{{answer}}}</answer>"


def _wrong(item: Mapping[str, Any], random: Random) -> str:
    """A number of about the answer's size that is not the answer."""
    right = int(item["answer"])
    bound = 10 ** len(str(abs(right)))
    while True:
        guess = random.randrange(bound)
        if guess != right:
            return str(guess)
