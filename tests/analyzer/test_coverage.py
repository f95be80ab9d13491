"""Sampled spans against the counters of the whole traffic: how many are missing, which, and what may still be said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from analyzer_contexts import frame, make_context, sample_frame
from builders import START_UNIX_NS, attributed, make_instance, make_request, make_sample, record_table
from sampled_traffic import SECOND_NS, head, kept, population, scrapes, tail

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.coverage import Sampling, partly_seen, sampling_of
from phasewise.analyzer.ended import EndedRows
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.statistics import floats, percentile, weighted_quantile
from phasewise.analyzer.window import Window, parse_slo
from phasewise.collector.records import EngineSample, Instance, Request
from phasewise.collector.schemas import polars_schema
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
ALL = population()
END_NS = START_UNIX_NS + 660 * SECOND_NS
WINDOW = Window(START_UNIX_NS, END_NS)


def sampled(rows: Sequence[Request], samples: Sequence[EngineSample], has_spans: bool = True) -> Sampling:
    engine = Replica("gpu-0", "vllm_v1", sample_frame(samples), {}, has_spans)
    return sampling_of(EndedRows(frame(rows)), [engine], WINDOW, END_NS + 60 * SECOND_NS)


def test_whole_spans_are_whole() -> None:
    found = sampled(ALL, scrapes(ALL))
    assert (found.kind, found.is_partial) == ("whole", False)
    assert found.ratio is not None and found.ratio > 0.99


@pytest.mark.parametrize("seed", range(6))
def test_a_tenth_at_the_head_is_an_even_sample(seed: int) -> None:
    found = sampled(kept(ALL, head(0.1), seed), scrapes(ALL))
    assert found.kind == "head"
    assert found.ratio == pytest.approx(0.1, abs=0.02)
    assert found.is_fair


def test_only_the_slowest_is_a_sample_that_speaks_for_nobody_else() -> None:
    found = sampled(kept(ALL, tail(ALL, 0.05, 0.0)), scrapes(ALL))
    assert found.kind == "tail"
    assert found.ratio == pytest.approx(0.05, abs=0.005)
    assert found.unseen_ratio > 0.9
    assert not found.is_fair


def test_the_slowest_and_a_tenth_of_the_rest_are_weighted_back() -> None:
    spans = kept(ALL, tail(ALL, 0.05, 0.1))
    found = sampled(spans, scrapes(ALL))
    assert (found.kind, found.is_fair) == ("tail", True)
    rows, truth = frame(spans), frame(ALL)
    weights = found.weights(rows)
    assert weights.sum() == pytest.approx(len(ALL), rel=0.03)
    plain = percentile(floats(rows, "e2e_s"), 0.5).value
    true = percentile(floats(truth, "e2e_s"), 0.5).value
    weighted = weighted_quantile(floats(rows, "e2e_s"), weights, 0.5)
    assert plain is not None and true is not None and weighted is not None
    assert plain > 1.15 * true
    assert weighted == pytest.approx(true, rel=0.08)


def test_spans_lost_for_some_minutes_are_gaps() -> None:
    def lost(row: Request, _chance: object) -> bool:
        return not 200 <= (row.finished_unix_ns - START_UNIX_NS) / 1e9 <= 320

    found = sampled(kept(ALL, lost), scrapes(ALL))
    assert (found.kind, found.by) == ("gaps", "time")
    assert found.ratio == pytest.approx(0.8, abs=0.04)


def test_a_restart_of_the_counters_loses_no_request() -> None:
    found = sampled(kept(ALL, head(0.1)), scrapes(ALL, restart_s=302.0))
    assert found.kind == "head"
    assert found.counted == pytest.approx(len(ALL), rel=0.02)


def as_exponential(sample: EngineSample) -> EngineSample:
    """Edges only around what was counted by then, as exponential histograms have them."""
    shape = json.loads(sample.histograms or "{}")["e2e"]
    total = shape["count"][-1]
    told = list(zip(shape["le"], shape["count"], strict=True))
    first = max((i for i, (_, count) in enumerate(told) if count == 0), default=0)
    last = next(i for i, (_, count) in enumerate(told) if count == total)
    near = [*told[first : last + 1], *([("+Inf", total)] if told[last][0] != "+Inf" else [])]
    made = {"e2e": {"le": [0.0, *(edge for edge, _ in near)], "count": [0, *(count for _, count in near)]}}
    return dataclasses.replace(sample, histograms=json.dumps(made))


def test_a_histogram_whose_edges_come_with_its_counts_tells_the_same() -> None:
    spans = kept(ALL, tail(ALL, 0.05, 0.1))
    growing = [as_exponential(sample) for sample in scrapes(ALL)]
    assert len({len(json.loads(sample.histograms or "")["e2e"]["le"]) for sample in growing}) > 3
    found, fixed = sampled(spans, growing), sampled(spans, scrapes(ALL))
    assert (found.kind, found.by, found.is_fair) == (fixed.kind, fixed.by, True)
    assert found.weights(frame(spans)) == pytest.approx(fixed.weights(frame(spans)))


@pytest.mark.parametrize(
    ("rows", "samples"),
    [
        (ALL[:100], []),
        (ALL[:100], scrapes(ALL[:100])[:1]),
        (ALL[:15], scrapes(ALL[:19])),
        ([], scrapes(ALL)),
        (ALL, scrapes(ALL[:1000])),
        (ALL[:100], [make_sample(at_s=5.0 * k) for k in range(100)]),
    ],
    ids=["no scrape", "one scrape", "few", "no spans", "counters of a part", "no counter"],
)
def test_what_cannot_be_told_is_unknown(rows: list[Request], samples: list[EngineSample]) -> None:
    found = sampled(rows, samples)
    assert (found.kind, found.ratio, found.json()) == ("unknown", None, None)
    assert list(found.weights(frame(rows))) == [1.0] * len(rows)


def test_spans_that_are_still_on_their_way_are_not_missed() -> None:
    late = [row for row in ALL if row.finished_unix_ns < START_UNIX_NS + 395 * SECOND_NS]
    engine = Replica("gpu-0", "vllm_v1", sample_frame(scrapes(ALL, until_s=400)), {}, True)
    found = sampling_of(EndedRows(frame(late)), [engine], WINDOW, START_UNIX_NS + 400 * SECOND_NS)
    assert found.kind == "whole"


def test_a_deployment_is_counted_where_its_replicas_cannot_be_told_apart() -> None:
    halves = ALL[::2], ALL[1::2]
    scraped = [
        Replica(f"gpu-{k}:8000", "vllm_v1", sample_frame(scrapes(half, instance=f"gpu-{k}:8000")), {}, False)
        for k, half in enumerate(halves)
    ]
    spans = Replica("engine", "vllm_v1", sample_frame([]), {}, True)
    rows = [dataclasses.replace(row, instance="engine") for row in kept(ALL, head(0.1))]
    found = sampling_of(EndedRows(frame(rows)), [spans, *scraped], WINDOW, END_NS + 60 * SECOND_NS)
    assert (found.kind, found.joined) == ("head", False)
    assert found.ratio == pytest.approx(0.1, abs=0.02)


def test_quantiles_with_equal_weights_are_those_without() -> None:
    values = np.random.default_rng(3).lognormal(0, 1, 4001)
    for p in (0.5, 0.95, 0.99):
        plain = percentile(values, p).value
        assert plain is not None
        assert weighted_quantile(values, np.full(4001, 7.0), p) == pytest.approx(plain, rel=0.01)
    assert weighted_quantile([], [], 0.5) is None


# --- attribution -----------------------------------------------------------------------------------------------------


def test_overlap_of_a_sample_is_no_concurrency() -> None:
    spans = kept(ALL, head(0.1))
    samples = scrapes(ALL, running=40.0, waiting=2.0)
    assert partly_seen(frame(spans), sample_frame(samples))
    assert not partly_seen(frame(ALL), sample_frame(samples))
    assert not partly_seen(frame(spans), sample_frame([]))
    told = attribute_instance(make_context(spans, samples), RULES)
    assert set(told["concurrency_at_arrival"].to_list()) == {42}
    assert told["decode_batch_mean"].drop_nulls().median() == pytest.approx(40.0, abs=1.0)
    whole = attribute_instance(make_context(ALL, samples), RULES)
    assert whole["concurrency_at_arrival"].max() not in (None, 42)


def test_a_sample_without_gauges_knows_no_concurrency() -> None:
    samples = scrapes(ALL, running=None, waiting=None)
    told = attribute_instance(make_context(kept(ALL, head(0.1)), samples), RULES)
    assert told["concurrency_at_arrival"].null_count() == len(told)
    assert told["decode_batch_mean"].null_count() == len(told)


# --- verdict ---------------------------------------------------------------------------------------------------------


def verdict(store: Store, spans: Sequence[Request], samples: Sequence[EngineSample], slo: str = "") -> dict[str, Any]:
    instance = make_instance(engine="vllm_v1", first_seen_unix_ns=START_UNIX_NS - 1, last_seen_unix_ns=END_NS)
    with store.write() as transaction:
        transaction.insert("requests", pl.DataFrame([attributed(one) for one in spans], schema=polars_schema(Request)))
        transaction.insert("engine_samples", record_table(EngineSample, samples))
        transaction.insert("instances", record_table(Instance, [instance]))
    return window_verdict(store, RULES, WINDOW, slo=parse_slo(slo), now_unix_ns=END_NS + 60 * SECOND_NS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "p.duckdb", threads=1) as opened:
        yield opened


def test_the_verdict_of_a_tenth_says_so(store: Store) -> None:
    told = verdict(store, kept(ALL, head(0.1)), scrapes(ALL))
    assert told["provenance"]["coverage"] == pytest.approx(0.1, abs=0.02)
    assert told["provenance"]["sampling"]["kind"] == "head"
    assert any("sampled" in note for note in told["notes"])
    assert "all_spans" in [one["signal"] for one in told["missing"]]
    assert told["signals"]["arrival_rate_per_s"] == pytest.approx(len(ALL) / 600, rel=0.15)
    assert ("finished requests with spans", "medium") in [
        (one["check"], one["level"]) for one in told["confidence"]["checks"]
    ]


@pytest.mark.parametrize(("slower", "broken"), [(11, False), (39, True)], ids=["0.6 % of all", "2 % of all"])
def test_an_objective_is_broken_by_a_share_of_all_requests(store: Store, slower: int, broken: bool) -> None:
    """Of the spans that tail sampling keeps, over a tenth break it either way."""
    limit = sorted(row.e2e_s or 0.0 for row in ALL)[-slower - 1] + 0.001
    told = verdict(store, kept(ALL, tail(ALL, 0.05, 0.0)), scrapes(ALL), f"e2e:{limit:.3f}s")
    assert told["provenance"]["sampling"]["kind"] == "tail"
    assert told["affected"]["over_limit"] == slower
    assert (told["affected"]["count"] == slower) is broken, "else the slowest tenth is looked at"
    assert any("not those of all requests" in note for note in told["notes"])


def test_weighted_shares_are_near_those_of_all(tmp_path: Path) -> None:
    with Store(tmp_path / "a.duckdb", threads=1) as one, Store(tmp_path / "b.duckdb", threads=1) as other:
        truth = verdict(one, ALL, scrapes(ALL))
        told = verdict(other, kept(ALL, tail(ALL, 0.05, 0.1)), scrapes(ALL))
    assert told["provenance"]["sampling"]["weighted_by"] == "latency"
    for cause, share in truth["shares"].items():
        assert told["shares"].get(cause, 0.0) == pytest.approx(share, abs=0.05)
    median = told["statistics"]["engine"]["e2e"]
    assert median["weighted"] is True
    assert median["p50_s"] == pytest.approx(truth["statistics"]["engine"]["e2e"]["p50_s"], rel=0.1)


def test_calls_given_up_are_estimated_from_the_web_servers_counter(store: Store) -> None:
    told = verdict(store, ALL, scrapes(ALL, answered=len(ALL) + 100))
    assert told["aborted"] == pytest.approx(100, abs=2)
    assert told["provenance"]["aborted"]["estimated"] == told["aborted"]
    assert any("an estimate" in note for note in told["notes"])


def test_no_call_is_given_up_where_answers_and_requests_agree(store: Store) -> None:
    told = verdict(store, ALL, scrapes(ALL, answered=len(ALL)))
    assert (told["aborted"], told["provenance"]["aborted"]) == (0, None)


def test_requests_of_nobody_are_no_sample() -> None:
    assert sampling_of(EndedRows(frame([make_request()])), [], WINDOW, END_NS).kind == "unknown"
