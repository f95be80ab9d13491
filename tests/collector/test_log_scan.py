"""Request records in log records: the spans they tell of, nothing of what was said, and no crash on anything."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from dynamo_logs import START_MS, logs_request, request_end, tool_end
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_messages import RECEIVED_UNIX_NS, START_UNIX_NS
from writing import bench

from phasewise.collector.log_scan import scan_logs
from phasewise.collector.records import SPAN_SCHEMA, Scanned
from phasewise.collector.wire import Malformed


def scan(*payloads: object, scope: str = "dynamo.request_trace") -> Scanned:
    return scan_logs(logs_request(*payloads, scope=scope).SerializeToString(), RECEIVED_UNIX_NS)


def test_a_finished_request_is_a_span_of_its_own_length() -> None:
    (row,) = scan(request_end()).rows.to_pylist()
    assert (row["name"], row["scope_name"], row["parent_span_id"]) == ("request_end", "dynamo.request_trace", None)
    assert (row["start_unix_ns"], row["end_unix_ns"]) == (START_UNIX_NS, START_UNIX_NS + 4_250_500_000)
    assert json.loads(row["resource"]) == {"service.name": "dynamo"}
    told = json.loads(row["attributes"])
    assert (told["ttft_ms"], told["cached_tokens"], told["finish_reason"]) == (1000.0, 16, "stop")
    assert "replay" not in told
    assert len(row["trace_id"]) == 32 and len(row["span_id"]) == 16


def test_a_resend_is_the_same_span_and_another_request_is_not() -> None:
    rows = scan(request_end(), request_end(), request_end(request_id="r-2")).rows.to_pylist()
    first, again, other = (row["trace_id"] + row["span_id"] for row in rows)
    assert first == again != other


def test_without_a_begin_it_is_reckoned_from_the_end() -> None:
    (row,) = scan(request_end(request_received_ms=None)).rows.to_pylist()
    assert row["end_unix_ns"] == (START_MS + 4251) * 1_000_000
    assert row["end_unix_ns"] - row["start_unix_ns"] == 4_250_500_000


def test_prompts_never_pass() -> None:
    payload = {"event_type": "request_payload", "event_time_unix_ms": START_MS, "payload": {"request": {"canary": "c"}}}
    found = scan(request_end(canary="canary", finish_reason_metadata={"tool_calls": ["canary"]}), payload)
    assert "canary" not in json.dumps(found.rows.to_pylist())
    assert found.rejected == {"not_kept": 1}


def test_tool_calls_have_their_own_times_and_end_in_error() -> None:
    good, bad = scan(tool_end(), tool_end("tool_error", tool_call_id="c-2")).rows.to_pylist()
    assert good["end_unix_ns"] - good["start_unix_ns"] == 1_500_000_000
    assert (good["status_code"], bad["status_code"]) == (0, 2)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("{not json", "payload"),
        ("[" * 100_000, "payload"),
        ("[]", "payload"),
        ({"event_type": "request_end", "request": "text"}, "payload"),
        ({"event_type": "new_event"}, "payload"),
        ({"event_type": "tool_start"}, "not_kept"),
        ({"event_type": "request_end", "request": {"request_id": "r"}}, "start_missing"),
        (request_end(request_received_ms=True, total_time_ms="soon"), "start_missing"),
        (request_end(request_received_ms=10**16), "time_range"),
    ],
)
def test_a_record_that_cannot_be_kept_costs_itself_alone(payload: object, reason: str) -> None:
    found = scan(payload, request_end())
    assert found.rejected == {reason: 1}
    assert found.rows.num_rows == 1
    assert found.first_error.startswith("log record 1 ")


def test_logs_of_others_are_not_kept() -> None:
    found = scan(request_end(), scope="acme.logger")
    assert (found.rows.num_rows, found.rejected) == (0, {"not_kept": 1})


def test_numbers_json_does_not_have_are_left_out() -> None:
    text = json.dumps(request_end()).replace("1000.0", "NaN").replace("750.0", "1e999")
    (row,) = scan(text).rows.to_pylist()
    assert not {"ttft_ms", "avg_itl_ms", "prefill_time_ms"} & set(json.loads(row["attributes"]))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(request_end()["request"])), values), values)
def test_whatever_a_record_holds_it_is_kept_or_refused(request: dict[str, Any], time: object) -> None:
    record = {**request_end(), "request": request, "event_time_unix_ms": time}
    found = scan(record)
    assert found.rows.num_rows + sum(found.rejected.values()) == 1
    assert found.rows.schema.equals(SPAN_SCHEMA)


@pytest.mark.parametrize("time", [1.7e302, 1e19, -1.7e302, (1 << 63) - 1])
def test_a_time_beyond_all_times_is_refused(time: float) -> None:
    found = scan({**request_end(), "request": {}, "event_time_unix_ms": time})
    assert found.rows.num_rows == 0
    assert sum(found.rejected.values()) == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_without_a_crash(data: st.DataObject) -> None:
    body = bytearray(logs_request(request_end()).SerializeToString())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        scan_logs(bytes(body[: data.draw(st.integers(0, len(body)))]), RECEIVED_UNIX_NS)


@pytest.mark.parametrize("record_first", [True, False])
def test_a_record_and_the_frontend_s_span_are_one_request(tmp_path: Path, record_first: bool) -> None:
    (record,) = scan(request_end()).rows.to_pylist()
    short = {key: record[key] for key in ("name", "span_id")} | {
        "trace": record["trace_id"],
        "scope": record["scope_name"],
        "start_s": 0,
        "end_s": 4.2505,
        "attributes": json.loads(record["attributes"]),
    }
    spans = [
        {
            "name": "http-request",
            "start_s": 0,
            "end_s": 4.25,
            "attributes": {"request_id": "r-1", "model": "m", "output_tokens": 5, "ttft_ms": 1000.0},
        },
        short,
    ]
    with bench(tmp_path) as b:
        for span in reversed(spans) if record_first else spans:
            b.receive([span])
            b.run(3.0)
        (row,) = b.rows()
        assert (row["engine"], row["cached_tokens"], row["input_tokens"]) == ("dynamo_frontend", 16, 64)
        assert row["entry_ttft_s"] is None
