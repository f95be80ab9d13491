"""Times, filters and objectives as users write them."""

from __future__ import annotations

import pytest

from phasewise.analyzer.window import parse_filter, parse_slo, parse_time, parse_window
from phasewise.rules.errors import InputError

NOW = 1_764_424_800 * 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("now", NOW),
        ("now-15m", NOW - 900 * 10**9),
        ("1764424800", NOW),
        ("1764424800000", NOW),
        ("1764424800000000000", NOW),
        ("4102444800000000000", 4_102_444_800 * 10**9),
        ("2025-11-29T14:00:00Z", NOW),
        ("2025-11-29 14:00", NOW),
        ("2025-11-29T15:00:00+01:00", NOW),
    ],
)
def test_times_are_read_as_written(text: str, expected: int) -> None:
    assert parse_time(text, NOW) == expected


def test_a_time_that_is_none_names_option_and_remedy() -> None:
    with pytest.raises(InputError, match=r"from: 'noon': is not a time \(use now-15m"):
        parse_window("noon", None, NOW)


def test_a_window_needs_its_ends_in_order() -> None:
    with pytest.raises(InputError, match="swap them"):
        parse_window("now", "now-5m", NOW)
    assert parse_window(None, None, NOW).seconds == 900


def test_a_filter_keeps_colons_in_its_value() -> None:
    assert parse_filter("route:eq:/v1/chat:stream").value == "/v1/chat:stream"
    for broken in ("model", "model:eq", "model:like:x", ":eq:x"):
        with pytest.raises(InputError, match="key:op:value"):
            parse_filter(broken)


def test_objectives_carry_unit_and_boundary() -> None:
    first, second, third = parse_slo("ttft:2s, itl:80ms,client.e2e:1.5m")
    assert (first.metric, first.limit_s, first.boundary) == ("ttft", 2.0, "engine")
    assert second.limit_s == pytest.approx(0.08)
    assert (third.boundary, third.limit_s) == ("client", 90.0)
    for broken in ("ttft", "ttft:fast", "latency:2s", "router.ttft:2s"):
        with pytest.raises(InputError, match="metric:limit"):
            parse_slo(broken)
