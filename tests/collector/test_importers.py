"""Files told by their content; good lines kept, bad ones named with line, field and remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from client_files import AIPERF, BENCH, OPENAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from span_tables import BASE_UNIX_NS, at
from writing import bench, engine_span, rulebook

from phasewise.collector.importers import Imported, import_bytes, import_file, kind_of
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

PROFILES = Profiles(rulebook().engines)


def read(*lines: object, name: str = "f.jsonl") -> Imported:
    body = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return import_bytes(body.encode(), name, PROFILES, modified_unix_ns=at(1000))


SCRAPE = {"unix_ns": at(0), "text": "vllm:num_requests_running 1\n"}
OTLP = {
    "resourceSpans": [{"scopeSpans": [{"scope": {"name": "s"}, "spans": [{
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "x",
        "startTimeUnixNano": str(at(0)), "endTimeUnixNano": str(at(1))}]}]}]
}  # fmt: skip


def protobuf() -> bytes:
    span = Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="x", start_time_unix_nano=at(0), end_time_unix_nano=at(1))
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])]
    ).SerializeToString()


@pytest.mark.parametrize(
    ("body", "kind", "form"),
    [
        (json.dumps(SCRAPE).encode(), "scrapes", "scrapes"),
        (json.dumps(OTLP).encode(), "spans", "otlp-json"),
        ((json.dumps(OTLP) + "\n" + json.dumps(OTLP)).encode(), "spans", "otlp-json"),
        (json.dumps(OTLP, indent=2).encode(), "spans", "otlp-json"),
        (protobuf(), "spans", "otlp-protobuf"),
        (gzip.compress(protobuf(), mtime=0), "spans", "otlp-protobuf"),
        (json.dumps(BENCH).encode(), "client", "vllm-bench"),
        (json.dumps([BENCH, BENCH | {"index": 1}]).encode(), "client", "vllm-bench"),
        (gzip.compress(json.dumps(AIPERF).encode(), mtime=0), "client", "aiperf"),
        (json.dumps(OPENAI).encode(), "client", "openai-client"),
    ],
)
def test_the_format_is_told_by_content(tmp_path: Path, body: bytes, kind: str, form: str) -> None:
    path = tmp_path / "misleading.csv"
    path.write_bytes(body)
    found = import_file(path, PROFILES)
    assert (found.kind, found.format, found.problems) == (kind, form, [])
    assert kind_of(path) == kind


def test_client_records_are_rows_on_the_clients_boundary() -> None:
    for document, e2e_s, gaps, tokens in (
        (BENCH, 0.75, [0.1, 0.4], 3),
        (AIPERF, 1.5, [0.1, 0.2], 3),
        (OPENAI, 1.0, [0.5], 2),
    ):
        rows = read(document).requests
        assert rows is not None
        row = rows.row(0, named=True)
        assert (row["entry_e2e_s"], row["entry_ttft_s"], row["output_tokens"]) == (e2e_s, 0.25, tokens)
        assert json.loads(row["client_gaps"]) == pytest.approx(gaps)
        assert row["longest_gap_s"] == max(gaps)
        assert (row["combined_covers"], row["queue_s"], row["outcome"]) == ("Q,C,P,F", None, "ok")


def test_relative_times_end_when_the_file_was_written() -> None:
    rows = read(BENCH, BENCH | {"index": 1, "start_s": 2.0}).requests
    assert rows is not None
    assert rows["finished_unix_ns"].max() == at(1000)
    assert rows["arrival_unix_ns"].to_list() == [at(1000 - 2.75 + 0.5), at(1000 - 0.75)]


def test_the_detailed_result_of_vllm_bench_is_read_too() -> None:
    rows = read(
        {
            "ttfts": [0.25, 0.5],
            "itls": [[0.1, 0.2], []],
            "input_lens": [5, 6],
            "output_lens": [3, 1],
            "errors": ["", ""],
        }
    ).requests
    assert rows is not None
    assert rows["entry_e2e_s"].to_list() == pytest.approx([0.55, 0.5])
    assert rows["client_request_id"].to_list() == ["bench-index-0", "bench-index-1"]


@pytest.mark.parametrize(
    ("bad", "field", "remedy"),
    [
        ({"unix_ns": 5, "text": "x"}, "unix_ns", "nanoseconds"),
        ({"unix_ns": at(0)}, "text", "/metrics"),
        ({"unix_ns": at(0), "text": "up 1"}, "text", "no known engine"),
        ("{broken", "line 2", "not JSON"),
        ("[1]", "line 2", "not an object"),
    ],
)
def test_a_bad_scrape_is_named_and_the_good_ones_stay(bad: object, field: str, remedy: str) -> None:
    found = read(SCRAPE, bad, SCRAPE | {"unix_ns": at(1)})
    assert len(found.samples) == 2
    assert found.counts == {"good": 2, "bad": 1}
    assert found.problems[0].startswith("f.jsonl: line 2")
    assert field in found.problems[0]
    assert remedy in found.problems[0]


def test_a_bad_client_record_is_named_and_the_good_ones_stay() -> None:
    minutes = {"value": 1, "unit": "min"}
    found = read(AIPERF, AIPERF | {"metrics": AIPERF["metrics"] | {"request_latency": minutes}}, AIPERF)
    assert found.counts == {"good": 2, "bad": 1}
    assert "line 2, metrics.request_latency.unit: is 'min'" in found.problems[0]
    found = read(BENCH, BENCH | {"e2e_s": -1})
    assert "line 2, e2e_s: is -1" in found.problems[0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b'{"a": 1, "b": 2}', "format that is not known (keys: a, b)"),
        (b"\x00\x01garbage", "neither text that holds JSON nor an OTLP request"),
        (b"\x1f\x8bbroken", "damaged gzip"),
        (b'{"unix_ns": 1, "text": "x"}', "unix_ns"),
    ],
)
def test_a_file_that_holds_nothing_says_why(body: bytes, says: str) -> None:
    with pytest.raises(InputError) as raised:
        import_bytes(body, "some.file", PROFILES)
    assert "some.file" in str(raised.value)
    assert says in str(raised.value)
    assert raised.value.remedy or says == "unix_ns"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        import_file(tmp_path / "nothing", PROFILES)


def test_scrapes_are_named_by_job_and_instance() -> None:
    named = read(SCRAPE | {"instance": "h:8000"}, SCRAPE | {"instance": "h:8000", "job": "vllm"}, SCRAPE)
    assert [one.samples["instance"].item() for one in named.samples] == ["h:8000", "vllm/h:8000", "unnamed:vllm_v1"]


def test_records_meet_their_calls_once(tmp_path: Path) -> None:
    ids = ["chatcmpl-1", "cmpl-2-0"]
    spans = [
        engine_span(start_s=float(i), e2e_s=2.0, trace=f"{i + 1:032x}", attributes={"gen_ai.request.id": name})
        for i, name in enumerate(ids)
    ]
    records = [
        OPENAI | {"id": "chatcmpl-1", "start_unix_ns": at(-0.1), "e2e_s": 2.25},
        OPENAI | {"id": "cmpl-2", "start_unix_ns": at(0.9), "e2e_s": 2.25},
        OPENAI | {"id": "cmpl-unknown", "start_unix_ns": at(5)},
    ]
    with bench(tmp_path) as b:
        b.receive(spans)
        b.run()
        counts = b.writer.add_import(read(*records))
        assert (counts["matched"], counts["added"]) == (2, 1)
        rows = b.rows()
        assert [row["entry_e2e_s"] for row in rows] == [2.25, 2.25, 1.0]
        assert [row["source"] for row in rows] == ["otlp", "otlp", "import:openai-client"]
        assert json.loads(rows[0]["provenance"])["entry_ttft_s"] == "measured:client"
        again = b.writer.add_import(read(*records))
        assert again["added"] == 0
        assert len(b.rows()) == 3


def test_records_without_identifiers_meet_by_time_and_lengths(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span(start_s=float(i), trace=f"{i + 1:032x}") for i in range(3)])
        b.run()
        usage = {"prompt_tokens": 10, "completion_tokens": 4}
        records = [
            {"start_unix_ns": BASE_UNIX_NS + round((i - 0.05) * 1e9), "e2e_s": 2.1, "ttft_s": 0.6, "usage": usage}
            for i in range(3)
        ]
        counts = b.writer.add_import(read(*records))
        assert (counts["matched"], counts["added"]) == (3, 0)


def test_a_client_file_that_came_first_gives_way_to_the_spans(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_import(read(OPENAI | {"id": "chatcmpl-1", "e2e_s": 2.5}))
        assert [row["source"] for row in b.rows()] == ["import:openai-client"]
        b.receive([engine_span(attributes={"gen_ai.request.id": "chatcmpl-1"})])
        b.run()
        (row,) = b.rows()
        assert (row["source"], row["entry_e2e_s"], row["engine"]) == ("otlp", 2.5, "vllm_v1")
