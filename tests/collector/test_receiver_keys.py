"""Keys over the real sockets of `receive`, both transports: refused before the body, let in with the stock exporters."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otlp_messages import span_message, trace_request
from receive_process import Receiving, receiving

from phasewise.collector.access_keys import KeyFile, new_key
from phasewise.collector.identity import identities
from phasewise.collector.limits import MIB
from phasewise.collector.tenants import KEY_TENANT

pytestmark = pytest.mark.live
KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    data = tmp_path_factory.mktemp("keyed")
    for name, scopes, tenant in (
        ("sender", ("ingest",), "acme"),
        ("reader", ("read",), ""),
        ("plain", ("ingest",), ""),
        ("fast", ("ingest",), ""),
        ("admin", ("admin",), ""),
    ):
        key, KEYS[name] = new_key(scopes, now_unix_ns=time.time_ns(), tenant=tenant)
        KeyFile(data).add(key)
    with receiving(data) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"


def bearer(name: str) -> str:
    return f"Bearer {KEYS.get(name, name)}"


def one_span(**attributes: object) -> tuple[bytes, str]:
    span = span_message(attributes)
    return trace_request(span).SerializeToString(), span.span_id.hex()


def exported(running: Receiving, body: bytes, header: str) -> grpc.StatusCode:
    try:
        running.export(body, metadata=(("authorization", header),) if header else ())
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("", 401, grpc.StatusCode.UNAUTHENTICATED),
        ("phw_nobody_" + "a" * 43, 401, grpc.StatusCode.UNAUTHENTICATED),
        ("reader", 403, grpc.StatusCode.PERMISSION_DENIED),
        ("sender", 200, grpc.StatusCode.OK),
        ("admin", 200, grpc.StatusCode.OK),
    ],
)
def test_each_key_gets_its_answer_over_both_transports(
    running: Receiving, name: str, status: int, code: grpc.StatusCode
) -> None:
    header = bearer(name) if name else ""
    for path in ("/v1/traces", "/v1/metrics", "/v1/logs"):
        assert running.post(b"", path=path, authorization=header).status == status
    body, span_id = one_span()
    answer = running.post(body, authorization=header)
    assert answer.status == status
    assert (answer.headers.get("www-authenticate") == "Bearer") == (status == 401)
    assert (span_id in running.span_ids()) == (status == 200)
    body, span_id = one_span()
    assert exported(running, body, header) == code
    assert (span_id in running.span_ids()) == (status == 200)


def test_even_an_unknown_path_wants_a_key(running: Receiving) -> None:
    assert running.ask("GET", "/").status == 401
    assert running.post(b"", path="/nothing", authorization=bearer("sender")).status == 404


def test_a_wrong_key_is_refused_before_its_64_mib_are_read(running: Receiving) -> None:
    size = 64 * MIB
    head = f"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\nauthorization: Bearer no\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.http_port), 10) as connection:
        connection.sendall(head.encode())
        # Nothing of the body was sent: an answer that waited for it would not come.
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
    requests = running.counters()["requests"]
    assert requests["unauthenticated"] > 0


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_the_stock_exporters_send_the_key_of_the_environment(
    running: Receiving, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Bearer%20{KEYS['sender']}")
    exporter: SpanExporter = (
        GrpcExporter(endpoint=f"http://127.0.0.1:{running.grpc_port}", insecure=True)
        if transport == "grpc"
        else HttpExporter(endpoint=f"http://127.0.0.1:{running.http_port}/v1/traces")
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("keyed").start_span(f"keyed by {transport}").end()
    provider.shutdown()
    assert f"keyed by {transport}" in {row["name"] for row in running.stored()}


def test_the_tenant_of_the_key_goes_with_the_spans_and_cannot_be_claimed(running: Receiving) -> None:
    import polars as pl

    told: dict[str, Any] = {}
    for name in ("sender", "plain"):
        span = span_message({})
        request = trace_request(span, resource={KEY_TENANT: "mine, says the sender", "service.name": "vllm"})
        assert running.post(request.SerializeToString(), authorization=bearer(name)).status == 200
        (row,) = [row for row in running.stored() if row["span_id"] == span.span_id.hex()]
        told[name] = json.loads(row["resource"]).get(KEY_TENANT)
        assert identities(pl.Series([row["resource"]]))["key_tenant"].to_list() == [told[name]]
    assert told == {"sender": "acme", "plain": None}


def test_a_key_that_sends_too_fast_is_told_when_to_come_back(running: Receiving) -> None:
    zeros = bytes(24 * MIB)  # malformed, but 24 MiB of the key's rate
    assert running.post(zeros, authorization=bearer("fast")).status == 400
    answer = running.post(b"", authorization=bearer("fast"))
    assert answer.status == 429 and 1 <= int(answer.headers["retry-after"]) <= 30
    with pytest.raises(grpc.RpcError) as raised:
        running.export(b"", metadata=(("authorization", bearer("fast")),))
    error: Any = raised.value
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    hint = dict(error.trailing_metadata())["google.rpc.retryinfo-bin"]
    assert RetryInfo.FromString(hint).retry_delay.seconds >= 1
    assert running.post(b"", authorization=bearer("sender")).status == 200, "the others are not held up"
    assert running.counters()["requests"]["refused_rate"] == 2


def test_a_new_key_works_and_a_revoked_one_does_not_without_a_restart(running: Receiving) -> None:
    key, token = new_key(("ingest",), now_unix_ns=time.time_ns())
    file = KeyFile(running.data)
    file.add(key)
    until = time.monotonic() + 10
    while running.post(b"", authorization=f"Bearer {token}").status != 200 and time.monotonic() < until:
        time.sleep(0.2)
    assert exported(running, b"", f"Bearer {token}") == grpc.StatusCode.OK
    file.revoke(key.key_id, time.time_ns())
    while running.post(b"", authorization=f"Bearer {token}").status != 401 and time.monotonic() < until:
        time.sleep(0.2)
    assert exported(running, b"", f"Bearer {token}") == grpc.StatusCode.UNAUTHENTICATED


def test_no_secret_is_left_anywhere(running: Receiving) -> None:
    for file in running.data.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(token.split("_", 2)[2].encode() in content for token in KEYS.values()), file


def test_files_of_the_process_belong_to_its_user_alone(running: Receiving) -> None:
    running.counters()
    loose = [path for path in running.data.rglob("*") if path.stat().st_mode & 0o077]
    assert loose == []


@pytest.mark.slow
def test_a_key_file_that_others_can_read_lets_nobody_in(tmp_path: Path) -> None:
    key, token = new_key(("ingest",), now_unix_ns=time.time_ns())
    KeyFile(tmp_path).add(key)
    (tmp_path / "keys.json").chmod(0o644)
    with receiving(tmp_path) as process:
        assert process.post(b"", authorization=f"Bearer {token}").status == 401
        assert "chmod 600" in process.counters()["keys_trouble"]
