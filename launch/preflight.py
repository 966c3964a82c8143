"""What is checked before anything starts: a mistake costs a second, not an hour.

Consumes    a recipe
Produces    nothing, or `ConfigError`
Waits for   nothing; torch, vLLM and Ray are not imported
Invariant   nothing is written
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from actors.problems import ProblemError, ProblemStream
from launch.config import ConfigError
from launch.derive import Shape, derive, read_shape
from launch.environment import detect_device
from launch.tree import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What the checks have read."""

    shape: Shape
    problems: ProblemStream
    device: str
    """of the engines; auto: that of hosts that are not known yet"""


def check(recipe: Recipe, *, resume: bool = False, address: str = "") -> Checked:
    """All checks, cheapest first. What depends on the engines' host is checked where that is this one: no `address`.

    Raises:
        ConfigError: the first that fails, with the remedy.
    """
    check_directory(recipe, resume=resume)
    check_ports(recipe)
    shape = check_model(recipe)
    device: str = recipe.rollout.device
    if device == "auto" and not address:
        device = detect_device()
    check_sizes(recipe, shape, device)
    check_chat(recipe)
    return Checked(shape=shape, problems=check_problems(recipe), device=device)


FIXED = (
    "run.seed",
    "model.path",
    "problems",
    "groups.groups_per_step",
    "groups.group_size",
    "num_rollouts",
    "learner.ranks",
    "learner.zero_stage",
)
"""What a run's record is made with; num_rollouts follows from roc.mode."""


def check_fixed(before: Recipe, now: Recipe) -> None:
    """A resume may change a setting, but none that the run's record depends on.

    Raises:
        ConfigError: the first that differs.
    """
    for name in FIXED:
        had, wants = attrgetter(name)(before), attrgetter(name)(now)
        if had != wants:
            raise ConfigError(
                f"{name} = {wants}, the run in {now.directory} has {had}: it is fixed for a run; leave it, or start "
                "another run in another run.directory"
            )


def check_directory(recipe: Recipe, *, resume: bool) -> None:
    """A new run needs a place of its own."""
    directory = Path(recipe.directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"run.directory = {recipe.directory}: is a file")
    holds = (directory / "buffer").exists()  # one that never got so far may be started anew
    if holds and not resume:
        raise ConfigError(
            f"run.directory = {recipe.directory}: holds another run; go on with `rocstar resume "
            f"{recipe.directory}`, or name another place with --set run.directory=PATH"
        )
    parent = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.directory = {recipe.directory}: {parent} can't be written")


def check_ports(recipe: Recipe) -> None:
    """A fixed port must be free."""
    for field, port in (
        ("buffer.port", recipe.buffer.port),
        ("metrics.prometheus_port", recipe.metrics.prometheus_port),
    ):
        if port == 0:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                what = "is in use" if error.errno == errno.EADDRINUSE else f"can't be bound ({error.strerror})"
                raise ConfigError(f"{field} = {port} {what} on 127.0.0.1: choose another, or 0 for any") from error
    if recipe.buffer.port and recipe.buffer.port == recipe.metrics.prometheus_port:
        raise ConfigError(f"buffer.port and metrics.prometheus_port are both {recipe.buffer.port}: choose two")


def check_model(recipe: Recipe) -> Shape:
    """A folder with configuration, weights and a tokenizer that has a chat template."""
    folder = Path(recipe.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {recipe.model.path}: no such folder; a model is a folder in Hugging Face format "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model.path = {recipe.model.path}: holds no {name}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path = {recipe.model.path}: holds no *.safetensors weights")
    try:
        return read_shape(folder)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model.path = {recipe.model.path}: config.json is not that of a dense decoder that "
            f"RoCstar knows ({error!r})"
        ) from error


def check_sizes(recipe: Recipe, shape: Shape, device: str) -> None:
    """What the model and the KV cache can hold."""
    rollout = recipe.rollout
    if rollout.max_length > shape.max_length_tokens:
        raise ConfigError(
            f"rollout.max_length = {rollout.max_length} exceeds the model's {shape.max_length_tokens} positions "
            f"(max_position_embeddings): lower it to {shape.max_length_tokens}"
        )
    derived = derive(recipe, shape, device)
    if derived.full_length_rollouts_per_engine == 0:
        per_token = shape.kv_bytes_per_token(rollout.dtype) / rollout.tensor_parallel
        raise ConfigError(
            f"rollout.kv_cache_mib holds {derived.kv_tokens_per_engine} tokens, less than one rollout of "
            f"rollout.max_length = {rollout.max_length}: it would wait for ever; raise it to "
            f"{int(rollout.max_length * per_token / (1 << 20)) + 1}, or lower rollout.max_length"
        )


def check_chat(recipe: Recipe) -> None:
    """The tokenizer's template must be one that a conversation can be read off."""
    from actors.chat import Chat

    try:
        chat = Chat(_tokenizer(Path(recipe.model.path)), recipe.chat)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path = {recipe.model.path}: {error}") from error
    room = recipe.rollout.max_length - len(chat.prompt_ids("")) - 1
    if room < 1:
        raise ConfigError(
            f"rollout.max_length = {recipe.rollout.max_length} is filled by the chat template and chat.user alone: "
            f"raise it by more than {-room}"
        )


def _tokenizer(folder: Path) -> Any:
    """Without torch where the folder allows it: AutoTokenizer imports it, which takes seconds."""
    import transformers

    transformers.logging.set_verbosity_error()
    if (folder / "tokenizer.json").is_file():
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check_problems(recipe: Recipe) -> ProblemStream:
    """The source can be read, and has problems to train on beside the held-out ones."""
    try:
        stream = ProblemStream(recipe.problems, recipe.run.seed)
        stream.at(0)
    except (ProblemError, IndexError) as error:
        raise ConfigError(str(error)) from error
    return stream
