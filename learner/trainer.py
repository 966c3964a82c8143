"""One rank's training, without sockets: recorded batches in, versions out.

Consumes    a batch and this rank's trajectories
Produces    a step and its figures; checkpoints; packed weights; the export
Waits for   the other ranks: every method is entered by all of them, in the same order
Unblocked by  the command that rank 0 told all (learner.learner)
Invariant   version k + 1 follows from version k, the batch of step k and the settings; the learner's own check runs
            before a token is trained; totals tell of the present weights, whatever was restarted in between
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from buffer.schema import Batch, RolloutKey, Trajectory
from learner import checkpoint
from learner.batch import StepPlan, batch_advantages, build_micro_batches, check_share, plan_step, token_ages
from learner.checkpoint import CheckpointError, CheckpointInfo, DamagedError, Totals
from learner.device import DeviceChoices, device_choices, device_kind
from learner.engine import TrainEngine, learning_rate
from learner.export import export_model
from learner.loss import loss_figures
from learner.ranks import Ranks
from learner.settings import LearnerSettings, LossSettings, PublishSettings
from learner.weights import Packed, pack

_WIRE_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """What training depends on."""

    run: str
    """wire id of the run"""
    model: Path
    """directory of the model that training starts from: version 0"""
    directory: Path
    """of the run; holds checkpoints/ and export/"""
    temperature: float
    """of sampling: log-probs are compared at it"""
    learner: LearnerSettings
    loss: LossSettings
    publish: PublishSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step, as logged; the same on every rank except `train_s`."""

    step: int
    figures: Mapping[str, float]
    """of the loss, see learner.loss.loss_figures; also grad_norm, lr, reward_mean, tokens, loss_tokens, ..."""
    ages: Mapping[int, int]
    """age of a loss token in steps -> number of tokens"""
    totals: Totals
    """after this step"""
    train_s: float


class Trainer:
    """Owns the engine. All calls come from one thread."""

    def __init__(self, spec: TrainerSpec, *, rank: int, world: int) -> None:
        settings = spec.learner
        device = device_choices(device_kind(), settings.dtype)
        self._spec = spec
        self._checkpoints = spec.directory / "checkpoints"
        self._ranks = Ranks(rank=rank, world=world, backend=device.backend, timeout_s=settings.rank_timeout_s)
        self._engine = _engine(spec, self._ranks, device)
        self.totals = Totals()
        self.damaged: list[str] = []
        """what is wrong with each checkpoint that `restore` passed over"""

    @property
    def version(self) -> int:
        """Steps in the weights."""
        return self.totals.steps

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def restore(self, next_step: float = math.inf) -> int:
        """Load the newest checkpoint that verifies; returns its step, 0 when there is none.

        One of a later version than `next_step`, the buffer's, is passed over as well: this directory is a copy, and
        the batches that it was trained on came after what was copied of the buffer.

        Raises:
            CheckpointError: it was written by another release, other ranks or another run: that is something to change,
            not damage.
        """
        spec = self._spec
        for step in reversed(self._ranks.tell(checkpoint.complete_steps(self._checkpoints))):
            directory = checkpoint.step_directory(self._checkpoints, step)
            try:
                if step > next_step:
                    raise DamagedError(
                        f"{directory} is of a later time than the buffer's record, whose next step is {next_step}"
                    )
                info = self._verify(directory)
            except DamagedError as error:
                self.damaged.append(str(error))
                self._disown(directory)
                continue
            checkpoint.require_same_shape(
                directory, info, run=spec.run, ranks=spec.learner.ranks, zero_stage=spec.learner.zero_stage
            )
            self._engine.load(directory)
            self.totals = info.totals
            break
        for message in self.damaged:
            print(f"learner: passed over: {message}", flush=True)
        if self.damaged and self.version == 0:
            print(
                f"learner: no checkpoint is left, {len(self.damaged)} are damaged: starting again from version 0, the "
                "model itself; every step is recomputed with its recorded batch",
                flush=True,
            )
        return self.version

    def lost(self, step: int, why: str) -> CheckpointError:
        """The recorded batch of `step` is gone, so that the version that was restored leads nowhere."""
        passed = "; ".join(self.damaged) or "none"
        return CheckpointError(
            f"step {step} can't be computed again from version {self.version}: {why}. Checkpoints passed over as "
            f"damaged: {passed}. Put a whole checkpoint of a later version into {self._checkpoints} from a copy, "
            "copy the run again with `rocstar copy` where this is a copy, or start a new run from an exported model"
        )

    def _disown(self, directory: Path) -> None:
        """Not before every rank has read the mark."""
        self._ranks.barrier()
        if self._ranks.rank == 0:
            checkpoint.disown(directory)

    def _verify(self, directory: Path) -> CheckpointInfo:
        """Ranks read a part each; all of them come to the same verdict."""
        info, announced = checkpoint.read_mark(directory)
        parts = self._ranks.gather(checkpoint.file_sums(directory, part=self._ranks.rank, parts=self._ranks.world))
        checkpoint.verify(directory, announced, {name: value for part in parts for name, value in part.items()})
        return info

    def plan(self, batch: Batch) -> StepPlan:
        """Who trains what of `batch`; the same on every rank."""
        return plan_step(batch, self._ranks.world, self._spec.learner.micro_batch_tokens)

    def share(self, batch: Batch) -> list[RolloutKey]:
        """The trajectories this rank needs."""
        return [key for micro in self.plan(batch).shares[self._ranks.rank] for key in micro]

    def train(self, batch: Batch, trajectories: Sequence[Trajectory], lr: float | None = None) -> StepReport:
        """Check, then take step `version` on the recorded batch; `lr` as turned for this step, else the recipe's.

        Raises:
            StalenessError: a token breaks the promise.
            BatchError: the batch or a trajectory is not what was announced.
            NonFiniteGradient: the gradient is not finite.
        """
        started_s = time.monotonic()
        step, settings = self.version, self._spec.learner
        check_share(batch, step, trajectories)
        plan = self.plan(batch)
        micros = build_micro_batches(plan, self._ranks.rank, trajectories, batch_advantages(batch, self._spec.loss))
        sums = self._engine.accumulate(micros, plan.num_loss_tokens, self._spec.loss)
        lr = learning_rate(settings, step, lr)
        grad_norm = self._engine.step(lr)
        gathered = self._ranks.gather((sums, token_ages(step, trajectories)))
        ages: Counter[int] = Counter()
        for _, part in gathered:
            ages.update(part)
        figures = loss_figures(
            torch.stack([part.sums_S for part, _ in gathered]).sum(0),
            max(part.max_logprob_diff for part, _ in gathered),
        )
        figures |= _batch_figures(batch, ages) | {"grad_norm": grad_norm, "lr": lr, "micro_batches": len(micros)}
        self.totals = _add(self.totals, figures, ages)
        return StepReport(
            step=step, figures=figures, ages=ages, totals=self.totals, train_s=time.monotonic() - started_s
        )

    def save(self) -> tuple[int, ...]:
        """Write the checkpoint of the present version; returns the steps whose state is at hand from now on.

        Step 0 is among them until enough checkpoints are kept: a restart may still begin from the model itself.
        """
        root, settings, step = self._checkpoints, self._spec.learner, self.version
        directory = Path(self._ranks.tell(str(checkpoint.begin(root, step)) if self._ranks.rank == 0 else None))
        self._engine.save(directory)
        parts = self._ranks.gather(
            checkpoint.file_sums(directory, part=self._ranks.rank, parts=self._ranks.world, sync=True)
        )
        kept: tuple[int, ...] = ()
        if self._ranks.rank == 0:
            info = CheckpointInfo(
                run=self._spec.run,
                step=step,
                ranks=settings.ranks,
                zero_stage=settings.zero_stage,
                totals=self.totals,
            )
            checkpoint.finish(root, info, {name: value for part in parts for name, value in part.items()})
            steps = checkpoint.prune(root, settings.keep_checkpoints)
            kept = tuple(steps) if len(steps) >= settings.keep_checkpoints else (0, *steps)
        result: tuple[int, ...] = self._ranks.tell(kept)
        return result

    def pack(self, lineage: int) -> Packed | None:
        """The present version in buckets, on rank 0; None on the others."""
        if self._ranks.rank != 0:
            for _ in self._engine.weights():
                continue
            return None
        return pack(
            self._engine.weights(),
            lineage=lineage,
            version=self.version,
            bucket_bytes=self._spec.publish.bucket_mib * 2**20,
            dtype=_WIRE_DTYPES[self._spec.publish.dtype],
        )

    def export(self) -> None:
        """Write the present version to export/ in Hugging Face format."""
        target = self._spec.directory / "export" if self._ranks.rank == 0 else None
        export_model(self._engine.weights(), self._spec.model, target)
        self._ranks.barrier()


def _engine(spec: TrainerSpec, ranks: Ranks, device: DeviceChoices) -> TrainEngine:
    return TrainEngine(spec.learner, spec.model, ranks=ranks, device=device, temperature=spec.temperature)


def _batch_figures(batch: Batch, ages: Mapping[int, int]) -> dict[str, float]:
    rewards = [reward for group in batch.groups for reward in group.rewards]
    loss_tokens = sum(ages.values())
    return {
        "groups": len(batch.groups),
        "trajectories": len(rewards),
        "tokens": sum(sum(group.num_tokens) for group in batch.groups),
        "loss_tokens": loss_tokens,
        "reward_mean": sum(rewards) / len(rewards),
        "age_mean": sum(age * count for age, count in ages.items()) / max(loss_tokens, 1),
        "age_max": max(ages, default=0),
    }


def _add(totals: Totals, figures: Mapping[str, float], ages: Mapping[int, int]) -> Totals:
    return Totals(
        steps=totals.steps + 1,
        trajectories=totals.trajectories + int(figures["trajectories"]),
        tokens=totals.tokens + int(figures["tokens"]),
        loss_tokens=totals.loss_tokens + int(figures["loss_tokens"]),
        ages=dict(sorted((Counter(totals.ages) + Counter(ages)).items())),
    )
