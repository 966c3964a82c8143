"""Metrics for Prometheus, on loopback, from the snapshot that every reader shares.

Consumes    a snapshot per role
Produces    GET /metrics: rocstar_clock_seconds_total, rocstar_counter_total, rocstar_gauge, rocstar_histogram
Waits for   nothing; scrapes are answered in a thread of their own
Invariant   counters are cumulative, as the roles keep them; nothing is computed here
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

ROLE = ["role", "name"]


class Exporter(Collector):
    """Serves the newest status; port 0 serves nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._roles: dict[str, dict[str, Any]] = {}

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

    def update(self, snapshots: dict[str, dict[str, Any]]) -> None:
        """Takes the newest snapshots, by name of the role."""
        self._roles = snapshots

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


def _cumulative(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Ours count per bucket; Prometheus wants all up to the edge."""
    out, total = [], 0
    for edge, count in zip([*histogram["edges"], "+Inf"], histogram["counts"], strict=True):
        total += count
        out.append((str(edge), total))
    return out
