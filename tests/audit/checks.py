"""The promises, checked on a run's records; each check yields one line per breach, with the numbers.

Consumes    a Run; its segments for the payload
Produces    findings
Waits for   nothing
Invariant   a run that kept its promises yields nothing
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from tests.audit.figures import FAILED, INFRASTRUCTURE, group_ages, p_err, p_format
from tests.audit.load import OUTSTANDING, Group, Rollout, Run, Turn
from tests.audit.segments import Record, records

INTEGER = re.compile(r"-?\d+")
KNOWN = FAILED | INFRASTRUCTURE | {"ok", "session_lost"}


def batches(run: Run) -> Iterator[str]:
    """Each batch once, each group in one batch at most, and the record says what the rows say."""
    seen: Counter[int] = Counter()
    if sorted(run.batches) != list(range(len(run.batches))):
        yield f"steps with a batch are {sorted(run.batches)}, not 0 to {len(run.batches) - 1}"
    for step, (acked, (record_step, groups)) in sorted(run.batches.items()):
        if record_step != step:
            yield f"batch of step {step}: its record says step {record_step}"
        if acked > step:
            yield f"batch of step {step}: taken when version {acked} was acknowledged already"
        for number, base, deadline, rollouts, rewards, lengths, output_lengths in groups:
            seen[number] += 1
            group = run.groups.get(number)
            if group is None or set(rollouts) - set(group.rollouts):
                yield f"batch of step {step}: group {number} or one of its rollouts {rollouts} has no row"
                continue
            rows = [group.rollouts[rollout] for rollout in rollouts]
            record = (step, base, deadline, list(rollouts), list(rewards), list(lengths), list(output_lengths))
            sizes = [r.length for r in rows], [r.num_output_tokens for r in rows]
            truth = (group.step, group.base, group.deadline, group.kept, [r.reward for r in rows], *sizes)
            if record != truth:
                yield f"batch of step {step}, group {number}: its record says {record}, the rows say {truth}"
    for number, count in seen.items():
        if count > 1:
            yield f"group {number} is in {count} batches"
    for group in run.of_kind("train"):
        if (group.step is not None) != (group.id in seen):
            yield f"group {group.id}: its row says step {group.step}, it is in {seen[group.id]} batches"
    for step in range(run.learner_steps):
        if step not in run.batches:
            yield f"version {step + 1} is on record, but there is no batch of step {step}"


def staleness(run: Run) -> Iterator[str]:
    """Deadlines met, no token older than S at issue, none older than its ticket's base, none from the future."""
    published = set(run.publications)
    for group in run.of_kind("train"):
        if group.deadline != group.base + group.max_staleness:
            yield f"group {group.id}: base {group.base}, deadline {group.deadline}, S at issue {group.max_staleness}"
        if group.step is None and group.state in OUTSTANDING and group.deadline < len(run.batches):
            yield f"group {group.id}: outstanding with deadline {group.deadline}, next step is {len(run.batches)}"
        for rollout in group.rollouts.values():
            for turn in rollout.turns:
                for lineage, version, _ in turn.version_runs:
                    if version < group.base or (lineage, version) not in published:
                        yield f"{_name(turn)}: {lineage}.{version} is not published or older than base {group.base}"
        if group.step is None:
            continue
        if group.step > group.deadline:
            yield f"group {group.id}: trained at step {group.step}, deadline was {group.deadline}"
        for age in group_ages(group):
            if not 0 <= age <= group.max_staleness:
                yield f"group {group.id}: a token of age {age} at step {group.step}, S at issue {group.max_staleness}"
    for group in run.of_kind("eval"):
        lineage, version, _ = run.evaluations[group.phase]
        for rollout in group.rollouts.values():
            for turn in rollout.turns:
                if any(run_version != version for _, run_version, _ in turn.version_runs):
                    yield f"{_name(turn)}: evaluation {group.phase} runs on {lineage}.{version}: {turn.version_runs}"


def problems(run: Run) -> Iterator[str]:
    """Each problem once per epoch; nothing held out is trained on."""
    train = run.of_kind("train")
    positions = Counter(group.problem_index for group in train)
    for position, count in positions.items():
        if count > 1:
            yield f"position {position} of the problems was used by {count} groups"
    if sorted(positions) != list(range(len(positions))):
        yield f"positions {min(positions)} to {max(positions)} of the problems were used by {len(positions)} groups"
    uses = Counter(group.problem_id for group in train)
    if uses and max(uses.values()) - min(uses.values()) > 1:
        most, least = uses.most_common()[0], uses.most_common()[-1]
        yield f"problem {most[0]!r} was used {most[1]} times, {least[0]!r} {least[1]}: not once per epoch"
    for phase in run.evaluations:
        held_out = Counter(group.problem for group in run.of_kind("eval") if group.phase == phase)
        if len(set(held_out) & {group.problem for group in train}):
            yield f"evaluation {phase}: {len(set(held_out) & {g.problem for g in train})} problems are trained on"
        if max(held_out.values(), default=1) > 1:
            yield f"evaluation {phase}: a problem occurs {max(held_out.values())} times"


def selection(run: Run) -> Iterator[str]:
    """RoC's word: kept within the group and of the right size, both kinds of reward, drops for their reason."""
    mode = run.recipe.get("roc", {}).get("mode", "paper")
    minimum = run.recipe.get("roc", {}).get("min_per_side", 2)
    group_size = int(run.meta.get("group_size", 0))
    for group in run.of_kind("train"):
        finished = {rollout.number: rollout for rollout in group.finished}
        rights = sum(rollout.reward > 0 for rollout in finished.values())
        if group.drop_reason == "all_right" and rights < len(finished):
            yield f"group {group.id}: dropped as all right, {rights} of {len(finished)} are"
        if group.drop_reason == "all_wrong" and rights:
            yield f"group {group.id}: dropped as all wrong, {rights} of {len(finished)} are right"
        if group.state == "finished" or group.step is not None:
            if group.kept != sorted(set(group.kept) & set(finished)):
                yield f"group {group.id}: kept {group.kept}, finished are {sorted(finished)}"
                continue
            counts = _counts(group, [finished[number].reward > 0 for number in group.kept])
            wanted = _wanted(mode, rights, len(finished) - rights, group_size, group.num_rollouts, minimum)
            if counts != wanted:
                yield f"group {group.id}: kept {counts} right and wrong of {rights} and {len(finished) - rights}"
        if group.p_err and (
            group.p_err != [p_err(rollout) for rollout in group.finished]
            or group.p_format != [p_format(rollout) for rollout in group.finished]
        ):
            yield f"group {group.id}: penalties on record {group.p_err} {group.p_format} are not those of its statuses"


def _counts(group: Group, rights: list[bool]) -> tuple[int, int]:
    return sum(rights), len(rights) - sum(rights)


def _wanted(mode: str, rights: int, wrongs: int, size: int, issued: int, minimum: int) -> tuple[int, int]:
    """(right, wrong) that RoC keeps of a group with `rights` and `wrongs`."""
    if mode == "off":
        return rights, wrongs
    places = min(size, (rights + wrongs) * size // issued) if mode == "paper" else size
    side = min(minimum, places // 2)
    aim = wrongs // 2 if mode == "paper" else places - round(rights * places / (rights + wrongs))
    wrong = sorted((max(min(side, wrongs), places - rights), aim, min(wrongs, places - min(side, rights))))[1]
    return places - wrong, wrong


def scores(run: Run) -> Iterator[str]:
    """Finished rollouts against their turns, and rewards against the gold answer where both are integers."""
    for group in run.groups.values():
        for rollout in group.rollouts.values():
            numbers = [turn.number for turn in rollout.turns]
            if numbers != list(range(len(numbers))):
                yield f"rollout {group.id}.{rollout.number}: its turns are {numbers}"
            attempts = [turn.attempt for turn in rollout.turns]
            if attempts != sorted(attempts):
                yield f"rollout {group.id}.{rollout.number}: attempts go back: {attempts}"
            if rollout.finished:
                yield from _score(group, rollout)


def _score(group: Group, rollout: Rollout) -> Iterator[str]:
    name = f"rollout {group.id}.{rollout.number}"
    turns = rollout.turns
    outputs = sum(turn.num_output_tokens for turn in turns)
    observed = turns[-1].num_observation_tokens if turns else 0
    statuses = [turn.status for turn in turns if turn.status]
    said, true = (rollout.num_turns, rollout.num_output_tokens, rollout.statuses), (len(turns), outputs, statuses)
    if said != true:
        yield f"{name}: its score says {said}, its turns say {true}"
    if rollout.num_tokens not in (rollout.length, rollout.length + observed):
        yield f"{name}: its score says {rollout.num_tokens} tokens, its turns say {rollout.length}"
    if set(rollout.statuses) - KNOWN:
        yield f"{name}: unknown statuses {sorted(set(rollout.statuses) - KNOWN)}"
    if rollout.reward not in (0.0, 1.0) or (rollout.reward > 0) != (rollout.verdict == "right"):
        yield f"{name}: reward {rollout.reward}, verdict {rollout.verdict!r}"
    if rollout.reward > 0 and not rollout.well_formed:
        yield f"{name}: rewarded without a well-formed answer"
    if INTEGER.fullmatch(rollout.answer) and INTEGER.fullmatch(group.gold):
        equal = int(rollout.answer) == int(group.gold)
        if rollout.verdict in ("right", "wrong") and equal != (rollout.verdict == "right"):
            yield f"{name}: answer {rollout.answer}, gold {group.gold}, verdict {rollout.verdict!r}"


def payload(run: Run) -> Iterator[str]:
    """Every acknowledged turn there and readable, each once; a segment is gone only when nothing can need it."""
    by_segment: dict[int, dict[int, Turn]] = defaultdict(dict)
    for turn in run.turns:
        by_segment[turn.segment][turn.offset] = turn
    keys: Counter[tuple[int, int, int]] = Counter()
    for number, expected in sorted(by_segment.items()):
        path = run.segment_path(number)
        if not path.exists():
            yield from _needed(run, number, expected.values())
            continue
        left = dict(expected)
        for record in records(path, number):
            if isinstance(record, str):
                if left:  # what lies behind the last indexed record was never acknowledged
                    yield record
                break
            group, rollout, _, turn_number = record.body[:4]
            keys[group, rollout, turn_number] += 1
            if record.offset in left:
                yield from _turn(left.pop(record.offset), record)
            elif left:
                yield f"{path.name} at {record.offset}: turn {group}.{rollout}.{turn_number} is not in the index"
        for turn in left.values():
            yield f"{_name(turn)}: not found in {path.name} at {turn.offset}"
    for key, count in keys.items():
        if count > 1:
            yield f"turn {key[0]}.{key[1]}.{key[2]} was written {count} times"


def _needed(run: Run, segment: int, turns: object) -> Iterator[str]:
    """Findings for a segment that was deleted although a kept checkpoint, or a group still alive, needs it."""
    oldest = min((version for version, kept in run.checkpoints if kept), default=0)
    for turn in turns:  # type: ignore[attr-defined]
        group = run.groups[turn.group]
        if group.step is not None and turn.rollout in group.kept and group.step >= oldest:
            yield f"{_name(turn)}: segment {segment} is gone; step {group.step} is not in checkpoint {oldest}"
        if group.state in ("waiting", "leased") or (group.state == "finished" and group.kind == "train"):
            yield f"{_name(turn)}: segment {segment} is gone, its group is {group.state}"


def _turn(turn: Turn, record: Record) -> Iterator[str]:
    body = record.body
    row: list[object] = [turn.group, turn.rollout, turn.attempt, turn.number]
    row += [turn.num_prompt_tokens, turn.num_output_tokens, turn.num_observation_tokens]
    row += [[list(run) for run in turn.version_runs], turn.status, turn.length]
    disk = [*body[:6], body[8], [list(run) for run in body[7]], body[10], record.length]
    if row != disk:
        yield f"{_name(turn)}: its row says {row}, its segment {disk}"
    num_covered = sum(num_tokens for _, _, num_tokens in turn.version_runs)
    if not turn.num_output_tokens == body[6] == num_covered:
        yield f"{_name(turn)}: {turn.num_output_tokens} tokens, {body[6]} log-probs, versions for {num_covered}"
    if record.payload_bytes != 4 * (body[4] + body[5] + body[6] + body[8]):
        yield f"{_name(turn)}: {record.payload_bytes} bytes of payload"
    if not np.isfinite(record.logprobs).all() or (record.logprobs > 1e-4).any():
        yield f"{_name(turn)}: log-probs that are none"


def _name(turn: Turn) -> str:
    return f"turn {turn.group}.{turn.rollout}.{turn.number}"


CHECKS = {
    "batches": batches,
    "staleness": staleness,
    "problems": problems,
    "selection": selection,
    "scores": scores,
    "payload": payload,
}
