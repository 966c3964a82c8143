"""The drill-downs: what there is to know of one stage, as lines of text.

Consumes    a snapshot; single records (records.py), or None where they cannot be read
Produces    lines
Waits for   nothing: pure
Invariant   every figure of the whole is the snapshot's; what is not known is shown as "-", never as 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from launch.monitor.records import Call, Group, Step, Version
from launch.monitor.snapshot import Snapshot
from launch.monitor.stage_figures import Engine, Times
from launch.monitor.text import number, role_line, rule, span, stamp

BAR = 40
CODE = 40
"""characters of a call's program in a table"""
MARKS = {"fetch": "f", "train": "#", "publish": "p", "checkpoint": "c", "load": "="}


def engines(snapshot: Snapshot) -> Iterator[str]:
    """1: what each engine holds, and how fast it is with so much."""
    yield rule("ENGINES  means over the window; in hand: rollouts, at once: generations")
    rows = [
        (
            one.name,
            number(one.version, "d"),
            f"{number(one.held)}/{one.slots}",
            number(one.full, ".0%"),
            number(one.starved, ".0%"),
            number(one.generating),
            number(one.waiting),
            number(one.kv_use, ".0%"),
            number(one.paused, ".1%"),
            number(one.tokens_per_s, ".0f"),
            number(one.capacity_tokens_per_s, ".0f"),
        )
        for one in snapshot.engines
    ]
    heads = ("engine", "version", "in hand", "full", "starved", "at once", "queued", "KV", "paused", "tokens/s", "best")
    yield from table(heads, rows)
    for one in snapshot.engines:
        yield from ("", *_curve(one))
    yield from ("", rule("CLOCKS  busy #  starved .  blocked x  sync =  down !"))
    yield from (role_line(role) for role in snapshot.roles if role.role == "rollout")


def _curve(one: Engine) -> Iterator[str]:
    rises = "; it still rises, so its best is not known" if one.rising else ""
    yield rule(f"SPEED of {one.name} by generations at once, as measured{rises}")
    best = one.capacity_tokens_per_s or 0.0
    for point in one.curve:
        bar = "#" * round(BAR * point.tokens_per_s / best) if best else ""
        yield f"{point.concurrency:5} {bar:{BAR}} {point.tokens_per_s:7.0f} tokens/s, over {point.seconds:.1f} s"
    if not one.curve:
        yield "not measured yet"


def sandbox(snapshot: Snapshot, calls: Sequence[Call] | None) -> Iterator[str]:
    """2: the queue, and the newest calls."""
    one, useful = snapshot.sandbox, snapshot.useful
    yield rule("SANDBOX  all nodes together, over the window")
    if one is None:
        yield "no sandbox has told figures yet"
    else:
        yield f"{one.workers} workers on {one.nodes} nodes; cores in use {number(one.cpu_use, '.0%')} of one per worker"
        yield (
            f"{number(one.calls_per_s)} calls/s, {number(one.waiting)} waiting; {number(one.backlog, '.0%')} of the "
            "time a call waits for each worker"
        )
        yield f"a call waits  {times(one.queue)}"
        yield f"a call runs   {times(one.run)}"
        failed = number(useful.tool_error if useful else None, ".0%")
        yield f"failed {failed}, timed out {number(one.timeouts, '.1%')}, refused {one.refused}"
    yield from (role_line(role) for role in snapshot.roles if role.role == "sandbox")
    yield ""
    if calls is not None:
        by_status = ", ".join(
            f"{count} {status}" for status, count in Counter(call.status for call in calls).most_common()
        )
        yield rule(f"NEWEST CALLS  {by_status or 'none yet'}")
        rows = [
            (
                stamp(call.unix_s),
                call.engine,
                f"{call.group}.{call.rollout}.{call.turn}",
                call.status,
                number(call.queue_s, ".3f"),
                number(call.run_s, ".3f"),
                _first_line(call.code),
            )
            for call in calls
        ]
        yield from table(("at", "engine", "grp.rollout.turn", "status", "waited s", "ran s", "program"), rows)


def _first_line(code: str) -> str:
    head, _, rest = code.strip().partition("\n")
    plain = "".join(sign if sign.isprintable() else " " for sign in head)
    return f"{plain[: CODE - 3]}..." if rest or len(plain) > CODE else plain


def groups(snapshot: Snapshot, told: tuple[Sequence[Group], Sequence[Group]] | None, step: int) -> Iterator[str]:
    """3: groups by age, active ones from the oldest; `step`: the next one, ages count up to it."""
    tickets, stale = snapshot.tickets, snapshot.staleness
    if tickets is not None and stale is not None:
        yield rule(f"TICKETS  {tickets.active} of {tickets.bound} = (S+1) P active; S = {stale.max_staleness}")
        yield (
            f"means: active {number(tickets.active_mean)}, not leased yet {number(tickets.waiting_mean)}, finished and "
            f"not taken {number(tickets.finished_mean)}"
        )
        waits = (f"issuing waits for {tickets.waits_for}" if tickets.waits_for else "", tickets.batch_waits_for)
        yield from (line for line in waits if line)
        yield ""
    if told is None:
        return
    active, closed = told
    ages = Counter(step - group.base for group in active if group.state != "taken")
    yield rule(f"OUTSTANDING by age at step {step}, in steps (groups that no step has taken)")
    for age, count in sorted(ages.items()):
        yield f"{age:5} {'#' * min(2 * BAR, count)} {count}"
    if not ages:
        yield "none"
    yield from ("", rule("ACTIVE  oldest first"))
    yield from table(GROUP_HEADS, [_active(group, step, snapshot.window.ends_unix_s) for group in active])
    yield from ("", rule("CLOSED  newest first"))
    heads = ("group", "problem", "base", "step", "age", "became", "kept", "took")
    yield from table(heads, [_closed(group) for group in closed])


GROUP_HEADS = ("group", "problem", "state", "base", "deadline", "age", "rollouts: done", "leased", "for")


def _active(group: Group, step: int, now_s: float | None) -> tuple[str, ...]:
    for_s = None if now_s is None else max(0.0, now_s - group.issued_unix_s)
    age = (step if group.step is None else group.step) - group.base
    done = f"{group.num_finished}/{group.num_rollouts}"
    where = (group.state, str(group.base), str(group.deadline), str(age))
    return (str(group.group), group.problem, *where, done, str(group.num_leased), span(for_s))


def _closed(group: Group) -> tuple[str, ...]:
    age = "-" if group.step is None else str(group.step - group.base)
    took = None if group.decided_unix_s is None else group.decided_unix_s - group.issued_unix_s
    step = "-" if group.step is None else str(group.step)
    became = f"dropped: {group.drop_reason}" if group.drop_reason else "trained"
    kept = f"{group.num_kept}/{group.num_rollouts}"
    return (str(group.group), group.problem, str(group.base), step, age, became, kept, number(took, ".2f", " s"))


def learner(snapshot: Snapshot, steps: Sequence[Step] | None, shown: int) -> Iterator[str]:
    """4: the newest steps, and one of them as a time line; `shown` is its place in `steps`."""
    one = snapshot.learner
    if one is not None and one.parts_s:
        yield rule(f"A STEP'S PARTS  seconds, mean of {one.steps} steps in the window")
        longest = max(one.parts_s.values()) or 1.0
        for part, seconds in one.parts_s.items():
            yield f"{part:11} {'#' * round(BAR * seconds / longest):{BAR}} {seconds:8.3f}"
        yield f"train: {times(one.train)}; {number(one.tokens_per_s, '.0f')} tokens/s meanwhile"
    if steps:
        yield from ("", *timeline(steps[shown], steps[shown + 1] if shown + 1 < len(steps) else None))
        yield from ("", rule("STEPS  seconds since the batch was taken"))
        rows = [_step_row(step, index == shown) for index, step in enumerate(steps)]
        heads = ("", "step", "taken at", "fetched", "trained", "published", "all loaded", "groups", "reward", "age")
        yield from table(heads, rows)
    if one is not None and one.figures:
        yield from ("", rule("FIGURES  of the newest step"))
        yield from table(("figure", "value"), [(name, f"{value:.6g}") for name, value in one.figures.items()])


def _step_row(step: Step, shown: bool) -> tuple[str, ...]:
    loaded = max((ack.unix_s for ack in step.acks), default=None)
    moments = (step.fetched_unix_s, step.trained_unix_s, step.published_unix_s, loaded)
    after = [number(None if at is None else at - step.taken_unix_s, ".2f") for at in moments]
    told = (number(step.num_groups, "d"), number(step.reward, ".2f"), number(step.age, ".2f"))
    return (">" if shown else "", str(step.step), stamp(step.taken_unix_s), *after, *told)


def timeline(step: Step, following: Step | None) -> Iterator[str]:
    """One step's parts on one scale, up to the taking of the next batch."""
    yield rule(f"STEP {step.step}  time line, from its batch to the next; n next step, p previous")
    parts = _parts(step)
    start = step.taken_unix_s
    ends = [end for _, _, _, end in parts] + ([following.taken_unix_s] if following else [])
    whole = max([end - start for end in ends], default=0.0)
    if not parts or whole <= 0:
        yield "only its batch is on record"
        return
    for kind, what, begin, end in parts:
        left = min(BAR - 1, max(0, int(BAR * (begin - start) / whole)))
        wide = max(1, min(BAR - left, round(BAR * (end - begin) / whole)))
        bar = " " * left + MARKS[kind] * wide
        yield f"{what:24} |{bar:{BAR}}| {begin - start:8.3f} .. {end - start:8.3f} s"
    if following:
        yield f"{'the next batch':24}  {'':{BAR}}  {following.taken_unix_s - start:8.3f} s"


def _parts(step: Step) -> list[tuple[str, str, float, float]]:
    """(kind, what, begin, end) of those that are on record, by their ends."""
    out = []
    fetched, trained, published = step.fetched_unix_s, step.trained_unix_s, step.published_unix_s
    if fetched is not None and trained is not None:
        out += [("fetch", "fetch", step.taken_unix_s, fetched), ("train", "train", fetched, trained)]
        if published is not None:
            out.append(("publish", f"publish version {step.step + 1}", trained, published))
        if step.checkpoint_unix_s is not None:
            out.append(("checkpoint", "checkpoint is on record", trained, step.checkpoint_unix_s))
    if published is not None:
        out += [("load", f"{ack.engine} loads it", published, ack.unix_s) for ack in step.acks]
    return out


def weights(snapshot: Snapshot, versions: Sequence[Version] | None) -> Iterator[str]:
    """5: versions on their way, per engine."""
    swap = snapshot.swap
    yield rule(f"WEIGHTS  version {snapshot.run.published} is published, all live engines have {snapshot.run.acked}")
    if swap is not None:
        yield (
            f"{swap.swaps} swaps in the window; publish {number(swap.publish_s, '.3f')} s per step, receive "
            f"{number(swap.receive_s, '.3f')} s, pause {number(swap.pause_s, '.3f')} s per swap = "
            f"{number(swap.paused, '.1%')} of the engines' time"
        )
        yield f"until all engines had it: {times(swap.lag)}; {number(swap.lag_steps, '.2f')} versions behind on average"
        yield f"slowest: {swap.slowest or 'none is behind'}"
    yield from ("", rule("ENGINES"))
    loaded = [(one.name, number(one.version, "d"), number(one.paused, ".1%")) for one in snapshot.engines]
    yield from table(("engine", "version", "paused"), loaded)
    if versions is None:
        return
    names = sorted({ack.engine for version in versions for ack in version.acks})
    yield from ("", rule("VERSIONS  newest first; seconds from publication to its use (of these, without generating)"))
    rows = [
        (f"{one.lineage}.{one.version}", stamp(one.published_unix_s), *(_lag(one, name) for name in names))
        for one in versions
    ]
    yield from table(("lineage.version", "published", *names), rows)


def _lag(version: Version, engine: str) -> str:
    found = [ack for ack in version.acks if ack.engine == engine]
    return f"{found[0].unix_s - version.published_unix_s:.2f} ({found[0].pause_s:.2f})" if found else "-"


def times(told: Times | None) -> str:
    """A distribution of seconds."""
    if told is None:
        return "-"
    return (
        f"mean {told.mean_s:.3f} s, half within {told.p50_s:.3f} s, 95% within {told.p95_s:.3f} s ({told.count} times)"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they have to be."""
    held = [tuple(heads), *map(tuple, rows)]
    wide = [max(len(row[column]) for row in held) for column in range(len(heads))]
    for row in held:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip()
    if len(held) == 1:
        yield "none"
