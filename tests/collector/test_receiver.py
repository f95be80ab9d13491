"""The real process over real sockets: replies, what is stored and what is not, clients that go away."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import time
from pathlib import Path

import grpc
import pytest
from dynamo_logs import logs_request, request_end
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otlp_messages import START_UNIX_NS, captured_bodies, metrics_request, otlp_json, span_message, trace_request
from receive_process import Receiving, assert_neighbour_is_stored
from shared_data import shared_path, shared_root
from waiting import wait_for

from phasewise.collector.limits import MIB

pytestmark = pytest.mark.live
PROTOBUF, JSON = "application/x-protobuf", "application/json"
CANARY = "the quick brown canary"


def test_an_answer_means_that_the_spans_are_in_the_journal(running: Receiving) -> None:
    span = span_message({"gen_ai.usage.prompt_tokens": 97})
    answer = running.post(trace_request(span).SerializeToString())
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"", PROTOBUF)
    (row,) = [row for row in running.stored() if row["span_id"] == span.span_id.hex()]
    assert row["attributes"] == '{"gen_ai.usage.prompt_tokens":97}'
    assert abs(row["received_unix_ns"] - time.time_ns()) < 60 * 10**9
    assert running.export(trace_request(span_message()).SerializeToString()) == b""


def test_json_is_answered_in_json(running: Receiving) -> None:
    span = span_message()
    body = json.dumps(otlp_json(trace_request(span))).encode()
    answer = running.post(body, media="application/json; charset=utf-8")
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, JSON, b"{}")
    assert span.span_id.hex() in running.span_ids()


@pytest.mark.parametrize("body", [b"", trace_request().SerializeToString()])
def test_an_empty_request_succeeds(running: Receiving, body: bytes) -> None:
    assert running.post(body).status == 200
    assert running.export(body) == b""
    assert running.post(b"{}", media=JSON).status == 200


def exporters(running: Receiving) -> dict[str, SpanExporter]:
    plain, http = f"http://127.0.0.1:{running.grpc_port}", f"http://127.0.0.1:{running.http_port}/v1/traces"
    return {
        "grpc": GrpcExporter(endpoint=plain, insecure=True),
        "grpc-gzip": GrpcExporter(endpoint=plain, insecure=True, compression=grpc.Compression.Gzip),
        "http": HttpExporter(endpoint=http),
        "http-gzip": HttpExporter(endpoint=http, compression=HttpCompression.Gzip),
        "http-deflate": HttpExporter(endpoint=http, compression=HttpCompression.Deflate),
    }


@pytest.mark.parametrize("name", ["grpc", "grpc-gzip", "http", "http-gzip", "http-deflate"])
def test_the_stock_exporters_of_python_work(running: Receiving, name: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporters(running)[name]))
    with provider.get_tracer("stock").start_as_current_span(f"by {name}") as span:
        span.set_attribute("gen_ai.request.id", name)
        span.add_event("first token")
    provider.shutdown()
    (row,) = [row for row in running.stored() if row["name"] == f"by {name}"]
    assert (row["scope_name"], json.loads(row["attributes"])) == ("stock", {"gen_ai.request.id": name})


def test_the_stock_metric_exporter_works(running: Receiving) -> None:
    exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{running.http_port}/v1/metrics")
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)])
    provider.get_meter("stock").create_counter("stock_requests").add(3)
    provider.shutdown()
    (row,) = [row for row in running.stored("metrics") if row["name"] == "stock_requests"]
    assert (row["kind"], row["value"], row["monotonic"]) == ("sum", 3.0, True)


def test_metrics_over_grpc(running: Receiving) -> None:
    point = NumberDataPoint(as_int=4, time_unix_nano=START_UNIX_NS)
    body = metrics_request(Metric(name="over_grpc", gauge=Gauge(data_points=[point]))).SerializeToString()
    assert running.export(body, "Metrics") == b""
    assert "over_grpc" in {row["name"] for row in running.stored("metrics")}


def test_logs_are_counted_and_declined(running: Receiving) -> None:
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add().log_records.add()
    before = running.counters()["requests"].get("unsupported_signal", 0)
    answer = running.post(request.SerializeToString(), "/v1/logs")
    told = ExportLogsServiceResponse.FromString(answer.body).partial_success
    assert (answer.status, told.rejected_log_records) == (200, 1)
    assert "not kept" in told.error_message
    told = ExportLogsServiceResponse.FromString(running.export(request.SerializeToString(), "Logs")).partial_success
    assert told.rejected_log_records == 1
    assert running.counters()["requests"]["unsupported_signal"] == before + 2


@pytest.mark.parametrize("encoding", ["protobuf", "json", "grpc", "gzip"])
def test_request_records_in_logs_are_kept_over_both_transports(running: Receiving, encoding: str) -> None:
    request = logs_request(request_end(request_id=f"over-{encoding}"), {"event_type": "request_payload"})
    body = request.SerializeToString()
    if encoding == "grpc":
        answer = running.export(body, "Logs")
    elif encoding == "json":
        answer = running.post(json_format.MessageToJson(request).encode(), "/v1/logs", **{"content-type": JSON}).body
    elif encoding == "gzip":
        answer = running.post(gzip.compress(body), "/v1/logs", **{"content-encoding": "gzip"}).body
    else:
        answer = running.post(body, "/v1/logs").body
    if encoding == "json":
        assert json.loads(answer)["partialSuccess"]["rejectedLogRecords"] == "1"
    else:
        told = ExportLogsServiceResponse.FromString(answer).partial_success
        assert told.rejected_log_records == 1
        assert "1 log records refused (not_kept 1)" in told.error_message
    kept = [row for row in running.stored() if f'"over-{encoding}"' in row["attributes"]]
    assert [row["name"] for row in kept] == ["request_end"]


def test_logs_that_are_no_protobuf_are_refused_for_good(running: Receiving) -> None:
    assert running.post(b"\x0a\xff", "/v1/logs").status == 400


@pytest.mark.parametrize("media", [PROTOBUF, JSON])
def test_refused_spans_are_told_and_the_others_kept(running: Receiving, media: str) -> None:
    good = span_message()
    request = trace_request(span_message(trace_id=b"short"), good, span_message(span_id=bytes(8)))
    body = request.SerializeToString() if media == PROTOBUF else json.dumps(otlp_json(request)).encode()
    answer = running.post(body, media=media)
    assert answer.status == 200
    if media == PROTOBUF:
        told = ExportTraceServiceResponse.FromString(answer.body).partial_success
        assert told.rejected_spans == 2
        assert "traceId has 5 bytes" in told.error_message
    else:
        assert json.loads(answer.body)["partialSuccess"]["rejectedSpans"] == "2"
    assert good.span_id.hex() in running.span_ids()


def test_ten_thousand_spans_in_one_request(running: Receiving) -> None:
    spans = [span_message({"i": i}) for i in range(10_000)]
    assert running.post(trace_request(*spans).SerializeToString()).status == 200
    assert {span.span_id.hex() for span in spans} <= running.span_ids()
    assert_neighbour_is_stored(running)


def test_room_is_kept_for_what_was_announced_while_announcements_come_true(running: Receiving) -> None:
    whole = bytes(50 * MIB)  # two are more than may wait; none is protobuf
    assert [running.post(whole[: 30 * MIB]).status for _ in range(3)] == [400] * 3
    head = f"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\ncontent-length: {len(whole)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.http_port)) as announced:
        announced.sendall(head.encode())
        assert wait_for(lambda: running.post(whole).status == 503, 5.0, 0.0)
        assert wait_for(lambda: running.post(whole).status == 400, 20.0)
        with socket.create_connection(("127.0.0.1", running.http_port)) as other:
            other.sendall(head.encode())
            assert [running.post(whole).status for _ in range(3)] == [400] * 3, (
                "one did not: headers alone keep nobody out"
            )
        announced.sendall(whole)  # late, and welcome all the same
        assert announced.recv(20).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", running.http_port)) as gone:
        gone.sendall(head.encode() + whole[: 10 * MIB])
    assert wait_for(lambda: running.post(whole).status == 400, 20.0)
    assert running.post(whole).status == 400, "and what was kept for who went is given back"
    assert_neighbour_is_stored(running)


def test_clients_that_disconnect_leave_nothing_behind(running: Receiving) -> None:
    """F19: a thousand of them, after the first word, the head, half a body, the body, and the first byte of the answer."""

    def descriptors() -> int:
        return sum(1 for _ in Path(f"/proc/{running.process.pid}/fd").iterdir())

    assert_neighbour_is_stored(running)
    time.sleep(0.2)
    before = descriptors()
    body = trace_request(span_message()).SerializeToString()
    head = f"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for cut, reads in ((b"POST /v1", 0), (head, 0), (head + body[:10], 0), (head + body, 0), (head + body, 1)):
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", running.http_port)) as connection:
                connection.sendall(cut)
                connection.recv(reads)
    deadline = time.monotonic() + 15
    while descriptors() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descriptors() <= before + 2
    assert_neighbour_is_stored(running)


def test_prompts_and_credentials_never_reach_the_disk(running: Receiving) -> None:
    attributes = {"gen_ai.input.messages": CANARY, "http.request.header.authorization": CANARY, "kept": 1}
    body = trace_request(span_message(attributes, name="redacted")).SerializeToString()
    assert running.post(body).status == 200
    assert "redacted" in {row["name"] for row in running.stored()}
    for row in running.stored():
        assert CANARY not in str(row)
    for file in running.data.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes()
    assert running.counters()["spans"]["redacted"] == {"content": 1, "credential": 1}


def test_changes_are_told_once_a_minute_to_each_sender(running: Receiving) -> None:
    body = trace_request(span_message({"long": "x" * 5000})).SerializeToString()
    answers = [ExportTraceServiceResponse.FromString(running.post(body).body) for _ in range(3)]
    assert sum(bool(answer.partial_success.error_message) for answer in answers) <= 1
    assert all(answer.partial_success.rejected_spans == 0 for answer in answers)


def oddity_cases() -> list[str]:
    """Names of the cases; without the shared data one name, whose test is skipped with the reason."""
    return sorted(path.name for path in (shared_root() / "cases" / "telemetry").glob("T*.json")) or ["T001.json"]


@pytest.mark.parametrize("name", oddity_cases())
def test_oddities_of_real_senders(running: Receiving, name: str) -> None:
    case = json.loads(shared_path("cases", "telemetry", name).read_text())
    expected = case["expected"]
    before = len(running.stored())
    for request in case["requests"]:
        if "body_base64" in request:
            body = base64.b64decode(request["body_base64"])
        else:
            text = json.dumps(request["body"])
            for change in [request["expand"]] if "expand" in request else []:
                text = text.replace(change["placeholder"], change["repeat_text"] * change["times"])
            body = text.encode()
        answer = running.post(body, case["transport"]["path"], case["transport"]["content_type"])
        allowed = expected["http_status"]
        assert answer.status in (allowed if isinstance(allowed, list) else [allowed])
    arrived = running.stored()[before:]
    wanted = {**expected, **expected.get("if_200", {})}["stored_spans"]
    distinct = {(row["trace_id"], row["span_id"]) for row in arrived}  # what comes twice is the store's to recognise
    assert len(distinct) in (wanted if isinstance(wanted, list) else [wanted])
    for span_id, flags in expected.get("flags", {}).items():
        (row,) = [row for row in arrived if row["span_id"] == span_id]
        if "negative_duration" in flags:
            assert json.loads(row["flags"]) == ["negative_duration"]


def test_recordings_of_a_real_engine_arrive_whole(running: Receiving) -> None:
    file = shared_path("captures", "sglang-overload", "otlp-traces.ld.gz")
    before = len(running.stored())
    for body in captured_bodies(file):
        running.export(body)
    with gzip.open(file.with_name("spans.jsonl.gz"), "rt") as lines:
        assert len(running.stored()) - before == sum(1 for _ in lines)
