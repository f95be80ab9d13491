"""10,000 requests that wait cost a step under a millisecond, whatever they wait for (`tests/benchmarks/scheduler.py` has figures)."""

from __future__ import annotations

import pytest
from benchmarks import scheduler as bench

OTHERS = [name for name in bench.SETTINGS if name != "kv"]


@pytest.mark.parametrize("name", ["kv", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_ten_thousand_waiting_cost_a_step_under_a_millisecond(name: str) -> None:
    without, with_them = bench.waiting_us(name, bench.SETTINGS[name], steps=40, rounds=2)
    assert with_them - without < 1000, f"{without:.0f} and {with_them:.0f} us, medians of 80 steps"
