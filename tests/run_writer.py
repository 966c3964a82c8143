"""A small run directory, written by the real index, segments and codec, for the tests of what reads runs.

Consumes    a directory
Produces    P = 1, S = 1, G = 2 of 4 rollouts: three trained steps, one group dropped as all right, an evaluation of two
            problems at both ends. Rollouts with an even number fail their one call
"""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import numpy as np

from buffer.codec import encode
from buffer.index import Index, put_meta
from buffer.journal import Statement
from buffer.schema import Batch, BatchGroup, Turn, VersionRun
from buffer.segments import Place, Segments, record_bytes

GROUP = """INSERT INTO groups (group_id, kind, phase, problem_index, problem_id, problem, num_rollouts, base_version,
    deadline_step, max_staleness, issued_unix_s, state, drop_reason, kept, p_err, p_format, step, decided_step)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?)"""
ROLLOUT = """INSERT INTO rollouts (group_id, rollout, state, attempt, reward, verdict, answer, well_formed, num_answers,
    num_turns, statuses, num_output_tokens, num_tokens, end)
    VALUES (?, ?, 'finished', 1, ?, ?, ?, 1, 1, 2, ?, 5, 11, 'answer')"""
TURN = """INSERT INTO turns (group_id, rollout, turn, attempt, engine, epoch, segment, offset_bytes, length_bytes,
    num_prompt_tokens, num_output_tokens, num_observation_tokens, version_runs, status, received_unix_s)
    VALUES (?, ?, ?, 1, 'rollout-0', 1, ?, ?, ?, ?, ?, ?, ?, ?, 0)"""


class Writer:
    """Collects a run's statements and records, and writes them as the buffer does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments = Segments(directory / "buffer" / "segments", 1500, 0, 0)
        self.statements: list[Statement] = []
        self.records: list[tuple[Place, bytes, bytes]] = []

    def group(
        self, number: int, kind: str, phase: str, versions: tuple[int, int], rights: str, **fields: object
    ) -> None:
        """A group whose rollouts call the tool in turn 0 and answer in turn 1; `rights` has a digit per rollout."""
        statuses = ["ok" if at % 2 else "error" for at in range(len(rights))]
        train = kind == "train"
        problem = msgpack.packb([f"{kind}-{number}", f"{kind} {number} + 1 = ?", str(number + 1), "", ""])
        row = {"state": "finished", "drop_reason": "", "kept": [], "step": None} | fields
        position, base = number if train else number % 10, versions[0]
        values = (number, kind, phase, position, f"{kind}-{number}", problem, len(rights), base)
        values += (base + 1, 1) if train else (-1, 0)
        values += (row["state"], row["drop_reason"], json.dumps(row["kept"]))
        values += (json.dumps([float(status == "error") for status in statuses]), json.dumps([0.0] * len(rights)))
        self.statements.append((GROUP, (*values, row["step"], versions[1])))
        for rollout, right in enumerate(rights):
            self.rollout(number, rollout, right == "1", statuses[rollout], versions)

    def rollout(self, group: int, rollout: int, right: bool, status: str, versions: tuple[int, int]) -> None:
        answer = group + 1 if right else group
        score = (group, rollout, float(right), "right" if right else "wrong", str(answer), json.dumps([status]))
        self.statements.append((ROLLOUT, score))
        for number in (0, 1):
            num_prompt, num_output, num_observation = ((4, 3, 2), (0, 2, 0))[number]
            runs = (VersionRun(lineage=1, version=versions[number], num_tokens=num_output),)
            turn = Turn(
                group=group,
                rollout=rollout,
                attempt=1,
                turn=number,
                prompt_ids=np.arange(num_prompt, dtype=np.int32),
                output_ids=np.arange(num_output, dtype=np.int32),
                logprobs=np.full(num_output, -0.5, np.float32),
                version_runs=runs,
                observation_ids=np.arange(num_observation, dtype=np.int32),
                status="" if number else status,
            )
            body, payload = encode(Turn, turn)
            place = self.segments.place(record_bytes(body, payload))
            self.records.append((place, body, payload))
            where = (place.segment, place.offset_bytes, place.length_bytes, num_prompt, num_output, num_observation)
            covered = json.dumps([[run.lineage, run.version, run.num_tokens] for run in runs])
            self.statements.append((TURN, (group, rollout, number, *where, covered, turn.status)))

    def take(self, step: int, number: int, base: int, kept: tuple[int, int], rewards: tuple[float, float]) -> None:
        group = BatchGroup(
            group=number,
            base=base,
            deadline=base + 1,
            rollouts=kept,
            rewards=rewards,
            num_tokens=(11, 11),
            num_output_tokens=(5, 5),
        )
        record, _ = encode(Batch, Batch(step=step, groups=(group,)))
        self.statements.append(("INSERT INTO batches VALUES (?, 0, ?, ?)", (step, base, record)))
        version = step + 1
        self.statements += [
            ("INSERT INTO publications VALUES (1, ?, ?)", (version, 10.0 * version)),
            (
                "INSERT INTO acknowledgements VALUES ('rollout-0', 1, 1, ?, 0, 0.1, ?, ?)",
                (version, 10.0 * version + 0.5 * version, version),
            ),
        ]

    def close(self) -> None:
        self.segments.append(self.records)
        self.segments.close()
        index = Index(self.directory / "buffer" / "index.sqlite")
        index.commit(self.statements)
        index.close()


def write_run(directory: Path, mode: str = "paper", seed: int = 1) -> None:
    """A run that keeps its promises."""
    (directory / "recipe.toml").write_text(f'[run]\nseed = {seed}\n\n[roc]\nmode = "{mode}"\n')
    writer = Writer(directory)
    writer.statements += [put_meta(*pair) for pair in (("run", "r"), ("max_staleness", 1), ("group_size", 2))]
    writer.statements.append(("INSERT INTO publications VALUES (1, 0, 0)", ()))
    for phase, version, rights in (("start", 0, "0"), ("end", 3, "1")):
        writer.statements.append(("INSERT INTO evaluations VALUES (?, 1, ?, 2, 0, 0)", (phase, version)))
        for problem in (1000, 1001):
            number = problem + 10 * version
            writer.group(number, "eval", phase, (version, version), "1" if problem == 1001 else rights)
    writer.group(0, "train", "", (0, 0), "1100", state="released", kept=[1, 2], step=0)
    writer.group(1, "train", "", (0, 1), "1010", state="released", kept=[0, 3], step=1)
    writer.group(2, "train", "", (1, 1), "1111", state="dropped", drop_reason="all_right")
    writer.group(3, "train", "", (1, 1), "0111", state="released", kept=[0, 3], step=2)
    writer.take(0, 0, 0, (1, 2), (1.0, 0.0))
    writer.take(1, 1, 0, (0, 3), (1.0, 0.0))
    writer.take(2, 3, 1, (0, 3), (0.0, 1.0))
    writer.close()
