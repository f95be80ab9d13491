"""OTLP metrics through the real sockets into the store: the numbers of `engine_samples` are those of the source, however they were sent."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import polars as pl
import pytest
from captures import scrapes
from forwarded_metrics import forwarded_page, told_by_page
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE as CUMULATIVE,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_DELTA as DELTA,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from otlp_messages import captured_bodies, key_values, metrics_request, otlp_json
from receive_process import Receiving, receiving
from shared_data import shared_path
from writing import NOW, SECOND, Bench, bench, rulebook

from phasewise.collector.exposition import read_exposition
from phasewise.collector.identity import identities
from phasewise.collector.profiles import Profiles

pytestmark = [pytest.mark.live, pytest.mark.slow]
WAYS = ("protobuf", "protobuf-gzip", "json", "json-gzip", "grpc", "grpc-gzip")
PROFILES = Profiles(rulebook().engines)
Told = dict[str, tuple[str, dict[str, str]]]
# Columns of a sample and what adds up to them on the page: name of the series, and labels that it must not have.
NOT_ABORTED = {"finished_reason": "abort"}
VLLM: Told = {
    "running": ("vllm:num_requests_running", {}),
    "waiting": ("vllm:num_requests_waiting", {}),
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", {}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "output_tokens": ("vllm:generation_tokens_total", {}),
    "finished": ("vllm:request_success_total", NOT_ABORTED),
    "steps": ("vllm:iteration_tokens_total_count", {}),
    "step_tokens": ("vllm:iteration_tokens_total_sum", {}),
    "ttft_count": ("vllm:time_to_first_token_seconds_count", {}),
    "ttft_sum_s": ("vllm:time_to_first_token_seconds_sum", {}),
    "itl_count": ("vllm:inter_token_latency_seconds_count", {}),
    "e2e_sum_s": ("vllm:e2e_request_latency_seconds_sum", {}),
    "queue_sum_s": ("vllm:request_queue_time_seconds_sum", {}),
    "process_start_unix_s": ("process_start_time_seconds", {}),
}
SGLANG: Told = {
    "running": ("sglang:num_running_reqs", {}),
    "waiting": ("sglang:num_queue_reqs", {}),
    "kv_usage_ratio": ("sglang:token_usage", {}),
    "prompt_tokens": ("sglang:prompt_tokens_total", {}),
    "output_tokens": ("sglang:generation_tokens_total", {}),
    "ttft_count": ("sglang:time_to_first_token_seconds_count", {}),
    "e2e_sum_s": ("sglang:e2e_request_latency_seconds_sum", {}),
    "queue_count": ("sglang:queue_time_seconds_count", {}),
}


def send(
    process: Receiving, request: ExportMetricsServiceRequest, way: str, *, whole: bool = True
) -> ExportMetricsServiceResponse:
    """What the answer says. Every way must be answered with success; whole: and with nothing left out."""
    body = request.SerializeToString()
    if way.startswith("grpc"):
        how = grpc.Compression.Gzip if way.endswith("gzip") else grpc.Compression.NoCompression
        told = ExportMetricsServiceResponse.FromString(process.export(body, "Metrics", compression=how))
    else:
        media = "application/json" if way.startswith("json") else "application/x-protobuf"
        data = json.dumps(otlp_json(request)).encode() if way.startswith("json") else body
        zipped = {"content_encoding": "gzip"} if way.endswith("gzip") else {}
        answer = process.post(gzip.compress(data) if zipped else data, "/v1/metrics", media, **zipped)
        assert (answer.status, answer.headers["content-type"]) == (200, media), answer.body
        told = (
            json_format.Parse(answer.body, ExportMetricsServiceResponse())
            if way.startswith("json")
            else ExportMetricsServiceResponse.FromString(answer.body)
        )
    assert not whole or not told.HasField("partial_success"), told
    return told


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """One receiver for the module: each test sends under instance names of its own."""
    with receiving(tmp_path_factory.mktemp("metrics")) as process:
        yield process


@contextmanager
def reading(process: Receiving, folder: Path) -> Iterator[Bench]:
    """A store that has read all that the receiver acknowledged by now."""
    (folder / "journal").mkdir(mode=0o700)
    for segment in process.data.joinpath("journal").glob("*.seg"):
        (folder / "journal" / segment.name).write_bytes(segment.read_bytes())
    with bench(folder) as opened:
        opened.run()
        yield opened


def samples_of(opened: Bench, instance: str) -> list[dict[str, Any]]:
    rows = opened.rows("SELECT * FROM engine_samples ORDER BY unix_ns, instance")
    return [row for row in rows if row["instance"] == instance]


@pytest.mark.parametrize(
    ("name", "columns"), [("vllm-kv-starvation", VLLM), ("sglang-overload", SGLANG)], ids=["vllm", "sglang"]
)
def test_a_forwarded_page_gives_the_numbers_of_the_page(
    sender: Receiving, tmp_path: Path, name: str, columns: Told
) -> None:
    pages = list(scrapes(shared_path("captures", name)))
    chosen = [pages[0], pages[len(pages) // 2], pages[-1]]
    start_unix_ns = chosen[0][0] - 60 * SECOND
    for unix_ns, text in chosen:
        page = forwarded_page(text, unix_ns, start_unix_ns, "")
        for way in WAYS:
            page.resource_metrics[0].resource.attributes[1].value.string_value = f"{name}-{way}:8000"
            send(sender, page, way)
    told = [told_by_page(text) for _, text in chosen]
    with reading(sender, tmp_path) as opened:
        rows = {way: samples_of(opened, f"{name}-{way}:8000") for way in WAYS}
        assert opened.counter("metric_points") > opened.counter("unmapped_metric_points") > 0  # those of its Python
    for way in WAYS:
        assert [row["unix_ns"] for row in rows[way]] == [unix_ns for unix_ns, _ in chosen]
        for row, (unix_ns, text), page_says in zip(rows[way], chosen, told, strict=True):
            for column, (series, left_out) in columns.items():
                values = [value for labels, value in page_says[series] if not left_out.items() & labels.items()]
                assert row[column] == pytest.approx(sum(values), rel=1e-12), (way, column)
            scraped = read_exposition(text, unix_ns, PROFILES, instance=row["instance"])
            assert scraped is not None
            same = scraped.samples.drop("source", "joined", "histograms").row(0, named=True)
            assert {column: row[column] for column in same} == same
            assert row["source"] == "otlp"
            assert row["histograms"] == scraped.samples["histograms"].item()
    assert rows["grpc"][-1]["finished"] > rows["grpc"][0]["finished"]  # the pages differ, so equal rows say something


@pytest.mark.parametrize("most", [1, 40], ids=["metric by metric", "forty at once"])
def test_a_page_that_its_sender_cut_is_one_sample(sender: Receiving, tmp_path: Path, most: int) -> None:
    """In any order, and parts of it twice: as a Collector with send_batch_max_size sends it."""
    unix_ns, text = list(scrapes(shared_path("captures", "vllm-kv-starvation")))[-1]
    name = f"cut-{most}:8000"
    page = forwarded_page(text, unix_ns, unix_ns - 60 * SECOND, name)
    metrics = [
        metric for metric in page.resource_metrics[0].scope_metrics[0].metrics if metric.name != "http_requests_total"
    ]
    parts = [metrics[at : at + most] for at in range(0, len(metrics), most)]
    for part in (*reversed(parts), *parts[:3]):
        cut = ExportMetricsServiceRequest()
        cut.CopyFrom(page)
        del cut.resource_metrics[0].scope_metrics[0].metrics[:]
        cut.resource_metrics[0].scope_metrics[0].metrics.extend(part)
        send(sender, cut, "protobuf")
    with reading(sender, tmp_path) as opened:
        (row,) = samples_of(opened, name)
        (instance,) = [one for one in opened.rows("SELECT * FROM instances") if one["instance"] == name]
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("http_requests_total"))
    whole = read_exposition(kept, unix_ns, PROFILES, instance=name)
    assert whole is not None
    expected = whole.samples.drop("source", "joined", "histograms", "process_start_unix_s").row(0, named=True)
    assert {column: row[column] for column in expected} == expected
    assert json.loads(row["histograms"]) == json.loads(whole.samples["histograms"].item())
    assert {key: one["value"] for key, one in json.loads(instance["settings"]).items()} == whole.settings


def trtllm(
    unix_ns: int, *metrics: Metric, instance: str, start_unix_ns: int = NOW - 60 * SECOND
) -> ExportMetricsServiceRequest:
    """Metrics of TensorRT-LLM, whose names an OpenTelemetry SDK accepts; times are filled in."""
    for metric in metrics:
        for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
            point.time_unix_nano = unix_ns
            point.start_time_unix_nano = start_unix_ns
            point.attributes.extend(key_values({"model_name": "m"}))
    return metrics_request(*metrics, resource={"service.instance.id": instance})


def running(value: int) -> Metric:
    return Metric(name="trtllm_num_requests_running", gauge=Gauge(data_points=[NumberDataPoint(as_int=value)]))


def counter(
    value: float, temporality: AggregationTemporality.ValueType = CUMULATIVE, name: str = "trtllm_request_success"
) -> Metric:
    points = [NumberDataPoint(as_double=value)]
    return Metric(
        name=name, unit="1", sum=Sum(data_points=points, aggregation_temporality=temporality, is_monotonic=True)
    )


def explicit(counts: list[int], total_s: float, temporality: AggregationTemporality.ValueType = CUMULATIVE) -> Metric:
    point = HistogramDataPoint(count=sum(counts), sum=total_s, bucket_counts=counts, explicit_bounds=[0.5, 2.0])
    histogram = Histogram(data_points=[point], aggregation_temporality=temporality)
    return Metric(name="trtllm_time_to_first_token_seconds", unit="s", histogram=histogram)


def exponential(offset: int, counts: list[int], total_s: float, **labels: str) -> Metric:
    """Scale 0: bucket i ends at 2^(offset + i + 1) seconds."""
    buckets = ExponentialHistogramDataPoint.Buckets(offset=offset, bucket_counts=counts)
    point = ExponentialHistogramDataPoint(
        count=sum(counts), sum=total_s, positive=buckets, attributes=key_values(labels)
    )
    histogram = ExponentialHistogram(data_points=[point], aggregation_temporality=CUMULATIVE)
    return Metric(name="trtllm_e2e_request_latency_seconds", unit="s", exponential_histogram=histogram)


def test_deltas_are_told_to_the_sender_and_their_neighbours_stay(sender: Receiving, tmp_path: Path) -> None:
    for way in WAYS:
        sent = trtllm(NOW, running(3), counter(7, DELTA), explicit([1, 2, 3], 4.5, DELTA), instance=f"delta-{way}")
        told = send(sender, sent, way, whole=False).partial_success
        assert told.rejected_data_points == 2
        assert "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=cumulative" in told.error_message
    assert sender.counters()["metrics"]["rejected"] == {"delta_temporality": 2 * len(WAYS)}
    with reading(sender, tmp_path) as opened:
        rows = [row for way in WAYS for row in samples_of(opened, f"delta-{way}")]
    assert [(row["running"], row["finished"], row["ttft_count"], row["histograms"]) for row in rows] == [
        (3.0, None, None, None)
    ] * len(WAYS)


def test_explicit_and_exponential_histograms_keep_count_sum_and_shape(sender: Receiving, tmp_path: Path) -> None:
    for way in WAYS:
        sent = trtllm(NOW, explicit([1, 2, 3], 9.25), exponential(-1, [4, 0, 2], 7.5), instance=f"shapes-{way}")
        send(sender, sent, way)
    with reading(sender, tmp_path) as opened:
        rows = [row for way in WAYS for row in samples_of(opened, f"shapes-{way}")]
    assert len(rows) == len(WAYS)
    for row in rows:
        assert (row["engine"], row["model"], row["source"], row["unix_ns"]) == ("trtllm", "m", "otlp", NOW)
        assert (row["ttft_count"], row["ttft_sum_s"]) == (6.0, 9.25)
        assert (row["e2e_count"], row["e2e_sum_s"]) == (6.0, 7.5)
        assert json.loads(row["histograms"]) == {
            "ttft": {"le": [0.5, 2.0, "+Inf"], "count": [1.0, 3.0, 6.0]},
            "e2e": {"le": [0.0, 0.5, 1.0, 2.0, 4.0, "+Inf"], "count": [0.0, 0.0, 4.0, 4.0, 6.0, 6.0]},
        }


def test_exponential_histograms_of_other_ranges_add_up(sender: Receiving, tmp_path: Path) -> None:
    """Each has buckets only where it counted: beyond them it counts none, and an edge is never short of the others'."""
    both = exponential(0, [3], 4.5, finished_reason="stop")  # (1, 2]
    wide = exponential(2, [1, 5], 40.0, finished_reason="length")  # (4, 8], (8, 16]
    both.exponential_histogram.data_points.extend(wide.exponential_histogram.data_points)
    send(sender, trtllm(NOW, both, instance="ranges"), "grpc")
    with reading(sender, tmp_path) as opened:
        (row,) = samples_of(opened, "ranges")
    assert (row["e2e_count"], row["e2e_sum_s"]) == (9.0, 44.5)
    shape = json.loads(row["histograms"])["e2e"]
    assert shape == {"le": [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, "+Inf"], "count": [0.0, 0.0, 3.0, 3.0, 4.0, 9.0, 9.0]}


def test_an_engine_that_began_anew_is_marked_and_its_counters_stay_as_sent(sender: Receiving, tmp_path: Path) -> None:
    points = [(0, 100.0, NOW - 60 * SECOND), (10, 140.0, NOW - 60 * SECOND), (20, 3.0, NOW + 15 * SECOND)]
    for way in WAYS:
        for offset_s, value, start_unix_ns in points:
            at_unix_ns = NOW + offset_s * SECOND
            sent = trtllm(at_unix_ns, running(1), counter(value), instance=f"reset-{way}", start_unix_ns=start_unix_ns)
            send(sender, sent, way)
    with reading(sender, tmp_path) as opened:
        for way in WAYS:
            assert [row["finished"] for row in samples_of(opened, f"reset-{way}")] == [100.0, 140.0, 3.0]
            (mark,) = [row for row in opened.rows("SELECT * FROM annotations") if f"reset-{way} " in row["text"]]
            assert (mark["kind"], mark["unix_ns"]) == ("restart", NOW + 20 * SECOND)


def test_metrics_of_a_real_client_are_no_engines(sender: Receiving, tmp_path: Path) -> None:
    """The recording of a client's own OTLP metrics: stored and counted whole, and no engine is made of them."""
    bodies = list(captured_bodies(shared_path("captures", "vllm-client-openai-v2", "otlp-metrics.ld.gz")))
    requests = [ExportMetricsServiceRequest.FromString(body) for body in bodies]
    before = len(sender.stored("metrics"))
    for way in WAYS:
        for request in requests:
            send(sender, request, way)
    rows = sender.stored("metrics")[before:]
    assert len(rows) % len(WAYS) == 0
    per_way = [rows[at : at + len(rows) // len(WAYS)] for at in range(0, len(rows), len(rows) // len(WAYS))]
    points = [
        (scope.scope.name, metric.name, point.time_unix_nano, float(point.count), point.sum)
        for request in requests
        for group in request.resource_metrics
        for scope in group.scope_metrics
        for metric in scope.metrics
        for point in metric.histogram.data_points
    ]
    assert points
    for own in per_way:
        assert [(r["scope_name"], r["name"], r["unix_ns"], r["count"], r["sum"]) for r in own] == points
    resources = {row["resource"] for row in rows}
    with reading(sender, tmp_path) as opened:
        names = set(identities(pl.Series(sorted(resources)))["instance"])
        assert not names & {row["instance"] for row in opened.rows("SELECT * FROM engine_samples")}
        assert not names & {row["instance"] for row in opened.rows("SELECT * FROM instances")}
