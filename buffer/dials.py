"""Settings that may be turned while a run goes on: checked, recorded, told to those who obey them.

Consumes    requests to turn a dial; the values that a start of the buffer was given
Produces    records (name, value, first step it holds for), durable before they are told; the buffer's own dials moved
Waits for   nothing: no sockets, no disk, no clocks
Invariant   the value of a dial at a step is that of its last record whose `step` is at most this one: the same for a
            learner that computes the step again. A dial turned stands at a resume, unless the recipe says otherwise
            than it did before

A record's `step` is the next one to be taken when it was made, so that no batch that is on record changes its terms.
Which settings are live is marked in the tree (`live` of a field); this table says what values they may have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from buffer.index import put_meta
from buffer.run_state import Now, RunState
from buffer.settings import MAX_STALENESS, BufferSettings
from buffer.wire import Dial, Reason, Refusal, Turned, value_at

STALENESS = "staleness.max_staleness"
MAX_CONCURRENCY = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """What values a dial may have."""

    least: float
    most: float = math.inf
    whole: bool = False
    above: bool = False
    """`least` itself is not allowed"""

    def holds(self, value: float) -> bool:
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return False
        return value <= self.most and (value > self.least if self.above else value >= self.least)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.above:
            return f"{kind} above {self.least:g}" + (f", at most {self.most:g}" if math.isfinite(self.most) else "")
        return f"{kind} from {self.least:g} to {self.most:g}"


LIVE: Mapping[str, Range] = {
    STALENESS: Range(least=0, most=MAX_STALENESS, whole=True),
    "rollout.concurrency": Range(least=1, most=MAX_CONCURRENCY, whole=True),
    "learner.lr": Range(least=0, above=True),
    "buffer.lease_s": Range(least=0, above=True),
    "buffer.group_timeout_s": Range(least=0, above=True),
    "weights.ack_timeout_s": Range(least=0, above=True),
    "sandbox.wall_s": Range(least=0, most=3600, above=True),
    "sandbox.cpu_s": Range(least=0, most=3600, above=True),
}
"""dotted name -> its values"""

OWN = {
    STALENESS: "max_staleness",
    "buffer.lease_s": "lease_s",
    "buffer.group_timeout_s": "group_timeout_s",
    "weights.ack_timeout_s": "ack_timeout_s",
}
"""those that the buffer itself obeys -> field of its settings"""


def on_dial(run: RunState, dial: Dial, now: Now) -> None:
    """Turn one.

    Raises:
        Refusal: it is not live, or can't have this value.
    """
    known = LIVE.get(dial.name)
    if known is None:
        raise Refusal(Reason.NOT_ALLOWED, f"{dial.name[:60]!r} is not live: {', '.join(LIVE)} are")
    if not known.holds(dial.value):
        raise Refusal(Reason.NOT_ALLOWED, f"{dial.name} = {dial.value:g} must be {known}")
    if dial.name == STALENESS and run.settings.uncorrected and dial.value > 0:
        raise Refusal(
            Reason.NOT_ALLOWED,
            f'{dial.name} = {int(dial.value)} with loss.correction = "none": stale tokens would be trained as if the '
            'present policy had sampled them; leave it at 0, or resume with loss.correction = "direct"',
        )
    _obey(run, dial.name, dial.value)
    _record(run, dial.name, dial.value, now)


def begin(run: RunState, given: Mapping[str, float], now: Now) -> None:
    """The first record of each: what the run starts with. `given` are those that are not in the buffer's settings."""
    values = _given(run.settings, given)
    for name, value in values.items():
        _record(run, name, value, now)
    run.put(put_meta("recipe_dials", json.dumps(values)))


def restore(run: RunState, rows: Iterable[tuple[Any, ...]], known: str, given: Mapping[str, float], now: Now) -> None:
    """Take up the records; a recipe that was changed for this start counts as turning what changed.

    `known` is what an earlier start was given, as JSON.
    """
    run.turned = [Turned(name=name, value=value, step=step) for name, value, step in rows]
    before, values = json.loads(known), _given(run.settings, given)
    for name, value in values.items():
        turned = value_at(run.turned, name, run.ledger.next_step)
        forced = name == STALENESS and run.settings.uncorrected
        if turned is None or before.get(name, value) != value or forced:
            _obey(run, name, value)
            if turned != value:
                _record(run, name, value, now)
        else:
            _obey(run, name, turned)
    run.put(put_meta("recipe_dials", json.dumps(values)))


def report(run: RunState) -> list[dict[str, Any]]:
    """Those that were turned, with their last record."""
    last: dict[str, Turned] = {}
    count: dict[str, int] = {}
    for one in run.turned:
        last[one.name] = one
        count[one.name] = count.get(one.name, 0) + 1
    return [
        {"name": name, "value": one.value, "step": one.step} for name, one in sorted(last.items()) if count[name] > 1
    ]


def _given(settings: BufferSettings, others: Mapping[str, float]) -> dict[str, float]:
    return {name: float(getattr(settings, field)) for name, field in OWN.items()} | {
        name: float(value) for name, value in others.items()
    }


def _record(run: RunState, name: str, value: float, now: Now) -> None:
    step = run.ledger.next_step
    run.turned.append(Turned(name=name, value=value, step=step))
    run.put(
        ("INSERT INTO dials (name, value, step, unix_s) VALUES (?, ?, ?, ?)", (name, value, step, now.unix_s)),
    )


def _obey(run: RunState, name: str, value: float) -> None:
    """What the buffer itself does about it."""
    field = OWN.get(name)
    if field is None:
        return
    typed = int(value) if LIVE[name].whole else value
    try:
        run.settings = BufferSettings(**(run.settings.model_dump() | {field: typed}))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise Refusal(Reason.NOT_ALLOWED, f"{name} = {value:g}: {fault}") from error
    run.leases.lease_s, run.leases.group_timeout_s = run.settings.lease_s, run.settings.group_timeout_s
    run.deadlines.ack_timeout_s = run.settings.ack_timeout_s
    if name == STALENESS:
        run.ledger.set_staleness(int(value))
        run.put(put_meta("max_staleness", int(value)))
