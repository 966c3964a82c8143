"""The snapshot's parts that tell of the whole run: roles, hosts, tickets, ages, what of the work is useful.

Consumes    the window's moments
Produces    parts of the snapshot
Waits for   nothing: pure
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.monitor.moments import Moments
from launch.monitor.snapshot import Host, Role, Staleness, Tickets, Useful
from launch.monitor.spans import Span, Spread, mean, over
from sandbox.api import Status, is_failure, is_infra


def roles(moments: Moments) -> tuple[Role, ...]:
    """Everyone who ever told figures, in the order of the work's way."""
    order = ("rollout", "sandbox", "filter", "buffer", "learner")
    names = sorted(moments.spans, key=lambda name: (order.index(_kind(name)), name))
    peers: Mapping[str, Any] = moments.now.standing.get("peers") or {}
    return tuple(_role(name, moments.spans[name], peers.get(name, {}), moments) for name in names)


def _kind(name: str) -> str:
    return name.rpartition("-")[0]


def _role(name: str, span: Span, peer: Mapping[str, Any], moments: Moments) -> Role:
    is_buffer = name == "buffer-0"
    age_s = moments.now.unix_s - span.now["unix_s"] if is_buffer else peer.get("heartbeat_age_s")
    return Role(
        name=name,
        role=_kind(name),
        state="alive" if is_buffer else peer.get("state", "alive"),
        error=peer.get("error", ""),
        waits_for=span.now.get("waits_for", ""),
        lives=moments.now.standing.get("life", 1) if is_buffer else peer.get("epoch", 1),
        heartbeat_age_s=age_s,
        shares=span.shares(),
        cores_used=span.usage("cpu_s"),
        core_wait=span.usage("core_wait_s"),
        host=(span.now.get("usage") or {}).get("host", ""),
    )


def hosts(moments: Moments) -> tuple[Host, ...]:
    """Machines, with what the run and everybody use of their cores."""
    by_host: dict[str, list[Span]] = {}
    for span in moments.spans.values():
        usage = span.now.get("usage") or {}
        if usage:
            by_host.setdefault(usage["host"], []).append(span)
    out = []
    for name, spans in sorted(by_host.items()):
        cores = max(span.now["usage"]["cores"] for span in spans)
        ours = sum(span.usage("cpu_s") or 0.0 for span in spans)
        longest = max(spans, key=lambda span: span.seconds)
        everybody = max(ours, longest.usage("host_cpu_s") or 0.0)
        out.append(Host(name=name, cores=cores, run_used=ours, used=min(float(cores), everybody)))
    return tuple(out)


def tickets(moments: Moments) -> Tickets | None:
    """None before the buffer has told."""
    standing = moments.now.standing
    told = standing.get("tickets")
    if not told:
        return None
    by_state = moments.standing("tickets", "by_state")
    return Tickets(
        bound=told["bound"],
        active=told["active"],
        active_mean=mean(moments.standing("tickets", "active")),
        by_state=dict(told["by_state"]),
        waiting_mean=mean([states.get("waiting", 0) for states in by_state if states is not None]),
        finished_mean=mean([states.get("finished", 0) for states in by_state if states is not None]),
        waits_for=told["waits_for"],
        batch_waits_for=(standing.get("waits_for") or {}).get("batch", ""),
    )


def staleness(moments: Moments) -> Staleness:
    """Ages of the tokens that the window's steps took; before the first step, nothing is known of them."""
    buffer = moments.buffer
    ages = buffer.spread("age")
    engines = moments.of("rollout").values()
    turns = sum(span.count("turns") for span in engines)
    return Staleness(
        max_staleness=moments.now.standing.get("max_staleness", 0),
        mean=ages.mean,
        in_flight=buffer.spread("age_in_flight").mean,
        in_queue=buffer.spread("age_in_queue").mean,
        max=int(buffer.gauge("age_max") or 0),
        histogram=_histogram(ages),
        mixed_turns=over(sum(span.count("turns_of_several_versions") for span in engines), turns),
    )


def _histogram(ages: Spread) -> dict[str, int]:
    out: dict[str, int] = {}
    for edge, count in zip([*ages.edges, 16.0], ages.counts, strict=False):
        if count:
            out[str(int(edge))] = out.get(str(int(edge)), 0) + int(count)
    return out


def useful(moments: Moments) -> Useful:
    """What became of groups and tokens."""
    buffer = moments.buffer
    kept, dropped = buffer.count("groups_kept"), buffer.tails("groups_dropped/")
    decided = kept + sum(dropped.values())
    calls = {Status(status): number for status, number in buffer.tails("calls/train/").items()}
    counted = sum(number for status, number in calls.items() if not is_infra(status))
    generated, trained = buffer.count("tokens_generated"), buffer.count("tokens_taken")
    return Useful(
        groups=int(decided),
        kept=over(kept, decided),
        dropped={reason: number / decided for reason, number in sorted(dropped.items(), key=lambda one: -one[1])},
        tokens_generated=int(generated),
        tokens_trained=int(trained),
        tokens_per_trained_group=over(generated, buffer.count("groups_taken")),
        tool_wait=_tool_wait(moments),
        tool_error=over(sum(number for status, number in calls.items() if is_failure(status)), counted),
        reward=over(buffer.count("reward/train"), buffer.count("rollouts_finished/train")),
    )


def _tool_wait(moments: Moments) -> float | None:
    engines = moments.of("rollout").values()
    tools_s = sum(span.spread("tool_queue_s").total + span.spread("tool_run_s").total for span in engines)
    return over(tools_s, tools_s + sum(span.spread("generate_s").total for span in engines))
