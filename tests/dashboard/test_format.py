"""Numbers as people read them."""

from __future__ import annotations

import pytest

from phasewise.dashboard import format as fmt


def plain(text: str | None) -> str | None:
    return text.replace(fmt.NARROW, " ") if text is not None else None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"), (0, "0 s"), (0.000042, "42 µs"), (0.0213, "21.3 ms"), (0.9996, "1 s"), (1.0, "1 s"), (4.104, "4.1 s"),
        (38.25, "38.2 s"), (599.4, "599 s"), (660, "11 min"), (7260, "2.02 h"), (float("nan"), "unknown"), (-0.25, "-250 ms"),
    ],
)  # fmt: skip
def test_durations(value: float | None, text: str) -> None:
    assert plain(fmt.seconds(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12960, "13,000"),
        (0.02134, "0.0213"),
        (999.6, "1,000"),
        (1234567, "1,230,000"),
        (0, "0"),
        (-4.125, "-4.12"),
        (None, "unknown"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.61, "61 %"),
        (0.1423, "14.2 %"),
        (0.0002, "0.02 %"),
        (0.00001, "<0.01 %"),
        (0.9999, ">99.9 %"),
        (1.0, "100 %"),
        (0.0, "0 %"),
        (None, "unknown"),
    ],
)
def test_shares_never_claim_all_or_nothing(value: float | None, text: str) -> None:
    assert plain(fmt.share(value)) == text


def test_large_and_small() -> None:
    assert fmt.count(12960) == "12,960"
    assert fmt.compact(88100) == "88.1k"
    assert fmt.compact(3_200_000) == "3.2M"
    assert plain(fmt.size(16.78e9)) == "16.8 GB"
    assert plain(fmt.percent(0.064)) == "6.4 %"
    assert plain(fmt.percent(0.634)) == "63 %"


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (1.12, 1.0, "▲ +12 %"),
        (0.5, 1.0, "▼ −50 %"),
        (1.0, 1.001, "≈ same"),
        (50.0, 1.0, "▲ ×50"),
        (1.0, None, None),
        (1.0, 0.0, None),
    ],
)
def test_changes_have_arrow_and_sign(now: float, before: float | None, text: str | None) -> None:
    assert plain(fmt.change(now, before)) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.994, "ratio", "99.4 %"), (1.9, "seconds", "1.9 s"), (4310, "tokens per second", "4,310 tok/s"), (True, "truth", "yes"),
        ("bandwidth", "word", "bandwidth"), (None, "ratio", "unknown"), (38, "count", "38"), (2.5, "per second", "2.5/s"),
        (1.6e10, "bytes", "16 GB"), (8000, "tokens", "8,000 tokens"),
    ],
)  # fmt: skip
def test_signals_in_their_unit(value: object, unit: str, text: str) -> None:
    assert plain(fmt.quantity(value, unit)) == text


def test_moments_are_utc() -> None:
    at = 1_764_424_800 * 10**9 + 204_000_000
    assert fmt.moment(at, fraction=True) == "14:00:00.204"
    assert fmt.moment(at, day=True) == "Nov 29 14:00:00"
    assert fmt.interval(at, at + 60 * 10**9) == "Nov 29, 14:00:00 – 14:01:00"
    assert fmt.interval(at, at + 86400 * 10**9) == "Nov 29 14:00:00 – Nov 30 14:00:00"
    year = 365 * 86400 * 10**9
    assert fmt.interval(at, at + year) == "Nov 29 2025 14:00:00 – Nov 29 2026 14:00:00"
    assert fmt.interval(at, at + 60 * 10**9, at + year) == "Nov 29 2025, 14:00:00 – 14:01:00"
    assert fmt.interval(at, at + 60 * 10**9, at) == "Nov 29, 14:00:00 – 14:01:00"
    assert fmt.moment(2**63 - 1, day=True)
    assert [plain(fmt.age(s)) for s in (3.2, 240, 7200, 10**6)] == ["3 s", "4 min", "2 h", "12 d"]


def test_one_thing_is_told_in_the_singular() -> None:
    told = [fmt.counted(value, "request") for value in (0, 1, 2, 12_960, None)]
    assert told == ["0 requests", "1 request", "2 requests", "12,960 requests", "unknown requests"]
