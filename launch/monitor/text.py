"""The one screen, as lines of text.

Consumes    a snapshot and its advice
Produces    lines of at most WIDTH columns, about forty
Waits for   nothing: pure
Invariant   what is not known is shown as "-", never as 0
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence

from launch.monitor.advisor import WORK, Advice
from launch.monitor.capacities import Capacity
from launch.monitor.snapshot import Role, Snapshot

WIDTH = 120
BAR = 20
MARKS = {"busy": "#", "starved": ".", "blocked": "x", "sync": "=", "down": "!"}
SPARKS = "_.-~=+*#"
MAX_ALERTS = 5
FAR = 20
"""a stage that could do so many times more is no matter"""
MAX_ROLES = 10


def screen(snapshot: Snapshot, advice: Advice) -> list[str]:
    """Everything."""
    lines = [*_head(snapshot), *_advice(advice)]
    if snapshot.roles:
        lines += [*_flow(snapshot, advice), *_roles(snapshot)]
        lines += [*_tickets(snapshot), *_ages(snapshot), *_useful(snapshot), *_learning(snapshot)]
    lines += [*_trend(snapshot), *_alerts(snapshot)]
    return [line if len(line) <= WIDTH else line[: WIDTH - 1] + ">" for line in lines]


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure, or "-"."""
    return "-" if value is None else f"{value:{form}}{unit}"


def span(seconds: float | None) -> str:
    """A time for people."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _head(snapshot: Snapshot) -> Iterator[str]:
    run = snapshot.run
    parts = [run.name, run.state, f"step {run.step}/{run.steps}", f"version {run.acked}"]
    if run.wall_s is not None:
        parts.append(span(run.wall_s))
    if run.eta_s is not None:
        parts.append(f"eta {span(run.eta_s)}")
    if run.step_s is not None:
        parts.append(f"{run.step_s:.1f} s/step")
    if snapshot.roles:
        parts.append(f"window {snapshot.window.what}")
    yield "  ".join(parts)
    if run.reason:
        yield f"ended: {run.reason}"
    if not snapshot.roles:
        yield "nothing was measured yet: metrics/ is empty"


def _advice(advice: Advice) -> Iterator[str]:
    yield from textwrap.wrap(f"VERDICT  {advice.verdict}", WIDTH, subsequent_indent=" " * 9)
    for reason in advice.reasons[1:3]:
        yield f"         {reason}"
    for index, fix in enumerate(advice.fixes, 1):
        yield f"FIX {index}    {fix.dial} {_plain(fix.now)} -> {_plain(fix.proposed)} : expect {fix.expect}"
        yield f"         {fix.reason}"


def _plain(value: object) -> str:
    return "(default)" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _flow(snapshot: Snapshot, advice: Advice) -> Iterator[str]:
    rates = snapshot.rates
    yield rule(
        f"FLOW  {number(rates.groups_trained_per_min)} groups/min trained, "
        f"{number(rates.groups_decided_per_min)} decided; "
        f"{number(rates.tokens_generated_per_s, '.0f')} tokens/s generated"
    )
    for one in advice.capacities:
        if one.use or one.stage in WORK:
            yield _stage(one, advice.limit, rates.groups_trained_per_min)


def _stage(one: Capacity, limit: str, rate: float | None) -> str:
    use = "-" if one.use is None else f"{one.use:4.0%}"
    bar = "" if one.use is None else "#" * round(BAR * min(1.0, one.use))
    mark = "  <- limit" if one.stage == limit else ""
    capacity = number(one.groups_per_min, ".0f")
    if rate and one.groups_per_min is not None and one.groups_per_min > FAR * rate:
        capacity = f"> {FAR}x"
    return f"{one.stage:9} cap {capacity:>6}  {use:>4} {bar:{BAR}} {one.says}{mark}"


def _roles(snapshot: Snapshot) -> Iterator[str]:
    hosts = "; ".join(f"{host.name}: {host.run_used:.1f} of {host.cores} cores" for host in snapshot.hosts)
    yield rule(f"ROLES  busy #  starved .  blocked x  sync =  down !   {hosts}")
    for role in snapshot.roles[:MAX_ROLES]:
        yield role_line(role)
    if len(snapshot.roles) > MAX_ROLES:
        yield f"and {len(snapshot.roles) - MAX_ROLES} more"


def role_line(role: Role) -> str:
    """Its clock, its cores, what it waits for."""
    told = role.state if role.state != "alive" else f"waits for {role.waits_for}" if role.waits_for else ""
    return f"{role.name:12} {bar(role.shares):{2 * BAR}} {number(role.cores_used, '.2f'):>5} cores  {told}"


def bar(shares: dict[str, float] | object, width: int = 2 * BAR) -> str:
    """A clock's shares, each state with its mark; largest remainders get the last cells."""
    if not isinstance(shares, dict) or not shares:
        return ""
    exact = {state: width * share for state, share in shares.items()}
    cells = {state: int(value) for state, value in exact.items()}
    for state in sorted(exact, key=lambda one: cells[one] - exact[one])[: width - sum(cells.values())]:
        cells[state] += 1
    return "".join(MARKS.get(state, "?") * count for state, count in cells.items())


def _tickets(snapshot: Snapshot) -> Iterator[str]:
    tickets = snapshot.tickets
    if tickets is None:
        return
    states = " | ".join(f"{state} {count}" for state, count in tickets.by_state.items() if count)
    yield rule(f"TICKETS  {tickets.active} of {tickets.bound} = (S+1) P active: {states or 'none'}")
    waits = [f"issuing waits for {tickets.waits_for}" if tickets.waits_for else "", tickets.batch_waits_for]
    if any(waits):
        yield "; ".join(part for part in waits if part)


def _ages(snapshot: Snapshot) -> Iterator[str]:
    stale = snapshot.staleness
    if stale is None:
        return
    yield rule(f"STALENESS  at training, in steps; bound S = {stale.max_staleness}, oldest ever {stale.max}")
    total = sum(stale.histogram.values())
    shown = "  |  ".join(
        f"{age} {'#' * max(1, round(BAR * count / total))} {count / total:.0%}"
        for age, count in stale.histogram.items()
    )
    yield shown or "nothing is trained yet"
    if total:
        yield (
            f"mean {number(stale.mean, '.2f')} = in flight {number(stale.in_flight, '.2f')} + in queue "
            f"{number(stale.in_queue, '.2f')}; turns of several versions {number(stale.mixed_turns, '.0%')}"
        )


def _useful(snapshot: Snapshot) -> Iterator[str]:
    useful = snapshot.useful
    if useful is None:
        return
    dropped = ", ".join(f"{reason} {share:.1%}" for reason, share in useful.dropped.items()) or "none"
    yield rule(f"USEFUL  {number(useful.kept, '.0%')} of {useful.groups} groups; dropped: {dropped}")
    rates = snapshot.rates
    yield (
        f"tokens/s generated {number(rates.tokens_generated_per_s, '.0f')}, trained "
        f"{number(rates.tokens_trained_per_s, '.0f')}; tools {number(useful.tool_wait, '.0%')} of a rollout's life; "
        f"reward {number(useful.reward, '.2f')}; failed calls {number(useful.tool_error, '.0%')}"
    )


def _learning(snapshot: Snapshot) -> Iterator[str]:
    learner, swap = snapshot.learner, snapshot.swap
    if learner is not None and learner.parts_s:
        parts = "  ".join(f"{name} {seconds:.2f}" for name, seconds in learner.parts_s.items())
        yield rule(f"LEARNER STEP  {sum(learner.parts_s.values()):.2f} s: {parts}")
        shown = ("loss", "ratio_mean", "clipped_share", "capped_share", "ess", "entropy", "grad_norm", "lr")
        told = [f"{name} {learner.figures[name]:.3g}" for name in shown if name in learner.figures]
        if told:
            yield "  ".join(told)
    if swap is not None and swap.swaps:
        yield (
            f"swap  publish {number(swap.publish_s, '.2f')} s, receive {number(swap.receive_s, '.2f')} s, pause "
            f"{number(swap.pause_s, '.2f')} s = {number(swap.paused, '.1%')} of the engines' time; publish lag "
            f"{number(swap.lag.mean_s if swap.lag else None, '.2f')} s, {number(swap.lag_steps, '.1f')} versions"
        )


def _trend(snapshot: Snapshot) -> Iterator[str]:
    series = [one for one in snapshot.trend if one.values]
    if not series:
        return
    yield rule("TREND  last half hour, by step")
    for one in series:
        yield (f"{one.name:8} {one.values[0]:8.3g} -> {one.values[-1]:<8.3g} {one.unit:8} {spark(one.values)}")


def spark(values: Sequence[float]) -> str:
    """A row of marks, higher for more."""
    low, high = min(values), max(values)
    if high == low:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values)


def _alerts(snapshot: Snapshot) -> Iterator[str]:
    shown = snapshot.alerts[:MAX_ALERTS]
    if shown:
        yield rule("ALERTS")
    for alert in shown:
        yield f"{alert.level.upper():5} {alert.text}"
    if len(snapshot.alerts) > MAX_ALERTS:
        yield f"and {len(snapshot.alerts) - MAX_ALERTS} more"
    for dial in snapshot.dials:
        yield f"DIAL  {dial.name} = {dial.value:g} from step {dial.step} on"


def rule(title: str) -> str:
    """A part's first line."""
    return f"---- {title}"


def stamp(unix_s: float | None) -> str:
    """Time of day."""
    return "-" if unix_s is None else time.strftime("%H:%M:%S", time.localtime(unix_s))
