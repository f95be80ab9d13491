"""Status, primary and cause by the rules of the contract, on rows whose causes are given."""

from __future__ import annotations

import polars as pl
import pytest
from analyzer_contexts import judged
from builders import attributed, make_request, request_table

from phasewise.analyzer.evidence import ENGINE, SPAN, Evidence
from phasewise.analyzer.findings import shape_matched, weighed
from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.window import parse_slo

QUIET = InFlight()


def rows(*groups: tuple[int, dict[str, float]], **fields: object) -> pl.DataFrame:
    """Groups of (count, seconds by cause); each request lasts as long as its causes."""
    made = []
    for count, causes in groups:
        total = sum(causes.values())
        for _ in range(count):
            request = make_request(queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=total - 0.1, **fields)
            made.append(attributed(request, causes))
    frame = pl.from_arrow(request_table(made))
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_a_quarter_of_contention_in_the_slowest_tenth_is_slow() -> None:
    calm = (90, {"decode.weights": 1.0})
    found = judged(rows(calm, (10, {"queue.slots": 2.6, "decode.weights": 7.4})), (), QUIET)
    assert (found.status, found.primary, found.cause) == ("slow", "queueing", "queue.slots")
    found = judged(rows(calm, (10, {"queue.slots": 2.4, "decode.weights": 7.6})), (), QUIET)
    assert (found.status, found.primary, found.cause) == ("healthy", "bandwidth", "decode.weights")


def test_healthy_names_what_bounds_all_requests() -> None:
    found = judged(rows((50, {"prefill.compute": 3.0, "decode.weights": 1.0})), (), QUIET)
    assert (found.status, found.primary) == ("healthy", "compute")


def test_a_broken_objective_without_contention_names_the_objective_s_phases() -> None:
    frame = rows((20, {"prefill.compute": 0.5, "decode.weights": 9.0}))
    found = judged(frame, parse_slo("ttft:50ms"), QUIET)
    assert found.status == "slow"
    assert (found.primary, found.cause) == ("compute", "prefill.compute")
    assert found.over_limit == 20
    assert judged(frame, parse_slo("ttft:5s"), QUIET).status == "healthy"


def test_a_broken_itl_with_interference_is_interference() -> None:
    found = judged(
        rows((20, {"interference": 4.0, "decode.weights": 4.0, "queue.slots": 9.0})), parse_slo("tpot:10ms"), QUIET
    )
    assert (found.status, found.primary, found.cause) == ("slow", "compute", "interference")


def test_one_request_in_two_hundred_over_the_limit_breaks_nothing() -> None:
    frame = pl.concat([rows((199, {"decode.weights": 1.0})), rows((1, {"decode.weights": 30.0}))])
    assert judged(frame, parse_slo("e2e:10s"), QUIET).status == "healthy"


def test_a_lead_under_a_tenth_decides_nothing() -> None:
    found = judged(rows((20, {"queue.slots": 2.0, "kv.wait": 1.9, "decode.weights": 1.0})), (), QUIET)
    assert (found.status, found.primary, found.cause) == ("slow", "inconclusive", None)


def test_under_forty_percent_with_phases_is_unknown() -> None:
    blind = rows((7, {"unexplained": 1.0}))
    blind = blind.with_columns(pl.lit(None, pl.Float64).alias(c) for c in ("queue_s", "prefill_s", "decode_s"))
    seeing = rows((3, {"queue.slots": 3.0}))
    assert judged(pl.concat([blind, seeing]), (), QUIET).status == "unknown"
    assert judged(seeing.clear(), (), QUIET).status == "unknown"


def test_decode_alone_is_no_phase_data() -> None:
    """A client's span knows when tokens came; what the first one waited for it cannot know."""
    frame = rows((20, {"unexplained": 20.0, "decode.weights": 2.0}))
    frame = frame.with_columns(pl.lit(None, pl.Float64).alias(c) for c in ("queue_s", "prefill_s"))
    assert judged(frame, (), QUIET).status == "unknown"


def test_requests_in_flight_that_wait_are_slow_before_any_span_comes() -> None:
    flight = InFlight(open=64, waiting_s={"queue.slots": 90.0}, total_s=96.0, samples=10)
    found = judged(rows(), (), flight)
    assert (found.status, found.primary, found.cause, found.live) == ("slow", "queueing", "queue.slots", True)
    found = judged(rows((20, {"decode.weights": 1.0})), (), flight)
    assert (found.status, found.live) == ("slow", True)


def test_two_signals_against_or_none_for_withhold_the_class() -> None:
    found = judged(rows((20, {"queue.slots": 3.0, "decode.weights": 1.0})), (), QUIET)
    for_it = Evidence("waiting", 5.0, "0", "requests", ENGINE, supports=("queueing",))
    against = Evidence("queue", 0.0, "0", "ratio", SPAN, opposes=("queueing",))
    assert weighed(found, [for_it]).primary == "queueing"
    assert weighed(found, [for_it, against]).primary == "queueing"
    assert weighed(found, [for_it, against, against]).primary == "inconclusive"
    assert weighed(found, [against]).primary == "inconclusive"


def test_kv_needs_two_signals() -> None:
    found = judged(rows((20, {"kv.wait": 3.0, "decode.weights": 1.0})), (), QUIET)
    one = Evidence("usage", 0.99, "0.8", "ratio", ENGINE, supports=("kv",))
    assert weighed(found, [one]).primary == "inconclusive"
    assert weighed(found, [one, one]).primary == "kv"


def test_a_baseline_is_matched_by_shape() -> None:
    affected = rows((3, {"decode.weights": 4.0}), input_tokens=6000)
    before = pl.concat(
        [rows((10, {"decode.weights": 2.0}), input_tokens=6100), rows((90, {"decode.weights": 0.5}), input_tokens=100)]
    )
    value, matched = shape_matched(affected, before, "e2e_s")
    assert matched
    assert value == pytest.approx(2.0)
    value, matched = shape_matched(affected, before.filter(pl.col("input_tokens") < 200), "e2e_s")
    assert not matched
