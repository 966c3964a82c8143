"""Every figure that is told is documented, every documented one is told; Prometheus, the dashboard, the page agree."""

from __future__ import annotations

import ast
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.monitor.metrics import FAMILIES, KEYS, markdown
from launch.monitor.readings import Reading, read_directory
from launch.prometheus import Exporter
from tests.recorded import ROOT

SOURCE = Path(__file__).parents[1]
PACKAGES = {
    "rollout": ("actors",),
    "filter": ("actors",),
    "buffer": ("buffer",),
    "learner": ("learner",),
    "sandbox": ("sandbox", "launch"),
}
KINDS = {"counters": "counter", "gauges": "gauge", "histograms": "histogram"}
TOLD_BY = {"count": "counter", "gauge": "gauge", "observe": "histogram"}


def last(name: str) -> Reading:
    return read_directory(ROOT / name).readings[-1]


@pytest.mark.parametrize("name", sorted(folder.name for folder in ROOT.iterdir()))
def test_every_figure_of_a_recorded_run_is_documented(name: str) -> None:
    told = [
        (snapshot["role"], KINDS[kinds], key)
        for snapshot in last(name).roles.values()
        for kinds in KINDS
        for key in snapshot[kinds]
    ]
    assert len(told) > 80
    unknown = [one for one in told if not any((k.role, k.kind) == one[:2] and k.names(one[2]) for k in KEYS)]
    assert unknown == []


def constants(package: str) -> Iterator[str]:
    """Every text in a package's sources, those inside f-strings too."""
    for path in (SOURCE / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id  # a counter of the sandbox is a field


def test_every_documented_figure_is_in_its_roles_source() -> None:
    told = list(told_in_source())
    texts = {package: set(constants(package)) for package in {one for many in PACKAGES.values() for one in many}}
    for key in KEYS:
        stem = key.key.partition("*")[0]
        known = set().union(*(texts[package] for package in PACKAGES[key.role]))
        literal = any(stem == text or (key.key != stem and text.startswith(stem)) for text in known)
        assert literal or any(meet(pattern, key.key) for _, kind, pattern in told if kind == key.kind), key


def told_in_source() -> Iterator[tuple[str, str, str]]:
    """(package, kind, key with * for what varies) of each call of Meters."""
    for package in ("actors", "buffer", "learner"):
        for path in (SOURCE / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    key = written(node.args[0])
                    owner = ast.unparse(node.func.value)
                    if node.func.attr in TOLD_BY and key and owner.endswith("meters"):
                        yield package, TOLD_BY[node.func.attr], key


def written(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return ""


def meet(one: str, other: str) -> bool:
    """Whether two keys, of which parts may vary, can be the same."""
    return any(
        re.fullmatch(re.escape(a).replace(r"\*", ".+"), b.replace("*", "x")) for a, b in ((one, other), (other, one))
    )


def test_every_figure_in_the_source_is_documented() -> None:
    found = list(told_in_source())
    assert len(found) > 50
    for package, kind, key in found:
        roles = {role for role, packages in PACKAGES.items() if package in packages}
        documented = [one.key for one in KEYS if one.role in roles and one.kind == kind]
        assert any(meet(key, one) for one in documented), f"add {package} {kind} {key} to launch/monitor/metrics.py"


def test_prometheus_serves_every_documented_family_and_no_other(unused_tcp_port: int) -> None:
    reading = last("finished")
    with Exporter(unused_tcp_port) as exporter:
        exporter.update({name: dict(role) for name, role in reading.roles.items()}, reading.standing)
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics") as answer:
            text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    served = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    assert served == set(FAMILIES)
    assert sum(len(one.samples) for one in families) > 200


def test_the_dashboards_expressions_name_documented_figures() -> None:
    dashboard = json.loads((SOURCE / "launch" / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        names = re.findall(r"rocstar_\w+", expression)
        assert names, expression
        assert all(re.sub(r"_(bucket|sum|count)$", "", name) in FAMILIES for name in names), expression
        for labels in re.findall(r"\{([^}]*)\}", expression):
            check_labels(dict(re.findall(r'(\w+)=~?"([^"]*)"', labels)), expression)


def check_labels(labels: dict[str, Any], expression: str) -> None:
    if "key" in labels:
        key = labels["key"].replace(".+", "x")
        assert any(one.role == labels["role"] and one.names(key) for one in KEYS), expression


def test_the_page_of_metrics_is_the_table() -> None:
    written_down = (SOURCE / "launch" / "METRICS.md").read_text(encoding="utf-8")
    assert written_down == markdown(), "python -m launch.monitor.metrics > launch/METRICS.md"
