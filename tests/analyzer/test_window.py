"""Times, filters and objectives as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "text", ["ttft:..", "ttft:0", "ttft:1e3s", "ttft:²s", "ttft:" + "9" * 400, "ttft:-1s", "ttft:nans"]
)
def test_a_limit_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="metric:limit"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("²", "not a time"), ("١٢", "not a time"), ("now-²m", "not a time"), ("-1", "not a time"),
        ("now-1000000w", "before 1970"), ("now-" + "9" * 5000 + "s", "before 1970"), ("0001-01-01", "before 1970"),
        ("9" * 19, "after 2100"), ("9" * 5000, "after 2100"), ("9999-12-31T23:59:59Z", "after 2100"),
    ],
)  # fmt: skip
def test_a_time_outside_what_can_be_stored_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"^from: .*{problem}") as caught:
        parse_window(text, "now", NOW)
    assert len(str(caught.value)) < 300


def test_the_window_before_an_early_end_begins_at_the_beginning() -> None:
    assert parse_window(None, "60", NOW).from_unix_ns == 0


_PIECES = st.sampled_from(
    ["now", "-", "9" * 30, "²", "..", ":", ",", "eq", "ttft", "2s", "\0", "\ud800", "w", "T", "Z", "+", "2026-11-29"]
)
_TEXTS = (
    st.text(max_size=20)
    | st.lists(_PIECES, max_size=6).map("".join)
    | st.from_regex(r"now-[0-9]{1,40}[smhdw]", fullmatch=True)
)


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: parse_time(text, NOW), lambda text: parse_window(text, None, NOW),
        lambda text: parse_window(None, text, NOW), parse_filter, parse_slo,
        lambda text: parse_slo(f"ttft:{text}"), lambda text: parse_filter(f"model:eq:{text}"),
    ],
)  # fmt: skip
@given(text=_TEXTS)
@example(text="²")
def test_whatever_is_written_there_is_an_answer_or_an_input_error(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
    except InputError as error:
        assert re.search(r"\w", str(error))


@given(text=_TEXTS)
def test_what_is_read_fits_the_store(text: str) -> None:
    try:
        found = parse_window(text, None, NOW)
    except InputError:
        return
    assert 0 <= found.from_unix_ns < found.to_unix_ns and 2 * found.to_unix_ns < 2**63
