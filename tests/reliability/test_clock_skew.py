"""F14: hosts whose clocks stand apart, drift, or are years off: what is measured on one host holds, times are kept as they came, and how
far the clocks stand apart is measured and shown."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from call_trees import tree
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_messages import span_message, trace_request
from writing import NOW, SECOND, Bench, bench, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.scan import scan_traces
from phasewise.collector.skews import CALLS, OLD_NS, SCHEMA, STORED_EVERY_NS, Skews, skew_of

HOURS_S = 2 * 3600
EACH = 24  # calls of a host
DRIFT = 200e-6
YEAR_1970_NS, YEAR_2099_NS = SECOND, 4_070_908_800 * SECOND
CLOCKS: dict[str, float] = {
    "right": 0.0,
    "ahead-17ms": 0.017,
    "behind-17ms": -0.017,
    "ahead-5s": 5.0,
    "behind-5s": -5.0,
    "ahead-1h": 3600.0,
    "behind-1h": -3600.0,
    "drifting": 0.0,
    "in-1970": (YEAR_1970_NS - NOW) / 1e9,
    "in-2099": (YEAR_2099_NS - NOW) / 1e9,
}
MEASURED = ("e2e_s", "queue_s", "prefill_s", "decode_s", "first_token_s", "residual_s", "entry_e2e_s", "ttft_s")


def shown(host: str, unix_ns: int) -> int:
    """What the clock of a host shows at a true time."""
    drift_ns = round((unix_ns - NOW) * DRIFT) if host == "drifting" else 0
    return unix_ns + round(CLOCKS[host] * 1e9) + drift_ns


def calls(host: str) -> list[tuple[Span, Span, int]]:
    """Calls of a client, whose clock is right, served by that host over a network that is not the same both ways; when each began."""
    draw = random.Random(host)
    made = []
    for number in range(EACH):
        began = NOW + number * HOURS_S * SECOND // EACH
        outer, inner = tree(draw.randrange(2**32), began)
        outer.start_time_unix_nano = inner.start_time_unix_nano - draw.randrange(1_000_000, 9_000_000)
        outer.end_time_unix_nano = inner.end_time_unix_nano + draw.randrange(1_000_000, 9_000_000)
        made.append((outer, inner, began))
    return made


def take(b: Bench, host: str, instance: str, spans: list[Span]) -> None:
    resource = {"service.name": "x", "service.instance.id": instance, "host.name": host}
    b.journal.append(
        "spans", scan_traces(trace_request(*spans, resource=resource).SerializeToString(), b.clock.now).rows
    )


def rows_of(folder: Path, skewed: bool) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any], list[dict[str, Any]]]:
    """Rows by host in the order of the calls, health, and hours of the rollups; skewed: else all clocks are right."""
    with bench(folder, attribute=attributor(rulebook())) as b:
        made = {host: calls(host) for host in CLOCKS}
        for number in range(EACH):
            for host, own in made.items():
                outer, inner, began = own[number]
                if skewed:
                    for name in ("start_time_unix_nano", "end_time_unix_nano"):
                        setattr(inner, name, shown(host, getattr(inner, name)))
                b.clock.now = began + 20 * SECOND
                take(b, "client", "client", [outer])
                take(b, host, host, [inner])
            b.journal.sync()
            if number % 3 == 2:
                b.writer.step()
        b.run(700.0)
        b.run(700.0)
        found: dict[str, list[dict[str, Any]]] = {}
        for row in b.rows("SELECT * FROM requests ORDER BY instance, arrival_unix_ns"):
            found.setdefault(row["instance"], []).append(row)
        if skewed:  # raw times are those that came
            for host, own in made.items():
                assert [row["arrival_unix_ns"] for row in found[host]] == [
                    inner.start_time_unix_nano for _, inner, _ in own
                ]
        return found, b.writer.health(), b.rows("SELECT DISTINCT bucket_unix_ns FROM rollups")


@pytest.mark.slow
def test_clocks_that_stand_apart_change_no_duration_and_are_measured(tmp_path: Path) -> None:
    right, _, _ = rows_of(tmp_path / "right", skewed=False)
    skewed, health, buckets = rows_of(tmp_path / "skewed", skewed=True)
    assert set(skewed) == set(CLOCKS)
    for host in CLOCKS:
        rel = 2 * DRIFT if host == "drifting" else 1e-12
        for row, true in zip(skewed[host], right[host], strict=True):
            for name in MEASURED:
                assert row[name] == (
                    true[name] and pytest.approx(true[name], rel=rel, abs=1e-6 if host == "drifting" else 1e-9)
                ), (host, name)
        flags = [row["quality"] or "" for row in skewed[host]]
        if (
            abs(CLOCKS[host]) > 0.016
        ):  # more than 5 ms outside the caller's span, whose way there and back took 1 to 9 ms each
            assert all("clock_skew" in each for each in flags), host
        elif host == "right":
            assert not any("clock_skew" in each for each in flags), host
        assert all(("future" in each) == (CLOCKS[host] > 600) for each in flags), host
    told = {one["other_host"]: one for one in health["clock_skews"] if one["host"] == "client"}
    last_s = HOURS_S * DRIFT
    for host, true_s in {**CLOCKS, "drifting": last_s}.items():
        one = told[host]
        assert one["calls"] == EACH
        assert abs(one["ahead_s"] - true_s) <= max(0.2 * abs(true_s), one["within_s"]), one
        assert one["within_s"] < 0.1
        assert one["certain"] or abs(true_s) < 0.1, one
        assert not (one["certain"] and host == "right")
    assert all(mark < NOW + (HOURS_S + 2000) * SECOND for mark in health["watermarks"].values())
    # None of 2099, nor of the hour ahead while it lay ahead of what had come.
    assert max(row["bucket_unix_ns"] for row in buckets) < NOW + (HOURS_S + 3600 + 700) * SECOND


def bounds(*pairs: tuple[float, float]) -> list[tuple[int, int, int]]:
    """Of calls that came one each second."""
    return [(n * 10**9, round(low * 1e9), round(high * 1e9)) for n, (low, high) in enumerate(pairs)]


def test_the_closest_bounds_are_believed() -> None:
    skew = skew_of(("a", "b"), bounds((2.0, 9.0), (4.9, 5.1), (4.0, 7.0), (3.0, 5.2)), 4)
    assert skew.ahead_s == pytest.approx(5.0)
    assert skew.within_s == pytest.approx(0.1, abs=0.001)
    assert skew.is_certain


def test_old_bounds_give_way_to_wider_ones_of_now() -> None:
    day = 86_400.0
    skew = skew_of(("a", "b"), [(0, 10**9, 10**9), (round(day * 1e9), 3 * 10**9, 4 * 10**9)], 2)
    assert (skew.ahead_s, skew.within_s) == (3.5, 0.5)


def test_what_is_fetched_from_a_queue_says_nothing_certain_of_clocks() -> None:
    """Served any time after the caller's span had ended, and faster than that."""
    assert not skew_of(("a", "b"), bounds(*((n * 7.0, n * 7.0 + 0.5) for n in range(1, 9))), 8).is_certain
    assert not skew_of(("a", "b"), bounds((-0.1, 0.1), (-0.2, 0.3), (-0.4, 0.1), (-0.1, 0.2)), 4).is_certain
    assert not skew_of(("a", "b"), bounds((4.9, 5.1)), 1).is_certain


def test_few_calls_and_pairs_are_kept() -> None:
    skews = Skews()
    for number in range(400):
        rows = [("a", f"b{number}", at, 10**9, 3 * 10**9) for at in range(CALLS + 1)]
        skews.see(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    kept = list(skews)
    assert len(kept) == 256
    assert {(one.calls, one.ahead_s, one.is_certain) for one in kept} == {(CALLS + 1, 2.0, True)}
    assert len(skews.told()) == 32


def measured(b: Bench) -> list[dict[str, Any]]:
    found = b.writer.health()["clock_skews"]
    assert isinstance(found, list)
    return found


def test_a_call_that_is_looked_at_again_is_no_further_call(tmp_path: Path) -> None:
    """One whose trace goes on: the same word four times is one word."""
    (outer, inner, began), *_ = calls("ahead-5s")
    inner.start_time_unix_nano, inner.end_time_unix_nano = (
        at + 5 * SECOND for at in (inner.start_time_unix_nano, inner.end_time_unix_nano)
    )
    with bench(tmp_path) as b:
        take(b, "client", "load", [outer])
        take(b, "server", "engine-0", [inner])
        b.run(2)
        for number in range(4):
            late = span_message(
                {}, trace_id=outer.trace_id, span_id=bytes([number] * 8), parent_span_id=outer.span_id, name="tool"
            )
            late.start_time_unix_nano = late.end_time_unix_nano = began
            take(b, "client", "load", [late])
            b.run(2)
        (told,) = measured(b)
        assert (told["calls"], told["certain"]) == (1, False)


def test_what_was_measured_is_known_after_a_restart(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for outer, inner, _ in calls("behind-17ms"):
            take(b, "client", "load", [outer])
            take(b, "behind-17ms", "engine-0", [inner])
        b.clock.forward(HOURS_S)
        b.run(10)
        known = measured(b)
        assert [one["calls"] for one in known] == [EACH]
    with bench(tmp_path) as b:
        assert measured(b) == known


def test_a_day_later_it_is_known_no_more() -> None:
    skews = Skews()
    for host, at in (("b", 0), ("c", SECOND)):
        skews.see(pl.DataFrame([("a", host, at, 1, 3)], schema=SCHEMA, orient="row"))
    text = skews.to_store(0)
    assert text is not None
    assert skews.to_store(3600 * SECOND) is None, "nothing is new"
    assert [one.other_host for one in Skews.recalled(text, OLD_NS)] == ["c"]
    assert list(Skews.recalled(text, OLD_NS - 1)) == list(skews)


def test_what_is_new_is_stored_once_in_a_while_also_after_the_clock_was_set_back() -> None:
    skews = Skews()

    def stored_at(unix_ns: int) -> bool:
        skews.see(pl.DataFrame([("a", "b", unix_ns, 1, 3)], schema=SCHEMA, orient="row"))
        return skews.to_store(unix_ns) is not None

    day = 86_400 * SECOND
    moments = (day, day + STORED_EVERY_NS - 1, day + STORED_EVERY_NS, 0, 1)
    assert [stored_at(moment) for moment in moments] == [True, False, True, True, False]
