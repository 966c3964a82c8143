"""The dials of a sandbox node: table [sandbox] of a recipe.

Consumes    TOML values
Produces    SandboxSettings, and the Limits that calls get by default
Waits for   nothing
Invariant   frozen; an unknown key, a wrong type or an impossible size is refused here, with the field's name
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sandbox.api import Limits

MAX_PREAMBLE_CHARS = 32_768
"""It travels as an argument of a process."""


class SandboxSettings(BaseModel):
    """How a node runs calls, and what a call may use."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    workers: Annotated[int, Field(ge=0, le=512)] = 0
    """Shards (each runs one CPU-bound call at a time, beside up to 31 that wait); 0: one per core it may use."""
    wall_s: Annotated[float, Field(gt=0, le=3600, json_schema_extra={"live": True})] = 4.0
    """Seconds a call may take, from its dispatch."""
    cpu_s: Annotated[float, Field(gt=0, le=3600, json_schema_extra={"live": True})] = 4.0
    """CPU-seconds a call may use."""
    memory_mib: Annotated[int, Field(ge=16, le=1 << 20)] = 256
    """MiB a call's process tree may use on top of the warm interpreter."""
    output_kib: Annotated[int, Field(ge=1, le=1 << 20)] = 8192
    """KiB a call may write before it is stopped."""
    queue_bound: Annotated[int, Field(ge=1, le=10_000_000)] = 3000
    """Calls that may wait at this node; beyond it a call is refused as `overloaded`."""
    sessions: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Live sessions of this node, shared out over its shards; beyond a shard's share the one of its own that rested
    longest is ended. About 3 MiB each, with little in their variables."""
    spare: bool = True
    """Whether each shard keeps a child ready while it is idle: shorter waits when calls are few."""
    isolation: Literal["full", "rlimits"] = "full"
    """`full`: namespaces, read-only root, seccomp, limits; refuses to start where the host lacks one of them.
    `rlimits`: what the host allows, for hosts that forbid namespaces and code that is not hostile."""
    profile: Literal["lean", "sci", "auto"] = "lean"
    """What the warm interpreter holds: `lean` the standard library, `sci` numpy and sympy too, `auto` both, chosen
    per call by the modules its text names."""
    preamble: Annotated[str, Field(max_length=MAX_PREAMBLE_CHARS)] = ""
    """Python that runs before each program, once before a session, in its namespace: imports, helper functions.
    `call_number` counts the node's requests. What it raises is a fault of the sandbox, not of the program; its time
    counts as the call's."""

    @field_validator("preamble")
    @classmethod
    def _is_python(cls, text: str) -> str:
        try:
            compile(text, "sandbox.preamble", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is no Python: {error}") from error
        return text

    def limits(self) -> Limits:
        """The limits of a call that states none."""
        return Limits(wall_s=self.wall_s, cpu_s=self.cpu_s, memory_mib=self.memory_mib, output_kib=self.output_kib)

    def num_workers(self) -> int:
        """Shards to start."""
        return self.workers or len(os.sched_getaffinity(0))
