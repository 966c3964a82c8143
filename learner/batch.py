"""From a recorded batch to what each rank trains: the plan, the learner's own check, padded micro-batches.

Consumes    Batch (headers, known to every rank) and the trajectories of this rank's share
Produces    StepPlan (the same on every rank), MicroBatch arrays, token ages
Waits for   nothing: pure functions on numpy arrays; no torch, no sockets
Invariant   the plan follows from the batch, the number of ranks and the token budget alone, so all ranks agree on it
            without a word; every rank has the same number of micro-batches (fillers carry no loss); the global token
            count N is the sum over the headers, whatever the split

Legend of suffixes: B rows of a micro-batch, T columns (its longest trajectory), M loss tokens, L one trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from buffer.schema import Batch, BatchGroup, RolloutKey, Trajectory
from learner.advantage import group_advantages
from learner.settings import LossSettings


class StalenessError(RuntimeError):
    """A batch breaks the staleness promise; the message carries group, base, deadline, step and token version."""


class BatchError(RuntimeError):
    """A batch's trajectories are not what its headers say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Who trains what in a step.

    Example (2 ranks, 3 trajectories of group 7):
        StepPlan(step=4, num_loss_tokens=90, shares=((((7, 0),), ((7, 2),)), (((7, 5),), ())), loss_tokens=(40, 30))
    """

    step: int
    num_loss_tokens: int
    """N: sampled tokens of the whole step over all ranks"""
    shares: tuple[tuple[tuple[RolloutKey, ...], ...], ...]
    """[rank][micro-batch] the rollouts in it; an empty one is a filler"""
    loss_tokens: tuple[int, ...]
    """[micro-batch] most loss tokens any rank has in it: ranks that shard weights must score in equally many chunks"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """One forward pass: rows padded on the right, which causal attention never looks at."""

    ids_BT: npt.NDArray[np.int64]
    index_M: npt.NDArray[np.int64]
    """where in the flattened [B*T] rows the hidden state stands that predicts each loss token"""
    targets_M: npt.NDArray[np.int64]
    engine_logp_M: npt.NDArray[np.float32]
    advantage_M: npt.NDArray[np.float32]
    mask_M: npt.NDArray[np.float32]
    """1 on loss tokens, 0 on a filler's only entry"""
    most_loss_tokens: int
    """most loss tokens any rank has in its micro-batch of this number"""


def plan_step(batch: Batch, world: int, micro_batch_tokens: int) -> StepPlan:
    """Split a batch over ranks, balanced by length, and each share into micro-batches within the token budget."""
    lengths = {
        (group.group, rollout): (num_tokens, num_output_tokens)
        for group in batch.groups
        for rollout, num_tokens, num_output_tokens in zip(
            group.rollouts, group.num_tokens, group.num_output_tokens, strict=True
        )
    }
    if not lengths:
        raise BatchError(f"the batch of step {batch.step} holds no trajectory: there is nothing to train")
    longest_first = sorted(lengths, key=lambda key: (-lengths[key][0], key))
    shares = [_pack(share, lengths, micro_batch_tokens) for share in _balance(longest_first, lengths, world)]
    by_micro = list(zip_longest(*shares, fillvalue=()))  # [micro-batch][rank]
    return StepPlan(
        step=batch.step,
        num_loss_tokens=sum(num_output_tokens for _, num_output_tokens in lengths.values()),
        shares=tuple(zip(*by_micro, strict=True)),
        loss_tokens=tuple(max(sum(lengths[key][1] for key in keys) for keys in micro) for micro in by_micro),
    )


def _balance(
    longest_first: Sequence[RolloutKey], lengths: Mapping[RolloutKey, tuple[int, int]], world: int
) -> list[list[RolloutKey]]:
    """Longest first, each to the rank with the fewest tokens so far (the lower rank when equal)."""
    shares: list[list[RolloutKey]] = [[] for _ in range(world)]
    tokens = [0] * world
    for key in longest_first:
        rank = min(range(world), key=lambda r: (tokens[r], r))
        shares[rank].append(key)
        tokens[rank] += lengths[key][0]
    return shares


def _pack(
    share: Sequence[RolloutKey], lengths: Mapping[RolloutKey, tuple[int, int]], micro_batch_tokens: int
) -> list[tuple[RolloutKey, ...]]:
    """Neighbours in length together, as many as fit when padded to the longest, which comes first."""
    micros: list[list[RolloutKey]] = []
    for key in share:
        if micros and (len(micros[-1]) + 1) * lengths[micros[-1][0]][0] <= micro_batch_tokens:
            micros[-1].append(key)
        else:
            micros.append([key])
    return [tuple(micro) for micro in micros]


def check_share(batch: Batch, step: int, trajectories: Sequence[Trajectory]) -> None:
    """The learner's own check, before a token is trained: right step, promise kept, trajectories as announced.

    The bound is the one the ticket was issued with: base <= every token's version, and step <= deadline. Together
    they make every age at most deadline - base, the max_staleness at issue.

    Raises:
        StalenessError: a token is older than promised, or younger than the weights it is to train.
        BatchError: step, lengths or arrays differ from the headers.
    """
    if batch.step != step:
        raise BatchError(f"asked for the batch of step {step}, got that of step {batch.step}")
    groups = {group.group: group for group in batch.groups}
    for group in batch.groups:
        if not group.base <= step <= group.deadline:
            raise StalenessError(
                f"group {group.group}: base {group.base}, deadline {group.deadline}, but step {step} is to train it"
            )
    for trajectory in trajectories:
        if trajectory.group not in groups:
            raise BatchError(f"group {trajectory.group} is not in the batch of step {step}")
        _check_trajectory(groups[trajectory.group], step, trajectory)


def _check_trajectory(group: BatchGroup, step: int, trajectory: Trajectory) -> None:
    name = f"group {trajectory.group}, rollout {trajectory.rollout}"
    if trajectory.rollout not in group.rollouts:
        raise BatchError(f"{name} is not among the kept rollouts {group.rollouts} of step {step}")
    place = group.rollouts.index(trajectory.rollout)
    sampled_L = trajectory.sampled
    shapes = {array.shape for array in (trajectory.ids, sampled_L, trajectory.logprobs, trajectory.versions)}
    if shapes != {(group.num_tokens[place],)}:
        raise BatchError(f"{name}: arrays of shapes {sorted(shapes)}, announced were {group.num_tokens[place]} tokens")
    if int(sampled_L.sum()) != group.num_output_tokens[place] or bool(sampled_L[0]):
        raise BatchError(
            f"{name}: {int(sampled_L.sum())} sampled tokens (the first token {'is' if sampled_L[0] else 'is not'} one),"
            f" announced were {group.num_output_tokens[place]}, and a prompt comes first"
        )
    if not np.isfinite(trajectory.logprobs[sampled_L]).all():
        raise BatchError(f"{name}: the engine's log-prob of a sampled token is not finite")
    versions = trajectory.versions[sampled_L]
    wrong = versions[(versions < group.base) | (versions > step)]
    if wrong.size:
        version = int(wrong[0])
        raise StalenessError(
            f"{name}: base {group.base}, deadline {group.deadline}, step {step}, but a token was sampled by version "
            f"{version}: age {step - version}, promised are 0 to {group.deadline - group.base}"
        )


def token_ages(step: int, trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """Age of each sampled token (step minus version) -> number of tokens."""
    if not trajectories:
        return {}
    ages = step - np.concatenate([trajectory.versions[trajectory.sampled] for trajectory in trajectories])
    values, counts = np.unique(ages, return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def batch_advantages(batch: Batch, loss: LossSettings) -> dict[RolloutKey, float]:
    """Advantage of every rollout of a batch, group by group."""
    return {
        (group.group, rollout): float(advantage)
        for group in batch.groups
        for rollout, advantage in zip(group.rollouts, group_advantages(group.rewards, loss.advantage_std), strict=True)
    }


def build_micro_batches(
    plan: StepPlan,
    rank: int,
    trajectories: Sequence[Trajectory],
    advantages: Mapping[RolloutKey, float],
) -> list[MicroBatch]:
    """This rank's micro-batches, in the plan's order."""
    by_key = {(trajectory.group, trajectory.rollout): trajectory for trajectory in trajectories}
    missing = [key for micro in plan.shares[rank] for key in micro if key not in by_key]
    if missing:
        raise BatchError(f"step {plan.step}, rank {rank}: the buffer returned no trajectory for {missing[:8]}")
    return [
        _micro_batch([by_key[key] for key in keys], [advantages[key] for key in keys], most) if keys else _filler(most)
        for keys, most in zip(plan.shares[rank], plan.loss_tokens, strict=True)
    ]


def _micro_batch(rows: Sequence[Trajectory], advantages: Sequence[float], most_loss_tokens: int) -> MicroBatch:
    width = max(row.ids.size for row in rows)
    ids_BT = np.zeros((len(rows), width), dtype=np.int64)
    index, targets, logps, advs = [], [], [], []
    for b, (row, advantage) in enumerate(zip(rows, advantages, strict=True)):
        ids_BT[b, : row.ids.size] = row.ids
        positions = np.flatnonzero(row.sampled)
        index.append(b * width + positions - 1)
        targets.append(row.ids[positions])
        logps.append(row.logprobs[positions])
        advs.append(np.full(positions.size, advantage))
    if sum(part.size for part in index) == 0:
        return _filler(most_loss_tokens)
    return MicroBatch(
        ids_BT=ids_BT,
        index_M=np.concatenate(index).astype(np.int64),
        targets_M=np.concatenate(targets).astype(np.int64),
        engine_logp_M=np.concatenate(logps).astype(np.float32),
        advantage_M=np.concatenate(advs).astype(np.float32),
        mask_M=np.ones(sum(part.size for part in index), dtype=np.float32),
        most_loss_tokens=most_loss_tokens,
    )


def _filler(most_loss_tokens: int) -> MicroBatch:
    """A forward and backward pass that touches every parameter and adds nothing."""
    zero = np.zeros(1, dtype=np.int64)
    nought = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        ids_BT=np.zeros((1, 2), dtype=np.int64),
        index_M=zero,
        targets_M=zero,
        engine_logp_M=nought,
        advantage_M=nought,
        mask_M=nought,
        most_loss_tokens=max(most_loss_tokens, 1),
    )
