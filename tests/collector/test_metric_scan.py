"""OTLP metrics to rows: every kind of point, in both encodings."""

from __future__ import annotations

import json
import math

import pytest
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp
from otlp_messages import RECEIVED_UNIX_NS, START_UNIX_NS, captured_bodies, key_values, metrics_request, otlp_json
from shared_data import shared_path

from phasewise.collector.metric_scan import scan_metrics
from phasewise.collector.otlp_json import json_to_protobuf
from phasewise.collector.records import METRIC_SCHEMA, Scanned
from phasewise.collector.wire import Malformed

CUMULATIVE, DELTA = otlp.AGGREGATION_TEMPORALITY_CUMULATIVE, otlp.AGGREGATION_TEMPORALITY_DELTA


def scan(*metrics: otlp.Metric) -> Scanned:
    """Through both encodings, which must agree."""
    request = metrics_request(*metrics)
    scanned = scan_metrics(request.SerializeToString(), RECEIVED_UNIX_NS)
    twin = scan_metrics(json_to_protobuf(json.dumps(otlp_json(request)).encode(), "metrics"), RECEIVED_UNIX_NS)
    assert twin.rows.equals(scanned.rows)
    assert twin.rejected == scanned.rejected
    return scanned


def gauge(value: float = 1.0, **fields: object) -> otlp.Metric:
    point = otlp.NumberDataPoint(as_double=value, time_unix_nano=START_UNIX_NS)
    for name, content in fields.items():
        setattr(point, name, content)
    return otlp.Metric(name="vllm:num_requests_running", gauge=otlp.Gauge(data_points=[point]))


def test_every_column_of_a_gauge() -> None:
    point = otlp.NumberDataPoint(as_int=3, time_unix_nano=START_UNIX_NS, attributes=key_values({"model_name": "m"}))
    scanned = scan(otlp.Metric(name="running", unit="1", gauge=otlp.Gauge(data_points=[point])))
    assert scanned.rows.schema.equals(METRIC_SCHEMA)
    assert scanned.rows.to_pylist() == [
        {
            "name": "running",
            "kind": "gauge",
            "unix_ns": START_UNIX_NS,
            "value": 3.0,
            "count": None,
            "sum": None,
            "buckets": None,
            "unit": "1",
            "monotonic": None,
            "scope_name": "metrics",
            "resource": '{"service.name":"vllm-server"}',
            "attributes": '{"model_name":"m"}',
            "received_unix_ns": RECEIVED_UNIX_NS,
        }
    ]


def test_a_sum_says_whether_it_only_grows() -> None:
    points = [otlp.NumberDataPoint(as_double=2.5, time_unix_nano=START_UNIX_NS)]
    metric = otlp.Metric(
        name="s", sum=otlp.Sum(data_points=points, aggregation_temporality=CUMULATIVE, is_monotonic=True)
    )
    (row,) = scan(metric).rows.to_pylist()
    assert (row["kind"], row["value"], row["monotonic"]) == ("sum", 2.5, True)


def test_buckets_are_cumulative() -> None:
    point = otlp.HistogramDataPoint(
        time_unix_nano=START_UNIX_NS, count=6, sum=4.5, bucket_counts=[1, 2, 3], explicit_bounds=[0.5, 1.0]
    )
    metric = otlp.Metric(name="h", histogram=otlp.Histogram(data_points=[point], aggregation_temporality=CUMULATIVE))
    (row,) = scan(metric).rows.to_pylist()
    assert (row["kind"], row["count"], row["sum"]) == ("histogram", 6.0, 4.5)
    assert json.loads(row["buckets"]) == {"le": [0.5, 1.0, "+Inf"], "count": [1, 3, 6]}


def test_a_histogram_without_buckets_keeps_count_and_an_unknown_sum() -> None:
    point = otlp.HistogramDataPoint(time_unix_nano=START_UNIX_NS, count=6)
    metric = otlp.Metric(name="h", histogram=otlp.Histogram(data_points=[point], aggregation_temporality=CUMULATIVE))
    (row,) = scan(metric).rows.to_pylist()
    assert (row["count"], row["sum"], row["buckets"]) == (6.0, None, None)


def test_an_exponential_histogram_gets_its_own_bounds() -> None:
    Buckets = otlp.ExponentialHistogramDataPoint.Buckets
    point = otlp.ExponentialHistogramDataPoint(
        time_unix_nano=START_UNIX_NS,
        count=10,
        sum=1.0,
        scale=0,
        zero_count=1,
        positive=Buckets(offset=1, bucket_counts=[2, 3]),  # (2, 4], (4, 8]
        negative=Buckets(offset=0, bucket_counts=[4]),  # [-2, -1)
    )
    metric = otlp.Metric(
        name="e",
        exponential_histogram=otlp.ExponentialHistogram(data_points=[point], aggregation_temporality=CUMULATIVE),
    )
    (row,) = scan(metric).rows.to_pylist()
    assert json.loads(row["buckets"]) == {
        "le": [-2.0, -1.0, 0.0, 2.0, 4.0, 8.0, "+Inf"],
        "count": [0, 4, 5, 5, 7, 10, 10],
    }


def test_a_summary_keeps_its_quantiles() -> None:
    quantile = otlp.SummaryDataPoint.ValueAtQuantile(quantile=0.99, value=1.5)
    point = otlp.SummaryDataPoint(time_unix_nano=START_UNIX_NS, count=2, sum=3.0, quantile_values=[quantile])
    (row,) = scan(otlp.Metric(name="q", summary=otlp.Summary(data_points=[point]))).rows.to_pylist()
    assert (row["kind"], row["count"], row["sum"]) == ("summary", 2.0, 3.0)
    assert json.loads(row["buckets"]) == {"quantile": [0.99], "value": [1.5]}


@pytest.mark.parametrize("metric", [gauge(math.nan), gauge(math.inf), gauge(0.0, flags=1)])
def test_no_number_is_unknown_and_not_zero(metric: otlp.Metric) -> None:
    assert scan(metric).rows["value"].to_pylist() == [None]


def test_deltas_are_refused_with_the_setting_that_helps() -> None:
    points = [otlp.NumberDataPoint(as_int=1, time_unix_nano=START_UNIX_NS)]
    delta = otlp.Metric(name="d", sum=otlp.Sum(data_points=points, aggregation_temporality=DELTA))
    scanned = scan(delta, gauge())
    assert scanned.rows.num_rows == 1
    assert scanned.rejected == {"delta_temporality": 1}
    assert "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=cumulative" in scanned.first_error


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (otlp.Metric(name="x"), "no_data"),
        (gauge(time_unix_nano=0), "time_missing"),
        (gauge(time_unix_nano=2**63), "time_range"),
        (
            otlp.Metric(
                name="h",
                histogram=otlp.Histogram(
                    data_points=[otlp.HistogramDataPoint(time_unix_nano=START_UNIX_NS, bucket_counts=[1] * 1000)]
                ),
            ),
            "too_many_buckets",
        ),
    ],
)
def test_a_bad_point_is_refused_and_its_neighbours_stay(metric: otlp.Metric, reason: str) -> None:
    scanned = scan(metric, gauge())
    assert scanned.rows.num_rows == 1
    assert scanned.rejected == {reason: 1}


def test_many_points_keep_their_order() -> None:
    points = [otlp.NumberDataPoint(as_int=i, time_unix_nano=START_UNIX_NS) for i in range(10_000)]
    request = metrics_request(otlp.Metric(name="many", gauge=otlp.Gauge(data_points=points)))
    rows = scan_metrics(request.SerializeToString(), RECEIVED_UNIX_NS).rows
    assert rows["value"].to_pylist() == [float(i) for i in range(10_000)]


def test_invalid_utf8_is_repaired() -> None:
    body = metrics_request(otlp.Metric(name="BAD!", gauge=gauge().gauge)).SerializeToString()
    scanned = scan_metrics(body.replace(b"BAD!", b"\xc3\x28\xff\xfe"), RECEIVED_UNIX_NS)
    assert scanned.rows["name"].to_pylist() == ["\ufffd(\ufffd\ufffd"]
    assert scanned.warned == {"sanitised": 1}


@pytest.mark.parametrize("body", [b"\xff" * 20, metrics_request(gauge()).SerializeToString()[:-3]])
def test_garbage_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        scan_metrics(body, RECEIVED_UNIX_NS)


def test_metrics_of_a_real_client_are_read() -> None:
    bodies = list(captured_bodies(shared_path("captures", "vllm-client-openai-v2", "otlp-metrics.ld.gz")))
    scanned = [scan_metrics(body, RECEIVED_UNIX_NS) for body in bodies]
    assert all(not one.rejected for one in scanned)
    names = {name for one in scanned for name in one.rows["name"].to_pylist()}
    assert "gen_ai.client.operation.duration" in names
