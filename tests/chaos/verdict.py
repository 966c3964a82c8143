"""What became of the run: its records, the witness's notes and the replay must agree.

Consumes    a run directory at rest, the witness's notes, the blows as they were dealt
Produces    the fields of the report
Waits for   the replay's process
Invariant   a figure that can't be recomputed counts as broken, never as kept
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.audit.load import load
from tests.audit.segments import records
from tests.chaos.victim import ROOT
from tests.chaos.witness import Key, Notes, opened, rows, turns

REPLAY_PATIENCE_S = 1800.0
RECOVERY_PATIENCE_S = 120.0
"""A role that was killed so long before the end and has brought about nothing since counts as hung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """A blow as it was dealt. Times are seconds since 1970."""

    role: str
    kind: str
    at_s: float
    pid: int
    hit: bool
    """the process was there"""


# Turns


def lost(directory: Path, notes: Notes) -> list[str]:
    """Turns that were seen durable and are not there any more, or not as they were."""
    with opened(directory) as db:
        now = dict(turns(directory, db))
    return [f"turn {key}: {seen}, now {now.get(key)}" for key, seen in notes.turns.items() if now.get(key) != seen]


def missing(directory: Path, notes: Notes) -> list[str]:
    """Lives of engines that heard more acknowledgements of turns than there are turns of theirs on record.

    What was acknowledged and never reached the index no reader of the index can have seen: of that the engines alone
    know. They count each answer to a push (push_s) and tell the sum with their heartbeats.
    """
    heard: dict[tuple[str, int], int] = defaultdict(int)
    for path in sorted((directory / "metrics").glob("rollout-*.jsonl")):
        for line in json_lines(path):
            epoch = max(
                (e for name, e, at_s in notes.hellos if name == path.stem and at_s <= line["unix_s"]), default=0
            )
            count = sum(line["histograms"].get("push_s", {}).get("counts", ()))
            heard[path.stem, epoch] = max(heard[path.stem, epoch], count)
    stored = {
        (engine, epoch): count
        for engine, epoch, count in rows(directory, "SELECT engine, epoch, count(*) FROM turns GROUP BY engine, epoch")
    }
    return [
        f"{name}, epoch {epoch}: {count} turns were acknowledged, {stored.get((name, epoch), 0)} are on record"
        for (name, epoch), count in heard.items()
        if count > stored.get((name, epoch), 0)
    ]


def twice(directory: Path, notes: Notes) -> list[str]:
    """Turns with two payloads that were both durable, or that came once more after they had been acknowledged."""
    out = list(notes.changed)
    with opened(directory) as db:
        rowed = {(seen.segment, seen.offset): key for key, seen in turns(directory, db)}
        (meters,) = [json.loads(value) for (value,) in db.execute("SELECT value FROM meta WHERE key = 'meters'")]
    count: Counter[Key] = Counter()
    last = max((place for place in rowed), default=(-1, -1))
    for path in sorted((directory / "buffer" / "segments").glob("*.seg")):
        for record in records(path, int(path.stem)):
            if isinstance(record, str):
                break
            if (record.segment, record.offset) <= last:  # what lies behind was never acknowledged
                group, rollout, _, turn = record.body[:4]
                count[group, rollout, turn] += 1
    out += [f"turn {key} is in the segments {number} times" for key, number in count.items() if number > 1]
    refused = int(meters.get("counters", {}).get("refused/out_of_order", 0))
    return out + [f"{refused} turns came again that were durable already"] * bool(refused)


# Batches


def ancestry(lines: Iterable[Mapping[str, Any]], checkpoints: set[int]) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Version -> the steps in its newest weights, by the learner's log; and what the log can't have been.

    A line whose step does not follow the one before is another life's, which began from a checkpoint of that number.
    """
    known: dict[int, tuple[int, ...]] = {0: ()}
    faults = []
    present = 0
    for line in lines:
        step = line["step"]
        if step != present:
            if step and step not in checkpoints:
                faults.append(f"a life began at version {step}, of which no checkpoint was ever seen")
            if step not in known:
                faults.append(f"a life began at version {step}, which was never reached")
        known[step + 1] = (*known.get(step, ()), step)
        present = step + 1
    return known, faults


def step_lines(directory: Path) -> list[dict[str, Any]]:
    """metrics/steps.jsonl."""
    return json_lines(directory / "metrics" / "steps.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file, one a line; a line that a SIGKILL tore is left out."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def not_once(directory: Path, notes: Notes, replayed: Sequence[int]) -> dict[int, str]:
    """Step -> why its batch is not exactly once in the weights that survived. By three witnesses:

    the learner's log (which lives trained which step, from which checkpoint), the recorded batches (each line of the
    log tells of the tokens and rewards of its record), and the replay: every version ever published, by whatever life,
    has the weights that the recorded batches give when each is trained once.
    """
    run = load(directory)
    last = run.learner_steps
    lines = step_lines(directory)
    known, faults = ancestry(lines, notes.checkpoints | {version for version, _ in run.checkpoints})
    out = dict.fromkeys([-1], "; ".join(faults)) if faults else {}
    for step, count in (Counter(range(last)) - Counter(known.get(last, ()))).items():
        out[step] = f"missing in the log's ancestry of version {last} ({count})"
    for step, count in (Counter(known.get(last, ())) - Counter(range(last))).items():
        out[step] = f"surplus in the log's ancestry of version {last} ({count})"
    for line in lines:
        truth = _recorded(run.batches.get(line["step"]))
        told = (line["groups"], line["trajectories"], line["tokens"], round(line["reward_mean"], 9))
        if truth != told:
            out[line["step"]] = f"its record has groups, rollouts, tokens, reward {truth}, {told} were trained"
    published = rows(directory, "SELECT * FROM checksums ORDER BY version, lineage")
    for version in set(range(last + 1)) - {version for _, version, _ in published}:
        out[max(0, version - 1)] = f"version {version} was never published: its weights are not known"
    for lineage, version, checksum in published:
        if version >= len(replayed) or replayed[version] != checksum:
            out[max(0, version - 1)] = f"version {version} of lineage {lineage} is not what the replay gives"
    return out


def _recorded(batch: tuple[int, tuple[int, list[Any]]] | Any) -> tuple[int, int, int, float] | None:
    if batch is None:
        return None
    groups = batch[1][1]
    rewards = [reward for group in groups for reward in group[4]]
    tokens = sum(sum(group[5]) for group in groups)
    return len(groups), len(rewards), tokens, round(sum(rewards) / len(rewards), 9)


def replay(directory: Path) -> list[int]:
    """Checksums of the versions that the recorded batches give; empty when they could not be trained."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.replay", str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=REPLAY_PATIENCE_S,
        check=False,
    )
    lines = done.stdout.decode().splitlines()
    return list(json.loads(lines[-1])) if done.returncode == 0 and lines else []


# The promise


def older_than_promised(directory: Path) -> tuple[int, int]:
    """Trained tokens older than S at issue, and the largest age minus S."""
    count, largest = 0, -(1 << 30)
    for group in load(directory).trained:
        assert group.step is not None, "trained groups have a step"
        for rollout in group.kept_rollouts:
            for turn in rollout.turns:
                for _, version, num_tokens in turn.version_runs:
                    beyond = group.step - version - group.max_staleness
                    largest = max(largest, beyond)
                    count += num_tokens if beyond > 0 else 0
    return count, largest


# Recovery


def products(directory: Path, notes: Notes, since_s: float) -> Iterator[tuple[str, int, float]]:
    """(role, epoch or 0, when) of what each role brings about; times in seconds since 1970, in no order."""
    turns_since = "SELECT engine, epoch, received_unix_s, status FROM turns WHERE received_unix_s > ?"
    for engine, epoch, at_s, status in rows(directory, turns_since, (since_s,)):
        yield engine.rpartition("-")[0], epoch, at_s
        yield "buffer", 0, at_s
        if status not in ("", "worker_lost"):
            yield "sandbox", 0, at_s
    for (at_s,) in rows(directory, "SELECT decided_unix_s FROM groups WHERE decided_unix_s > ?", (since_s,)):
        yield "filter", 0, at_s
    for (lineage, _), at_s in notes.publications.items():
        yield "learner", lineage, at_s


def recoveries(directory: Path, notes: Notes, dealt: Sequence[Dealt], end_s: float) -> dict[str, list[float | None]]:
    """By role: seconds from each SIGKILL to the first product of a later life; None where none ever came.

    A death during the recovery from another one belongs to that recovery: the later one is measured.
    """
    by_role: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for role, epoch, at_s in products(directory, notes, min((blow.at_s for blow in dealt), default=end_s)):
        by_role[role].append((epoch, at_s))
    out: dict[str, list[float | None]] = defaultdict(list)
    kills = [blow for blow in dealt if blow.kind == "kill" and blow.hit]
    for blow in kills:
        later = _later_lives(blow, notes)
        came = [at_s for epoch, at_s in by_role[blow.role] if at_s >= later[1] and (not epoch or epoch > later[0])]
        next_death_s = min(
            (b.at_s for b in dealt if b.role == blow.role and b.at_s > blow.at_s and b.hit), default=end_s
        )
        if came and min(came) <= next_death_s:
            out[blow.role].append(min(came) - blow.at_s)
        elif next_death_s >= end_s and end_s - blow.at_s > RECOVERY_PATIENCE_S:
            out[blow.role].append(None)
    return out


def _later_lives(blow: Dealt, notes: Notes) -> tuple[int, float]:
    """The epoch that died, and from when on a product can only be a later life's."""
    hellos = sorted((epoch, at_s) for name, epoch, at_s in notes.hellos if name == f"{blow.role}-0")
    epoch = max((epoch for epoch, at_s in hellos if at_s <= blow.at_s), default=0)
    if blow.role in ("sandbox", "filter"):  # what the dead one sent may still be under way
        return 0, min((at_s for _, at_s in hellos if at_s > blow.at_s), default=float("inf"))
    return epoch if blow.role in ("rollout", "learner") else 0, blow.at_s


def start_ups(notes: Notes, born: Mapping[str, Iterable[float]], directory: Path) -> dict[str, float]:
    """By role: median seconds from the birth of a process to its first word to the buffer (rollout: to its first
    acknowledged version; learner: to its first publication; buffer: to the first look that found its life).
    """
    words: dict[str, list[float]] = defaultdict(list)
    for name, _, at_s in notes.hellos:
        words[name.rpartition("-")[0]].append(at_s)
    words["rollout"] = [at_s for (at_s,) in rows(directory, "SELECT min(unix_s) FROM acknowledgements GROUP BY epoch")]
    words["learner"] = list(notes.publications.values())
    words["buffer"] = list(notes.lives.values())
    out = {}
    for role, births in born.items():
        ordered = sorted(births)
        took = []
        for birth_s, next_s in zip(ordered, [*ordered[1:], float("inf")], strict=True):
            came = [at_s for at_s in words[role] if birth_s < at_s < next_s]
            took += [min(came) - birth_s] if came else []
        if took:
            out[role] = statistics.median(took)
    return out


def beyond(recovered: Mapping[str, Sequence[float | None]], start_ups: Mapping[str, float]) -> dict[str, float]:
    """By role: the recoveries' 95th percentile less the median start-up, in seconds."""
    out = {}
    for role, some in sorted(recovered.items()):
        late_s = quantile([s for s in some if s is not None], 0.95)
        if late_s is not None and role in start_ups:
            out[role] = late_s - start_ups[role]
    return out


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] if ordered else None


__all__ = ["Dealt", "ancestry", "lost", "missing", "not_once", "older_than_promised", "recoveries", "replay", "twice"]
