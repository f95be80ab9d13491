"""OTLP points to samples in the store: a page that came in parts is one sample, with the start of its process."""

from __future__ import annotations

import json
from pathlib import Path

from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from otlp_messages import metrics_request
from writing import NOW, Bench, bench

from phasewise.collector.metric_scan import scan_metrics

CUMULATIVE = AGGREGATION_TEMPORALITY_CUMULATIVE


def gauge(name: str, value: float) -> Metric:
    return Metric(name=name, gauge=Gauge(data_points=[NumberDataPoint(as_double=value, time_unix_nano=NOW)]))


def counter(name: str, value: float) -> Metric:
    points = [NumberDataPoint(as_double=value, time_unix_nano=NOW)]
    return Metric(name=name, sum=Sum(data_points=points, aggregation_temporality=CUMULATIVE, is_monotonic=True))


def histogram(name: str, *counts: int) -> Metric:
    point = HistogramDataPoint(
        time_unix_nano=NOW, count=sum(counts), sum=2.5, bucket_counts=counts, explicit_bounds=[1.0]
    )
    return Metric(name=name, histogram=Histogram(data_points=[point], aggregation_temporality=CUMULATIVE))


STARTED = gauge("process_start_time_seconds", NOW / 1e9 - 60)
FIRST = (gauge("vllm:num_requests_running", 3), counter("vllm:prefix_cache_queries_total", 0), STARTED)
SECOND_PART = (counter("vllm:prompt_tokens_total", 100), histogram("vllm:time_to_first_token_seconds", 1, 2))
THIRD = (counter("vllm:num_preemptions_total", 2), histogram("vllm:e2e_request_latency_seconds", 0, 3))


def receive(opened: Bench, *metrics: Metric) -> None:
    request = metrics_request(*metrics, resource={"service.instance.id": "vllm-0:8000"})
    opened.journal.append("metrics", scan_metrics(request.SerializeToString(), opened.clock.now).rows)
    opened.journal.sync()
    opened.run(1.0)


def test_a_page_in_parts_is_one_sample(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        receive(b, *FIRST)
        receive(b, *SECOND_PART)
        receive(b, *FIRST)  # sent again, since its answer was lost
        receive(b, *THIRD)
        (row,) = b.rows("SELECT * FROM engine_samples")
        assert b.counter("samples") == 1
    assert (row["running"], row["prompt_tokens"], row["preemptions"]) == (3.0, 100.0, 2.0)
    assert (row["ttft_count"], row["ttft_sum_s"], row["e2e_count"]) == (3.0, 2.5, 3.0)
    assert row["process_start_unix_s"] == NOW / 1e9 - 60
    assert (
        row["prefix_queries_tokens"] is None
    )  # never moved while prompts came: not enabled, which the first part could not know
    assert json.loads(row["histograms"]) == {
        "ttft": {"le": [1.0, "+Inf"], "count": [1.0, 3.0]},
        "e2e": {"le": [1.0, "+Inf"], "count": [0.0, 3.0]},
    }


def test_a_sample_that_is_whole_stays_as_it_was_first_told(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        receive(b, *FIRST, *SECOND_PART)
        receive(b, gauge("vllm:num_requests_running", 7), counter("vllm:prompt_tokens_total", 900))
        (row,) = b.rows("SELECT * FROM engine_samples")
        assert (row["running"], row["prompt_tokens"]) == (3.0, 100.0)
