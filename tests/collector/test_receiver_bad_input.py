"""Bad input over real sockets: garbage, bombs, and what is larger than may be. After each the process lives and neighbours are stored."""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from large_requests import gzip_of_zeros, padded_request
from machine_speed import slowness
from otlp_messages import otlp_json, span_message, trace_request
from receive_process import Receiving, assert_neighbour_is_stored

from phasewise.collector.limits import INTAKE_LIMITS, MIB

pytestmark = pytest.mark.live
PROTOBUF, JSON = "application/x-protobuf", "application/json"
GARBAGE = [b"\xff" * 100, b"GET / HTTP/1.1", os.urandom(1) + b"\x07" * 5000]
TRUNCATED = trace_request(*[span_message({"a": "text"}) for _ in range(20)]).SerializeToString()[:-100]


@pytest.mark.parametrize("body", [*GARBAGE, TRUNCATED])
def test_garbage_is_400_and_invalid_argument(running: Receiving, body: bytes) -> None:
    answer = running.post(body)
    assert answer.status == 400
    status = Status.FromString(answer.body)
    assert status.code == 3
    assert status.message
    assert running.post(body, media=JSON).status == 400
    with pytest.raises(grpc.RpcError) as raised:
        running.export(body)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert_neighbour_is_stored(running)


def test_bad_json_is_400_with_a_status_in_json(running: Receiving) -> None:
    answer = running.post(b'{"resourceSpans": [', media=JSON)
    assert (answer.status, answer.headers["content-type"]) == (400, JSON)
    assert json.loads(answer.body)["code"] == 3
    assert "not JSON" in json.loads(answer.body)["message"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/nothing", {"content-type": PROTOBUF}, 404),
        ("GET", "/", {}, 404),
        ("GET", "/v1/traces", {}, 405),
        ("OPTIONS", "/v1/traces", {"origin": "http://evil.example"}, 405),
        ("POST", "/v1/traces", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/traces", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/traces", {}, 415),
        ("POST", "/v1/traces", {"content-type": PROTOBUF, "content-encoding": "zstd"}, 415),
    ],
)
def test_other_requests_get_the_right_status(
    running: Receiving, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = running.ask(method, path, b"" if method == "POST" else None, headers)
    assert answer.status == status
    assert answer.body
    if status == 405:
        assert answer.headers["allow"] == "POST"


def test_unknown_methods_are_unimplemented(running: Receiving) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel, pytest.raises(grpc.RpcError) as raised:
        cast(Any, channel).unary_unary("/some.Service/Method")(b"", timeout=10)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("damage", ["name", "attribute", "resource"])
def test_invalid_utf8_is_repaired_and_kept(running: Receiving, damage: str) -> None:
    text = {name: "BAD!" if name == damage else "good" for name in ("name", "attribute", "resource")}
    span = span_message({"k": text["attribute"]}, name=text["name"])
    body = trace_request(span, resource={"service.name": text["resource"]}).SerializeToString()
    for send in (running.post, running.export):
        send(body.replace(b"BAD!", b"\xc3\x28\xff\xfe"))
    kept = [row for row in running.stored() if row["span_id"] == span.span_id.hex()]
    assert [row["flags"] for row in kept] == ['["sanitised"]'] * 2


def test_gzip_of_both_encodings(running: Receiving) -> None:
    for media, split in itertools.product((PROTOBUF, JSON), (False, True)):
        span = span_message()
        request = trace_request(span)
        body = request.SerializeToString() if media == PROTOBUF else json.dumps(otlp_json(request)).encode()
        packed = gzip.compress(body[:20]) + gzip.compress(body[20:]) if split else gzip.compress(body)
        assert running.post(packed, media=media, content_encoding="gzip").status == 200
        assert span.span_id.hex() in running.span_ids()


GOOD_GZIP = gzip.compress(trace_request(span_message()).SerializeToString())


@pytest.mark.parametrize(
    "body",
    [
        GOOD_GZIP[:-5],
        GOOD_GZIP[: len(GOOD_GZIP) // 2],
        GOOD_GZIP[:-8] + b"\0\0\0\0" + GOOD_GZIP[-4:],
        GOOD_GZIP + b"garbage",
        b"not gzip",
        gzip.compress(GOOD_GZIP),
    ],
    ids=["cut", "half", "wrong crc", "trailing", "none", "nested"],
)
def test_damaged_gzip_is_400(running: Receiving, body: bytes) -> None:
    assert running.post(body, content_encoding="gzip").status == 400
    assert_neighbour_is_stored(running)


@pytest.mark.parametrize("body", [b"not deflate", zlib.compress(b"x" * 1000)[:-6], GOOD_GZIP])
def test_damaged_deflate_is_400(running: Receiving, body: bytes) -> None:
    assert running.post(body, content_encoding="deflate").status == 400


def test_a_deflate_bomb_is_413(running: Receiving) -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    assert len(bomb) < 1 << 20
    answer = running.post(bomb, content_encoding="deflate")
    assert answer.status == 413


def test_a_gzip_bomb_is_413_and_memory_stays(running: Receiving) -> None:
    bomb = gzip_of_zeros(1024)
    assert len(bomb) < 3 * MIB
    assert_neighbour_is_stored(running)
    before = running.rss_bytes()
    running.reset_peak()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: running.post(bomb, content_encoding="gzip"), range(8)))
    assert [answer.status for answer in answers] == [413] * 8
    assert Status.FromString(answers[0].body).code == 8
    assert running.rss_bytes("VmHWM") - before < 150 * MIB
    assert_neighbour_is_stored(running)


def test_a_gzip_bomb_over_grpc_is_resource_exhausted(running: Receiving) -> None:
    before = running.rss_bytes()
    running.reset_peak()
    with pytest.raises(grpc.RpcError) as raised:
        running.export(bytes(200 * MIB), compression=grpc.Compression.Gzip)
    error: Any = raised.value
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "google.rpc.retryinfo-bin" not in dict(error.trailing_metadata())
    assert running.rss_bytes("VmHWM") - before < 200 * MIB
    assert_neighbour_is_stored(running)


@pytest.mark.alone
def test_just_64_mib_is_taken_and_one_byte_more_is_not(running: Receiving) -> None:
    limit = INTAKE_LIMITS.request_bytes
    body = padded_request(limit)
    assert len(body) == limit
    before = running.rss_bytes()
    running.reset_peak()
    assert running.post(body).status == 200
    assert running.post(gzip.compress(body, 1), content_encoding="gzip").status == 200
    assert running.export(body) == b""
    assert running.rss_bytes("VmHWM") - before < 6 * limit
    over = padded_request(limit + 1)
    started = time.monotonic()
    assert running.post(over).status == 413
    assert time.monotonic() - started < 2 * slowness()
    assert running.post(gzip.compress(over, 1), content_encoding="gzip").status == 413
    assert running.ask("POST", "/v1/traces", iter([over]), {"content-type": PROTOBUF}).status == 413  # chunked
    with pytest.raises(grpc.RpcError) as raised:
        running.export(over)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_neighbour_is_stored(running)


def test_a_lying_content_length_is_refused_unread(running: Receiving) -> None:
    headers = {"content-type": PROTOBUF, "content-length": str(10**12)}
    connection = http.client.HTTPConnection("127.0.0.1", running.http_port, timeout=10)
    connection.request("POST", "/v1/traces", None, headers)
    assert connection.getresponse().status == 413
    connection.close()
