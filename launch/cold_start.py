"""The cold start: from nothing, or from a model, to one that uses the tool as its demonstrations do.

Consumes    an SFT recipe, a function that executes code
Produces    a folder in Hugging Face format: weights, configuration, tokenizer, chat template, ORIGIN
Waits for   the executor
Invariant   no demonstration is about a held-out problem
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.chat import Chat, ChatSettings
from actors.problems import ProblemSettings, ProblemStream
from launch.demonstrations import Demonstration, DemonstrationSettings, Execute, demonstrate, encode
from launch.tiny import TinySettings, new_model, train_tokenizer
from learner.sft import Example, SftProgress, SftSettings, train


class ColdStartSettings(BaseModel):
    """A whole SFT recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    output: str
    """Folder of the model that is made."""
    base: str | None = None
    """Model to start from; None builds the one that `[tiny]` describes."""
    num_demonstrations: int = Field(default=16000, ge=1)
    tiny: TinySettings = TinySettings()
    demonstrations: DemonstrationSettings = DemonstrationSettings()
    sft: SftSettings = SftSettings()
    chat: ChatSettings = ChatSettings()
    problems: ProblemSettings


def cold_start(settings: ColdStartSettings, execute: Execute, report: Callable[[SftProgress], None]) -> Path:
    """Makes demonstrations, trains, saves; returns the folder."""
    demonstrations = make_demonstrations(settings, execute)
    if settings.base is None:
        tokenizer: Any = train_tokenizer(settings.tiny, texts(demonstrations, settings.chat))
        model = new_model(settings.tiny, tokenizer, settings.sft.seed)
    else:
        tokenizer = AutoTokenizer.from_pretrained(settings.base)
        model = AutoModelForCausalLM.from_pretrained(settings.base, dtype="float32")
    chat = Chat(tokenizer, settings.chat)
    examples = []
    for demonstration in demonstrations:
        ids, ours = encode(chat, demonstration)
        examples.append(Example(ids=ids, ours=ours))
    train(model, examples, settings.sft, report)
    output = Path(settings.output)
    model.generation_config.eos_token_id = list(chat.stop_ids)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "ORIGIN").write_text(origin(settings))
    return output


def origin(settings: ColdStartSettings) -> str:
    """What made a model: the recipe and the versions that its bits depend on."""
    packages = ("torch", "transformers", "tokenizers", "reasoning-gym")
    made_with = ", ".join(f"{name} {version(name)}" for name in packages)
    source = f"the weights of {settings.base}" if settings.base else "nothing: no weights or text of other models"
    return (
        f"Made by `rocstar sft` from {source},\n"
        f"by supervised fine-tuning on {settings.num_demonstrations} demonstrations that were computed from\n"
        "reasoning-gym items and executed by the sandbox. The recipe, with its defaults:\n\n"
        f"{json.dumps(settings.model_dump(exclude={'output'}), indent=1)}\n\n"
        f"With {made_with}; {torch.get_num_threads()} thread(s). The same versions, processor and threads\n"
        "give the same weights again; others give weights that do the same.\n"
    )


def make_demonstrations(settings: ColdStartSettings, execute: Execute) -> list[Demonstration]:
    """The recipe's demonstrations, from problems of the training split."""
    stream = ProblemStream(settings.problems, settings.sft.seed)
    return [
        demonstrate(
            settings.demonstrations,
            settings.chat.tool_name,
            stream.at(index).problem,
            stream.item_at(index),
            index,
            execute,
            part=index / settings.num_demonstrations,
        )
        for index in range(settings.num_demonstrations)
    ]


def texts(demonstrations: list[Demonstration], chat: ChatSettings) -> list[str]:
    """What a tokenizer for these demonstrations has to encode."""
    found = []
    for demonstration in demonstrations:
        found.append("user\n" + chat.user.replace("{problem}", demonstration.problem))
        found += [chat.generation_prefix + turn for turn in demonstration.turns]
        found += [chat.observation_open + text + chat.observation_close for text in demonstration.observations]
        found.append("assistant\n")
    return found
