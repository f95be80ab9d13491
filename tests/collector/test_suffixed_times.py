"""Times as text that names its own unit, as Rust prints durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.collector.readings import suffixed

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_number_and_its_unit_are_seconds(whole: int, thousandths: int, unit: str) -> None:
    text = f"{whole}.{thousandths:03}{unit}"
    assert suffixed([text]).to_list() == [pytest.approx((whole + thousandths / 1000) * UNITS[unit])]


@pytest.mark.parametrize(
    "value", ["", "12", "ms", "1.ms", "-1ms", "1 ms", "1min", "1e3s", "NaNs", 12, 1.5, True, None, ["1s"]]
)
def test_anything_else_is_unknown(value: object) -> None:
    assert suffixed([value]).to_list() == [None]
