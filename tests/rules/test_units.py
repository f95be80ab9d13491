"""Units as others write them."""

from __future__ import annotations

import pytest

from phasewise.rules.units import factor, parse_duration_s, to_seconds


@pytest.mark.parametrize(
    ("unit", "expected"), [("ms", 1e-3), ("s", 1), ("us", 1e-6), ("ns", 1e-9), ("GB", 1e9), ("GiB", 2**30)]
)
def test_factor(unit: str, expected: float) -> None:
    assert factor(unit) == expected


def test_an_unknown_unit_is_unknown() -> None:
    assert factor("fortnight") is None
    with pytest.raises(KeyError):
        to_seconds(1, "GB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.5ms", 0.0125),
        ("1.2s", 1.2),
        ("800µs", 8e-4),
        ("800us", 8e-4),
        ("13ns", 1.3e-8),
        ("1e-3s", 1e-3),
        (" 5ms ", 0.005),
    ],
)
def test_duration(text: str, expected: float) -> None:
    assert parse_duration_s(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "12", "ms", "-3ms", "1h2m", "inf s", "nan", "12 ms", "1e999s"])
def test_anything_else_is_no_duration(text: str) -> None:
    assert parse_duration_s(text) is None
