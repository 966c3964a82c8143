"""Metrics for Prometheus, on loopback, from the snapshot that every reader shares.

Consumes    a snapshot per role; where the run stands
Produces    GET /metrics: the families of launch/monitor/metrics.py
Waits for   nothing; scrapes are answered in a thread of their own
Invariant   counters are cumulative, as the roles keep them; nothing is computed here
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.monitor.metrics import FAMILIES

ROLE = ["role", "name"]
STATES = ("waiting", "leased", "finished", "taken")
STANDING = {
    "rocstar_next_step": "next_step",
    "rocstar_acked_version": "acked",
    "rocstar_max_staleness": "max_staleness",
}


class Exporter(Collector):
    """Serves the newest status; port 0 serves nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._roles: dict[str, dict[str, Any]] = {}
        self._standing: Mapping[str, Any] = {}

    def __enter__(self) -> Exporter:
        if self._port:
            registry = CollectorRegistry()
            registry.register(self)
            self._server, self._thread = start_http_server(self._port, addr="127.0.0.1", registry=registry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._port:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def update(self, snapshots: dict[str, dict[str, Any]], standing: Mapping[str, Any]) -> None:
        """Takes the newest snapshots, by name of the role, and the buffer's status."""
        self._roles, self._standing = snapshots, standing

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        clock = CounterMetricFamily("rocstar_clock_seconds", "Seconds a role spent in a state", labels=[*ROLE, "state"])
        counter = CounterMetricFamily("rocstar_counter", "Cumulative counters of a role", labels=[*ROLE, "key"])
        gauge = GaugeMetricFamily("rocstar_gauge", "Present values of a role", labels=[*ROLE, "key"])
        histogram = HistogramMetricFamily("rocstar_histogram", "Distributions of a role", labels=[*ROLE, "key"])
        for snapshot in self._roles.values():
            who = [snapshot["role"], snapshot["name"]]
            for state, seconds in snapshot["clock"].items():
                clock.add_metric([*who, state], seconds)
            for key, value in snapshot["counters"].items():
                counter.add_metric([*who, key], value)
            for key, value in snapshot["gauges"].items():
                gauge.add_metric([*who, key], value)
            for key, value in snapshot["histograms"].items():
                histogram.add_metric([*who, key], buckets=_cumulative(value), sum_value=value["sum"])
        yield from (clock, counter, gauge, histogram)
        yield from self._used()
        yield from self._run()

    def _used(self) -> Iterator[Metric]:
        """What the roles' processes took of their hosts."""
        cpu = CounterMetricFamily("rocstar_cpu_seconds", "CPU seconds of a role's processes", labels=ROLE)
        wait = CounterMetricFamily("rocstar_core_wait_seconds", "Seconds a role's threads had no core", labels=ROLE)
        for snapshot in self._roles.values():
            usage = snapshot.get("usage") or {}
            if usage:
                cpu.add_metric([snapshot["role"], snapshot["name"]], usage["cpu_s"])
                wait.add_metric([snapshot["role"], snapshot["name"]], usage["core_wait_s"])
        yield from (cpu, wait)

    def _run(self) -> Iterator[Metric]:
        """Where the run stands; nothing before the buffer has told."""
        tickets = self._standing.get("tickets")
        if not tickets:
            return
        states = GaugeMetricFamily("rocstar_tickets", "Active tickets", labels=["state"])
        for state in STATES:
            states.add_metric([state], tickets["by_state"].get(state, 0))
        yield states
        yield GaugeMetricFamily("rocstar_tickets_bound", "Most tickets that may be active", value=tickets["bound"])
        for name, key in STANDING.items():
            yield GaugeMetricFamily(name, FAMILIES[name], value=self._standing[key])


def _cumulative(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Ours count per bucket; Prometheus wants all up to the edge."""
    out, total = [], 0
    for edge, count in zip([*histogram["edges"], "+Inf"], histogram["counts"], strict=True):
        total += count
        out.append((str(edge), total))
    return out
