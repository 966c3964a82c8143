"""The learner in a random history: taking, checkpoints, publication, crashes between any two of them.

Consumes    batches; the record of the last publication and the kept checkpoints, when it starts again
Produces    versions that the engines load; a Violation when two histories of weights would be in use
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.law.judge import Plan, Violation, expect_fenced
from tests.law.shell import Shell


class Learner:
    """Lives one after another; the weights are the list of batches they were trained on."""

    shell: Shell
    plan: Plan
    rng: random.Random

    def __init__(self) -> None:
        self.serving: tuple[int, int] | None = None
        """(lineage, version) that engines can load now"""
        self.ever_served: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.life: Iterator[None] | None = None
        self.finished = False
        self.down_until_s = 0.0

    def learner_life(self, checkpoint: int) -> Iterator[None]:
        """Each `yield` is a place where it may crash."""
        shell = self.shell
        lineage = self.new_lineage()
        version, content = checkpoint, shell.disk.checkpoints[checkpoint]
        for step in range(version, self.restart_version(checkpoint)):
            if step not in shell.disk.batches:
                raise Violation("weights", f"the batch of step {step} is gone, checkpoint {checkpoint} needs it")
            content = (*content, shell.disk.batches[step])
            version += 1
            yield
        yield from self.publish(lineage, version, content)
        while version < self.plan.steps:
            while (batch := shell.take(lineage, version)) is None:
                if shell.ledger.spent:
                    break
                yield
            if batch is None:
                break
            yield
            content = (*content, batch)
            version += 1
            yield
            if version % 2 == 0:
                shell.record_checkpoint(lineage, version, content)
                yield
            yield from self.publish(lineage, version, content)
        shell.reach_goal(version)
        self.finished = True

    def new_lineage(self) -> int:
        return self.shell.learner_hello()

    def restart_version(self, checkpoint: int) -> int:
        return max(checkpoint, self.shell.disk.published[1])

    def publish(self, lineage: int, version: int, content: tuple[Any, ...]) -> Iterator[None]:
        self.shell.record_publication(lineage, version)
        yield
        self.serve(lineage, version, content)
        yield

    def serve(self, lineage: int, version: int, content: tuple[Any, ...]) -> None:
        """The first byte is sent."""
        groups = [g for batch in content for g in batch]
        if len(content) != version or len(groups) != len(set(groups)):
            raise Violation("weights", f"version {version} was trained on {content}")
        newest = max((v for _, v in self.ever_served), default=0)
        if version < newest:
            raise Violation("weights", f"version {version} is published after {newest}")
        trace = (*content, ("computed in life", self.shell.learner_lineage))
        if self.ever_served.setdefault((lineage, version), trace) != trace:
            raise Violation("weights", f"two different weights are called lineage {lineage}, version {version}")
        self.serving = (lineage, version)
        self.shell.learner_serving = True

    def learner_advance(self) -> None:
        if self.finished or self.shell.now_s < self.down_until_s:
            return
        if self.life is None:
            self.life = self.learner_life(self.rng.choice(sorted(self.shell.disk.checkpoints)))
        next(self.life, None)

    def learner_crash(self) -> None:
        if self.finished:
            return
        lineage = self.shell.learner_lineage
        self.life, self.serving, self.shell.learner_serving = None, None, False
        if lineage > 0 and self.rng.random() < 0.5:
            self.life = self.learner_life(self.rng.choice(sorted(self.shell.disk.checkpoints)))
            next(self.life, None)
            expect_fenced(lambda: self.shell.record_publication(lineage, 10**6), f"the learner of lineage {lineage}")
        else:
            self.down_until_s = self.shell.now_s + self.rng.choice((0.0, 4.0, 20.0))
