"""What the tuner's parts hand to each other.

Produces    recorded work, the setting of a simulation, the model, its outcome: frozen records
Waits for   nothing
Invariant   durations named alone_s are those of an activity that has the cores it wants; units are in the names
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.roc import RocSettings
from buffer.schema import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The dials that a simulation varies."""

    max_staleness: int
    groups_per_step: int
    group_size: int
    """G, kept; generated are `num_rollouts`"""
    concurrency: int
    """of each engine"""
    engines: int = 1
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnWork:
    """One turn as it was recorded."""

    num_tokens: int
    """sampled"""
    given_tokens: int
    """of the context that the engine was given"""
    context_tokens: int
    """of the rollout once the turn is over"""
    called: bool
    run_s: float
    """of its call, without the wait for a worker"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWork:
    """One finished rollout."""

    turns: tuple[TurnWork, ...]
    finish: Finish
    """its header, as RoC sees it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWork:
    """One group that RoC decided on."""

    num_rollouts: int
    rollouts: tuple[RolloutWork, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One learner step, from its batch to its version's publication."""

    num_tokens: int
    """of the batch's trajectories"""
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapTime:
    """One version on its way to one engine."""

    receive_s: float
    """from its publication to the pause: the engine generates meanwhile"""
    pause_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RatePoint:
    """Of an engine's measured curve."""

    concurrency: int
    token_s: float
    """wall seconds per token of one generation, at so many at once"""
    weight_s: float
    """seconds that it was measured over"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A host, and what it spends on the run's roles."""

    cores: float
    others: float
    """cores in use by what is no role of the run"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a run measured over its window."""

    setting: Setting
    roc: RocSettings
    seed: int
    groups: tuple[GroupWork, ...]
    steps: tuple[StepTime, ...]
    swaps: tuple[SwapTime, ...]
    rates: tuple[RatePoint, ...]
    groups_per_min: float
    mean_age: float
    token_cpu_s: float
    """CPU seconds of engines per sampled token"""
    call_cpu_s: float
    """of sandboxes per call, the grading of answers included"""
    store_token_cpu_s: float
    """of buffer and filter per sampled token"""
    step_cpu_s: float
    """of a learner rank, which computes in one thread, per step"""
    engine_threads: int
    computed_share: float
    """of the contexts' tokens, that engines computed; the others lay in their prefix caches"""
    recomputes: bool
    """a new version makes engines compute the contexts anew that they hold"""
    rollout_rest_s: float
    """of a rollout's life neither generating nor calling"""
    decide_s: float
    """from a group's last score to RoC's word on record"""
    workers: int
    kv_tokens: int
    longest_tokens: int
    """of a rollout: nothing is forecast to grow beyond it"""
    machines: tuple[Machine, ...]
    places: Mapping[str, int]
    """role kind -> index of its machine"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """What a pass takes of an engine that has the cores it wants; it makes a token of each generation."""

    fixed_s: float
    token_s: float
    """for each token in it: those sampled, and those of contexts"""

    def of(self, passes: float, tokens: float) -> float:
        return self.fixed_s * passes + self.token_s * tokens


@dataclass(slots=True)
class Generated:
    """Of an engine's generations that were as many at once, all together."""

    tokens: float = 0.0
    wall_s: float = 0.0
    passes: float = 0.0
    """while they lasted"""
    pass_tokens: float = 0.0
    """in those"""

    def add(self, other: Generated) -> None:
        self.tokens += other.tokens
        self.wall_s += other.wall_s
        self.passes += other.passes
        self.pass_tokens += other.pass_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a simulation needs; `fit.py` makes it."""

    work: Recorded
    pass_time: PassTime
    engine_cores: float
    """that one engine keeps busy while it generates alone"""
    beside_cpu_s: float
    """CPU seconds of its process per sampled token, beside the threads that generate"""
    pause_share: float
    """of a recorded pause: what it takes alone"""
    step_fixed_s: float
    """of a learner step alone on one rank"""
    step_token_s: float
    learner_share: float
    """of a step's alone seconds that need a core"""
    learner_cores: float
    """that a rank keeps busy in that share"""
    call_cpu_share: float
    """CPU seconds over recorded seconds of calls that compute; 0: they wait, and all compute equally long"""
    rest_s: float
    """of a rollout's life, neither generating nor calling nor waiting for the engine's process"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulation came to, over its measured steps."""

    groups_per_min: float
    mean_age: float
    max_age: int
    step_wall_s: float
    """mean, of the learner"""
    learner_waits: float
    """share of the time"""
    generating: float
    """generations at once, over all engines, mean over time"""
    cores_used: float
    """of the fullest machine, share"""
    engine_s: float = 0.0
    """alone, of an engine's passes, per sampled token"""
    beside_s: float = 0.0
    """mean, of a rollout, with the engine's process beside its threads"""
    pause_s: float = 0.0
    """mean, of an engine for a version"""
    loading_s: float = 0.0
    """alone, of such pauses, per sampled token"""
    measured: Mapping[int, Generated] = field(default_factory=dict)
    """by concurrency: what a real engine measures of itself, and why it took so long"""
