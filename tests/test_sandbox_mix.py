"""Two thousand calls of a training's mix in one burst, while a zygote and a supervisor die."""

from __future__ import annotations

import pytest

from tests.benchmarks.burst import burst
from tests.sandbox_mix import mix


@pytest.mark.slow
async def test_two_thousand_mixed_calls_are_each_answered_rightly_while_processes_die() -> None:
    report = await burst(2000, workers=2, kill=True)
    assert report["wrong"] == 0, report["examples"]
    assert report["lost"] == 0
    assert sum(report["restarts"]) >= 2
    assert report["processes_rss_mib"] < 1500


def test_the_mix_is_the_one_that_is_named() -> None:
    cases = mix(45_000, seed=1)
    assert cases[:50] == mix(45_000, seed=1)[:50]
    share = {word: sum(word in case.code for case in cases) / len(cases) for word in ("x * y", "sympy", "numpy")}
    assert share["x * y"] == pytest.approx(0.60, abs=0.01)
    assert share["sympy"] == pytest.approx(0.25, abs=0.01)
    assert share["numpy"] == pytest.approx(0.10, abs=0.01)
    assert 50 <= sum(case.status == "timeout" for case in cases) <= 100
