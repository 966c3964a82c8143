"""The one tree of settings: every table of a recipe, and what must hold between tables.

Consumes    the settings of each package
Produces    `Recipe`, and the settings that the buffer and the learner are given
Waits for   nothing; imports neither torch, vLLM nor Ray
Invariant   a dial stands in one table only; a tree that exists could be run
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.chat import ChatSettings
from actors.problems import ProblemSettings
from actors.roc import RocSettings
from actors.settings import RolloutSettings, WeightsSettings
from buffer.settings import BufferSettings
from learner.settings import LearnerSettings, LossSettings, PublishSettings
from sandbox.settings import SandboxSettings


def _of(owner: type[BaseModel], name: str) -> Any:
    """The field `name` of another package's settings: its default, bounds and words stay there."""
    return copy(owner.model_fields[name])


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunTable(_Table):
    """[run]"""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """name of the run: letters, digits, dot, dash, underscore"""
    directory: str = ""
    """where the run is kept; empty: runs/NAME"""
    seed: int = _of(BufferSettings, "seed")
    steps: int = _of(BufferSettings, "steps")
    drain_s: float = Field(default=30.0, gt=0)
    """seconds that roles are given to end in good order; 30 for all of them where Ray's head is lost"""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """seconds in which nodes must have joined; in which a role must have started, waits for other roles not counted"""
    max_restarts: int = Field(default=100, ge=0)
    """times that Ray restarts one role in a run"""


class ModelTable(_Table):
    """[model]"""

    path: str
    """folder in Hugging Face format: config.json, weights, tokenizer with a chat template"""


class StalenessTable(_Table):
    """[staleness]"""

    max_staleness: int = _of(BufferSettings, "max_staleness")


class GroupsTable(_Table):
    """[groups]"""

    groups_per_step: int = _of(BufferSettings, "groups_per_step")
    group_size: int = _of(BufferSettings, "group_size")


class BufferTable(_Table):
    """[buffer]"""

    lease_s: float = _of(BufferSettings, "lease_s")
    heartbeat_s: float = _of(BufferSettings, "heartbeat_s")
    dead_after_s: float = _of(BufferSettings, "dead_after_s")
    group_timeout_s: float = _of(BufferSettings, "group_timeout_s")
    segment_mib: int = _of(BufferSettings, "segment_mib")
    keep_segments: bool = _of(BufferSettings, "keep_segments")
    port: int = _of(BufferSettings, "port")


class SandboxTable(SandboxSettings):
    """[sandbox]"""

    nodes: int = Field(default=1, ge=1, le=1024)
    """Sandbox roles, each with workers of its own."""


class WeightsTable(WeightsSettings):
    """[weights]"""

    bucket_mib: int = _of(PublishSettings, "bucket_mib")
    max_mib_per_s: float = _of(PublishSettings, "max_mib_per_s")


class EvaluationTable(_Table):
    """[evaluation] runs on the held-out problems, of which there are problems.num_heldout."""

    at_start: bool = _of(BufferSettings, "evaluation_at_start")
    at_end: bool = _of(BufferSettings, "evaluation_at_end")


class MetricsTable(_Table):
    """[metrics]"""

    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """port on loopback where the driver serves Prometheus metrics; 0: nowhere"""
    tensorboard: bool = False
    """whether the driver writes RUN/tensorboard, the learner's figures and the run's rates at each step"""


class Recipe(_Table):
    """A whole run; all but `[model]` and `[problems]` has defaults."""

    run: RunTable = RunTable()
    model: ModelTable
    problems: ProblemSettings
    chat: ChatSettings = ChatSettings()
    staleness: StalenessTable = StalenessTable()
    groups: GroupsTable = GroupsTable()
    roc: RocSettings = RocSettings()
    rollout: RolloutSettings = RolloutSettings()
    sandbox: SandboxTable = SandboxTable()
    buffer: BufferTable = BufferTable()
    weights: WeightsTable = WeightsTable()
    learner: LearnerSettings = LearnerSettings()
    loss: LossSettings = LossSettings()
    evaluation: EvaluationTable = EvaluationTable()
    metrics: MetricsTable = MetricsTable()

    @property
    def directory(self) -> str:
        """Of the run, as the user wrote it or as it follows from the name."""
        return self.run.directory or f"runs/{self.run.name}"

    def located(self) -> Recipe:
        """The same with absolute paths, so that it means the same from anywhere on this host."""
        run = self.run.model_copy(update={"directory": str(Path(self.directory).absolute())})
        model = self.model.model_copy(update={"path": str(Path(self.model.path).absolute())})
        problems = self.problems
        if problems.source in ("jsonl", "parquet") and problems.path is not None:
            problems = problems.model_copy(update={"path": str(Path(problems.path).absolute())})
        return self.model_copy(update={"run": run, "model": model, "problems": problems})

    @property
    def num_rollouts(self) -> int:
        """Generated per group: 2G, or G without RoC."""
        return self.groups.group_size * (1 if self.roc.mode == "off" else 2)

    def buffer_settings(self) -> BufferSettings:
        """What the buffer is given."""
        return BufferSettings(
            seed=self.run.seed,
            steps=self.run.steps,
            num_rollouts=self.num_rollouts,
            uncorrected=self.loss.correction == "none",
            ack_timeout_s=self.weights.ack_timeout_s,
            evaluation_problems=self.problems.num_heldout,
            evaluation_at_start=self.evaluation.at_start and self.problems.num_heldout > 0,
            evaluation_at_end=self.evaluation.at_end and self.problems.num_heldout > 0,
            **self.staleness.model_dump(),
            **self.groups.model_dump(),
            **self.buffer.model_dump(),
        )

    def publish_settings(self) -> PublishSettings:
        """What the learner is told of publishing: versions travel in the engines' dtype."""
        weights = self.weights
        return PublishSettings(
            bucket_mib=weights.bucket_mib, max_mib_per_s=weights.max_mib_per_s, dtype=self.rollout.dtype
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        self.buffer_settings()
        self.roc.require(self.groups.group_size)
        self.loss.refuse_uncorrected(self.staleness.max_staleness)
        for fault in _faults(self):
            raise ValueError(fault)
        return self


def _faults(recipe: Recipe) -> list[str]:
    """What no single table can see."""
    buffer, rollout, groups = recipe.buffer, recipe.rollout, recipe.groups
    faults = []
    kept = groups.groups_per_step * groups.group_size
    if recipe.learner.ranks > kept:
        faults.append(
            f"learner.ranks = {recipe.learner.ranks} exceeds the {kept} trajectories of a step (groups_per_step x "
            f"group_size): some ranks would never train; lower it to {kept}"
        )
    if groups.group_size < 2:
        faults.append(
            "groups.group_size = 1: an advantage compares the rollouts of a group, so nothing would ever be learned; "
            "set it to 2 or more"
        )
    if buffer.lease_s <= buffer.dead_after_s:
        faults.append(
            f"buffer.lease_s = {buffer.lease_s:g} must exceed buffer.dead_after_s = {buffer.dead_after_s:g}: leases of "
            "engines that live would lapse before a dead one is noticed"
        )
    if buffer.group_timeout_s <= buffer.lease_s:
        faults.append(
            f"buffer.group_timeout_s = {buffer.group_timeout_s:g} must exceed buffer.lease_s = {buffer.lease_s:g}: a "
            "group whose engine died would be closed before its rollouts were leased again"
        )
    if recipe.chat.max_observation_tokens >= rollout.max_length:
        faults.append(
            f"chat.max_observation_tokens = {recipe.chat.max_observation_tokens} leaves no room in rollout.max_length "
            f"= {rollout.max_length}: lower the one or raise the other"
        )
    return faults
