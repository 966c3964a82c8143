"""What the buffer needs to know of a run: the staleness dial, the sizes of a step, and its own deadlines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

LIVE: JsonDict = {"live": True}
"""mark of a setting that may be turned while the run goes on (buffer/dials.py)"""
MAX_STALENESS = 1000
"""a greater S is a mistake: so many steps' worth of groups would be in the system"""


class BufferSettings(BaseModel):
    """Settings of the buffer role; `launch.config` fills the run's own figures in."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seed: int = Field(default=1, ge=0, lt=2**31)
    """seed of the run: order of problems, RoC's draws and each lease's seed follow from it"""
    steps: int = Field(default=100, ge=1)
    """learner steps that are the run's goal"""
    max_staleness: int = Field(default=1, ge=0, le=MAX_STALENESS, json_schema_extra=LIVE)
    """S: no token older than so many steps is trained; 0 is synchronous"""
    uncorrected: bool = False
    """the loss takes stale tokens for fresh ones (`loss.correction = "none"`): max_staleness stays 0"""
    groups_per_step: int = Field(default=8, ge=1)
    """P: groups in a step"""
    group_size: int = Field(default=8, ge=1)
    """G: rollouts kept per group"""
    num_rollouts: int = Field(default=16, ge=1)
    """rollouts generated per group: 2 G with RoC, G without"""
    lease_s: float = Field(default=60.0, gt=0, json_schema_extra=LIVE)
    """seconds without renewal after which a rollout is leased to another engine"""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """seconds between two heartbeats of a peer"""
    dead_after_s: float = Field(default=10.0, gt=0)
    """seconds without a heartbeat after which a peer counts as dead"""
    group_timeout_s: float = Field(default=600.0, gt=0, json_schema_extra=LIVE)
    """seconds from a group's first lease after which it is closed with the rollouts it has"""
    ack_timeout_s: float = Field(default=120.0, gt=0)
    """seconds an engine may take to acknowledge a published version before it is fenced; stopped while the learner
    is down or recomputing"""
    keep_segments: bool = False
    """keep every payload file, for audits; else those that no kept checkpoint needs are deleted"""
    segment_mib: int = Field(default=64, ge=1, le=4096)
    """MiB after which a payload file is followed by a new one"""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the buffer; 0 chooses a free one"""
    evaluation_problems: int = Field(default=512, ge=0)
    """held-out problems per evaluation; 0 for none"""
    evaluation_at_start: bool = True
    """evaluate the version that training starts from"""
    evaluation_at_end: bool = True
    """evaluate the last version"""

    @model_validator(mode="after")
    def _fits(self) -> BufferSettings:
        if self.num_rollouts < self.group_size:
            raise ValueError(
                f"num_rollouts = {self.num_rollouts} is less than group_size = {self.group_size}: no group could be "
                "kept; generate at least group_size rollouts"
            )
        if self.dead_after_s <= 2 * self.heartbeat_s:
            raise ValueError(
                f"dead_after_s = {self.dead_after_s} must exceed 2 * heartbeat_s = {2 * self.heartbeat_s}: one late "
                "heartbeat would count as a death"
            )
        return self
