"""Every record that crosses the wire or lies on disk: frozen, with units and shapes stated.

Imports     nothing of ours; every package may import this file
Invariant   a record read back equals the record written; changing a field raises SCHEMA
Arrays      token ids are int32, log-probs float32 (numpy); they travel as raw little-endian frames, not in msgpack

A worked example. Group 7, rollout 3, leased for the second time after its first engine died in turn 1:

    Lease(group=7, rollout=3, attempt=2, kind="train", base=4, deadline=6, turns=(turn0,), ...)
    Turn(group=7, rollout=3, attempt=2, turn=1, ..., version_runs=(VersionRun(lineage=1, version=5, num_tokens=31),))
    Finish(group=7, rollout=3, attempt=2, reward=1.0, statuses=("error", "ok"), ...)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

SCHEMA = 2
"""Number of this schema; a peer or a run directory of another number is refused."""

TokenIds: TypeAlias = npt.NDArray[np.int32]
LogProbs: TypeAlias = npt.NDArray[np.float32]
RolloutKey: TypeAlias = tuple[int, int]
"""(group, rollout)"""
Kind: TypeAlias = Literal["train", "eval"]
ExclusionReason: TypeAlias = Literal["prompt", "sandbox", "grading", "failed"]
"""prompt: it leaves no room for the model; sandbox: a call could not be run; grading: an answer could not be graded;
failed: an error of ours"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a group works on: `{"id", "problem", "answer", "source"?, "level"?}`."""

    id: str
    problem: str
    answer: str
    source: str = ""
    level: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRun:
    """`num_tokens` consecutive tokens of a turn, sampled by `version` of `lineage`, as stamped by the engine."""

    lineage: int
    version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One model generation and, if it called the tool, the observation that came back. Key: all four integers."""

    group: int
    rollout: int
    attempt: int
    turn: int
    prompt_ids: TokenIds
    """[P] the rollout's prompt, in turn 0; empty in later turns, whose context is what earlier turns hold"""
    output_ids: TokenIds
    """[T] tokens the model sampled, its end-of-turn token included"""
    logprobs: LogProbs
    """[T] log-probability of each at sampling, full distribution at the sampling temperature"""
    version_runs: tuple[VersionRun, ...]
    """cover the T tokens in order"""
    observation_ids: TokenIds
    """[O] tokens put after the output (observation, template, generation prefix); empty when the rollout ends here"""
    code: str = ""
    """the program the model called the tool with; "" without a call"""
    status: str = ""
    """typed status of the call (sandbox.api.Status); "" without a call"""
    observation: str = ""
    """text of the observation, for people: its middle is left out when it is long. What the model saw are the tokens"""
    generate_s: float = 0.0
    tool_queue_s: float = 0.0
    tool_run_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The score of a completed rollout; its turns are durable already."""

    group: int
    rollout: int
    attempt: int
    reward: float
    verdict: str
    """right | wrong | unparsable | timeout | none (no well-formed answer)"""
    answer: str
    """what was graded; "" when there was none"""
    well_formed: bool
    """the rollout holds at least one well-formed answer"""
    num_answers: int
    num_turns: int
    """assistant turns, all of them"""
    statuses: tuple[str, ...]
    """typed status of each call, in order, malformed calls included"""
    num_output_tokens: int
    num_tokens: int
    """prompt + outputs + observations"""
    end: str
    """answer | no_call | length | turns"""
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """A rollout that could not be finished for reasons that are not the model's; its engine's log has the details."""

    group: int
    rollout: int
    attempt: int
    reason: ExclusionReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One rollout of a ticketed group in the hands of a rollout actor; `turns` are those already durable."""

    group: int
    rollout: int
    attempt: int
    kind: Kind
    base: int
    """the engine's loaded version must be at least this (eval: exactly this)"""
    deadline: int
    """last step that may train the group; -1 for eval"""
    seed: int
    """of this rollout alone, the same in every attempt: for whoever samples rollout by rollout. vLLM engines do not use
    it: they are seeded once a life, see actors.engine.Engine.start"""
    problem: Problem
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupHeaders:
    """A finished (or closed) group as the RoC filter sees it: no payload."""

    group: int
    group_size: int
    """G: how many to keep of the full 2G"""
    num_rollouts: int
    """2G, as issued; `rollouts` may be shorter when some were excluded or timed out"""
    rollouts: tuple[Finish, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The RoC filter's word on a group: rollouts to keep, or a drop with its reason."""

    group: int
    keep: tuple[int, ...]
    """rollout numbers, ascending; empty for a drop"""
    drop_reason: str = ""
    """all_right | all_wrong | all_equal | too_few | no_negative... ; "" when kept"""
    p_err: tuple[float, ...] = ()
    """by position in GroupHeaders.rollouts"""
    p_format: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGroup:
    """A group as taken for a step."""

    group: int
    base: int
    deadline: int
    rollouts: tuple[int, ...]
    """kept rollout numbers, ascending"""
    rewards: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """length of each kept trajectory"""
    num_output_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch of step `step`: durable when taken; asking again returns the same record."""

    step: int
    groups: tuple[BatchGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """A kept rollout's tokens as the learner trains them, L long."""

    group: int
    rollout: int
    ids: TokenIds
    """[L]"""
    sampled: npt.NDArray[np.bool_]
    """[L] True on tokens the model sampled: the loss mask"""
    logprobs: LogProbs
    """[L] engine log-prob on sampled tokens, 0 elsewhere"""
    versions: npt.NDArray[np.int32]
    """[L] version that sampled the token, -1 elsewhere"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The buffer's answer to HELLO."""

    epoch: int
    """this life of the peer; messages of earlier epochs are refused as fenced. For the learner it is its lineage"""
    acked: int
    published_lineage: int
    """lineage and version of the newest publication on record; -1, -1 before the first"""
    published_version: int
    next_step: int
    """first step without a recorded batch"""
    state: str
    """running | evaluating | done"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Where a tensor lies in the concatenation of a version's buckets."""

    name: str
    """Hugging Face parameter name"""
    dtype: str
    """as in safetensors: F32, BF16, F16"""
    shape: tuple[int, ...]
    offset: int
    """bytes"""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest:
    """What a published version consists of."""

    lineage: int
    version: int
    bucket_bytes: tuple[int, ...]
    """size of each bucket, in order"""
    bucket_crc32: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    checksum: int
    """crc32 of the concatenated bucket checksums; engines acknowledge it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An engine's acknowledgement of a version."""

    lineage: int
    version: int
    checksum: int
    pause_s: float
    """how long the engine did not generate for it"""
