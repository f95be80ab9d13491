"""Strategies are chosen by their tails against the objective; what is faster on average and worse in the tail is named."""

from __future__ import annotations

import json

import pytest
from summary_documents import make_summary

from phasewise.analyzer.experiments import compare_summaries, parse_limits
from phasewise.rules.errors import InputError


def strategy(
    name: str, tok_per_s: float | None, ttft_p50_ms: float, ttft_p99_ms: float | None, **more: float
) -> dict[str, object]:
    observed = {
        "output_throughput_tok_per_s": tok_per_s,
        "ttft_p50_ms": ttft_p50_ms,
        "ttft_p99_ms": ttft_p99_ms,
        **more,
    }
    return make_summary(name, observed=observed)


TABLE = [
    strategy("static small batch", 40, 520, 1800),
    strategy("aggressive continuous batching", 78, 470, 3200, tpot_p95_ms=58),
    strategy("separate pools with chunked prefill", 70, 430, 1600),
]


@pytest.mark.parametrize(
    ("slo", "chosen"),
    [
        ("ttft_p99:2s", "separate pools with chunked prefill"),
        ("ttft_p99:1.7s", "separate pools with chunked prefill"),
        ("ttft_p99:1700ms", "separate pools with chunked prefill"),
        ("ttft_p99:1.5s", None),
        ("ttft_p99:4s", "aggressive continuous batching"),
        ("ttft_p99:4s,tpot_p95:60ms", "aggressive continuous batching"),
        ("ttft_p99:4s,tpot_p95:50ms", None),
    ],
)
def test_the_table_is_decided_by_the_limit(slo: str, chosen: str | None) -> None:
    assert compare_summaries(TABLE, slo)["chosen"] == chosen


def test_what_looks_faster_and_hides_its_tail_is_named() -> None:
    compared = compare_summaries(TABLE, "ttft_p99:2s")
    faster = compared["faster_on_average"]
    assert isinstance(faster, list)
    assert [one["id"] for one in faster] == ["aggressive continuous batching"]
    assert "faster on average" in str(compared["headline"]) and "worse in the tail" in str(compared["headline"])


def test_none_qualifies_and_the_closest_is_said() -> None:
    compared = compare_summaries(TABLE, "ttft_p99:1.5s")
    assert (compared["chosen"], compared["closest"]) == (None, "separate pools with chunked prefill")
    assert str(compared["headline"]).startswith("No strategy meets ttft_p99 1.5 s")


def test_the_chosen_one_still_shows_its_tail_and_its_throughput() -> None:
    compared = compare_summaries(TABLE, "ttft_p99:4s")
    assert "ttft_p99 3.2 s" in str(compared["headline"])
    rows = compared["strategies"]
    assert isinstance(rows, list)
    assert [(row["ttft"]["p99_s"], row["throughput"]["value"]) for row in rows] == [
        (1.8, 40.0),
        (3.2, 78.0),
        (1.6, 70.0),
    ]


def test_what_is_not_told_cannot_qualify_and_it_is_said() -> None:
    compared = compare_summaries([strategy("silent", 500, 10, None), strategy("told", 5, 10, 100)], "ttft_p99:2s")
    assert compared["chosen"] == "told"
    rows = compared["strategies"]
    assert isinstance(rows, list)
    assert rows[0]["qualifies"] is False and "cannot qualify" in rows[0]["checks"][0]["note"]
    alone = compare_summaries([strategy("silent", 500, 10, None)], "ttft_p99:2s")
    assert (alone["chosen"], alone["closest"]) == (None, None)


def test_a_percentile_of_too_few_requests_is_used_by_no_comparison() -> None:
    few, many = strategy("few", 90, 10, 100, samples_count=20), strategy("many", 50, 10, 100, samples_count=200)
    assert compare_summaries([few, many], "ttft_p99:2s")["chosen"] == "many"
    assert compare_summaries([few, many], "ttft_p50:2s")["chosen"] == "few"


def test_without_a_common_throughput_the_one_furthest_inside_wins() -> None:
    compared = compare_summaries([strategy("a", None, 10, 1500), strategy("b", 90, 10, 1900)], "ttft_p99:2s")
    assert compared["chosen"] == "a"


def test_a_rate_is_a_minimum() -> None:
    assert (
        compare_summaries(TABLE, "ttft_p99:2s,output_throughput_tok_per_s:60")["chosen"]
        == "separate pools with chunked prefill"
    )
    assert compare_summaries(TABLE, "ttft_p99:2s,output_throughput_tok_per_s:75")["chosen"] is None


def test_the_answer_is_plain_json() -> None:
    zero = compare_summaries([strategy("zero", 0, 0, 0)], "ttft_p99:0s")
    json.dumps(zero, allow_nan=False)
    json.dumps(compare_summaries(TABLE, "ttft_p99:0s"), allow_nan=False)


@pytest.mark.parametrize(
    ("slo", "hint"),
    [
        ("", "names no limit"),
        ("ttft_p99", "a limit is a time"),
        ("ttft_p99:soon", "a limit is a time"),
        ("ttft_p99:-2s", "a limit is a time"),
        ("tfft_p99:2s", "did you mean 'ttft_p99'"),
        ("output_throughput_tok_per_s:fast", "the limit of a rate is a number"),
    ],
)
def test_a_wrong_limit_is_explained(slo: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_limits(slo)
    assert hint in str(caught.value)


def test_wrong_strategies_are_refused() -> None:
    with pytest.raises(InputError, match="holds no strategy"):
        compare_summaries([], "ttft_p99:2s")
    with pytest.raises(InputError, match="names two strategies"):
        compare_summaries([TABLE[0], TABLE[0]], "ttft_p99:2s")
    with pytest.raises(InputError, match=r"strategy 2: observed\.p99"):
        compare_summaries([TABLE[0], make_summary("x", observed={"p99": 1})], "ttft_p99:2s")
