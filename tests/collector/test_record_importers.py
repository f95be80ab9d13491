"""Request records that engines and benchmark tools write to files: each in its documented shape, and what becomes of it."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from client_files import BASE_S, guidellm
from dynamo_logs import logs_request, request_end, tool_end
from otlp_messages import START_UNIX_NS
from span_tables import at
from writing import bench, rulebook

from phasewise.collector.importers import Imported, import_bytes, import_file, import_piece, pieces
from phasewise.collector.log_scan import scan_logs
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

PROFILES = Profiles(rulebook().engines)


def read(*documents: Any, modified_s: float = 1000) -> Imported:
    body = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in documents).encode()
    return import_bytes(body, "f", PROFILES, modified_unix_ns=at(modified_s))


def rows_of(folder: Path, *found: Imported) -> list[dict[str, Any]]:
    with bench(folder) as b:
        for one in found:
            b.writer.add_import(one)
        return b.rows()


def sglang(number: int = 0, **changes: Any) -> dict[str, Any]:
    start = BASE_S + number
    return {
        "request_parameters": json.dumps({"rid": f"r-{number}", "sampling_params": {"max_new_tokens": 5}}),
        "id": f"r-{number}",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 64,
        "completion_tokens": 5,
        "cached_tokens": 16,
        "cached_tokens_details": {"device": 16, "host": 0},
        "num_retractions": 0,
        "dp_rank": None,
        "weight_version": "default",
        "e2e_latency": 4.0,
        "queue_time": 1.0,
        "request_received_ts": start,
        "api_server_dispatch_finish_ts": start + 0.25,
        "forward_entry_time": start + 1.375,
        "prefill_finished_time": start + 1.875,
        "first_token_latency": 2.0,
        "response_sent_to_client_ts": start + 2.0,
        "request_finished_ts": start + 4.0,
        "decode_throughput": 2.5,
        **changes,
    }


def test_a_line_of_sglang_has_every_phase(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, read(sglang()))
    known = {"engine": "sglang_record", "context_s": 0.25, "queue_s": 1.0, "prefill_s": 0.5, "first_token_s": 0.125}
    known |= {
        "decode_s": 2.0,
        "cached_tokens": 16,
        "request_id": "r-0",
        "finish_reason": "stop",
        "arrival_unix_ns": at(0),
    }
    assert {
        name: pytest.approx(row[name], abs=1e-6) if isinstance(value, float) else row[name]
        for name, value in known.items()
    } == known


def test_a_scheduler_clock_that_began_with_the_machine_still_tells_the_prefill(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, read(sglang(forward_entry_time=100.0, prefill_finished_time=100.5)))
    assert (row["prefill_s"], row["first_token_s"], row["ttft_s"]) == (0.5, None, 2.0)


def trtllm(request_id: int = 7, begin_s: float = 5000.0, **changes: Any) -> dict[str, Any]:
    timing = {
        "server_arrival_time": begin_s,
        "arrival_time": begin_s + 0.25,
        "first_scheduled_time": begin_s + 1.25,
        "first_token_time": begin_s + 1.75,
        "server_first_token_time": begin_s + 2.0,
        "last_token_time": begin_s + 4.0,
    }
    return {
        "request_id": request_id,
        "perf_metrics": {
            "first_iter": 4,
            "last_iter": 90,
            "timing_metrics": timing | changes,
            "kv_cache_metrics": {"num_new_allocated_blocks": 3, "num_reused_blocks": 1},
        },
    }


def test_answers_of_perf_metrics_are_placed_by_the_time_of_their_file(tmp_path: Path) -> None:
    found = import_bytes(json.dumps([trtllm(7), trtllm(8, 5010.0)]).encode(), "f", PROFILES, modified_unix_ns=at(1000))
    first, second = rows_of(tmp_path, found)
    assert second["finished_unix_ns"] == at(1000)
    assert second["arrival_unix_ns"] - first["arrival_unix_ns"] == 10 * 10**9
    assert (first["context_s"], first["queue_s"], first["prefill_s"], first["first_token_s"]) == (0.25, 1.0, 0.5, 0.25)
    assert "relative_time" in first["quality"]


def test_lines_that_are_placed_together_are_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "perf_metrics.jsonl"
    path.write_text("".join(json.dumps(trtllm(n, 5000.0 + n)) + "\n" for n in range(50)))
    assert [piece.last for piece in pieces.pieces(path, most_bytes=1000)] == [True]


def test_disaggregated_perf_metrics_take_each_time_from_its_own_clock(tmp_path: Path) -> None:
    generation = trtllm(9, 90.0, kv_cache_transfer_start=91.0, kv_cache_transfer_end=91.5)
    (row,) = rows_of(tmp_path, read({"ctx_perf_metrics": trtllm(7), "gen_perf_metrics": generation}))
    assert (row["queue_s"], row["prefill_s"], row["context_s"]) == (1.0, 0.5, 0.75)
    assert row["e2e_s"] == pytest.approx(1.75 + 1.5 + 2.25)


def test_an_answer_of_llama_cpp_has_no_queue(tmp_path: Path) -> None:
    timings = {"cache_n": 16, "prompt_n": 48, "prompt_ms": 500.0, "predicted_n": 5, "predicted_ms": 2000.0}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(BASE_S), "model": "m", "timings": timings}
    (row,) = rows_of(tmp_path, read(answer))
    assert (row["queue_s"], row["prefill_s"], row["decode_s"], row["input_tokens"]) == (None, 0.5, 2.0, 64)
    assert row["finished_unix_ns"] == int(BASE_S) * 10**9


@pytest.mark.parametrize("wrapped", [False, True])
def test_dynamos_trace_and_its_log_records_are_counted_once(tmp_path: Path, wrapped: bool) -> None:
    events = [request_end(), tool_end(), {"schema": "dynamo.request.trace.v1", "event_type": "request_payload"}]
    lines = [{"timestamp": 1, "event": one} if wrapped else one for one in events]
    with bench(tmp_path) as b:
        b.clock.now = START_UNIX_NS + 10**11
        b.journal.append("spans", scan_logs(logs_request(*events).SerializeToString(), START_UNIX_NS).rows)
        b.journal.sync()
        b.run()
        before = b.rows()
        found = read(*lines)
        assert (found.format, found.counts) == ("dynamo-trace", {"good": 3, "bad": 0})
        b.writer.add_import(found)
        assert b.rows() == before
        assert len(before) == 1


def test_rotated_gzip_traces_cut_off_at_the_end_keep_what_is_whole(tmp_path: Path) -> None:
    body = "".join(json.dumps(request_end(request_id=f"r-{n}", padding="x" * 50)) + "\n" for n in range(400)).encode()
    path = tmp_path / "trace.000001.jsonl.gz"
    path.write_bytes(gzip.compress(body, 1)[:-200])
    found = list(pieces.pieces(path, most_bytes=20_000))
    assert len(found) > 2
    assert "damaged gzip" in found[-1].problem and found[-1].last
    assert body.startswith(b"".join(piece.body for piece in found))
    assert all(piece.body.endswith(b"\n") for piece in found)


def test_guidellms_report_gives_the_clients_side_of_each_request() -> None:
    cut_off = guidellm(request_end=BASE_S + 1, first_token_iteration=None) | {"response_id": None}
    never = {"request_id": "q-3", "info": {"timings": {"queued": BASE_S}}}
    groups = {"successful": [guidellm(), guidellm(request_end=None)], "incomplete": [cut_off, never], "errored": []}
    report = {"metadata": {"version": 1}, "args": {"model": "m"}, "benchmarks": [{"requests": groups}]}
    found = import_bytes(json.dumps(report, indent=1).encode(), "benchmarks.json", PROFILES)
    assert (found.format, found.counts) == ("guidellm", {"good": 2, "bad": 1})
    assert "benchmarks[0].requests.successful[1].info.timings.request_end" in found.problems[0]
    assert found.requests is not None
    good, aborted = found.requests.iter_rows(named=True)
    assert (good["entry_e2e_s"], good["entry_ttft_s"], good["entry_tpot_s"]) == pytest.approx((2.75, 0.5, 0.5))
    assert (good["client_request_id"], good["queue_s"], good["arrival_unix_ns"]) == ("chatcmpl-1", None, at(0))
    assert (aborted["outcome"], aborted["entry_ttft_s"], aborted["output_tokens"]) == ("aborted", None, None)


def test_a_result_of_vllm_bench_without_details_says_how_to_get_them() -> None:
    with pytest.raises(InputError, match="--save-detailed"):
        read({"date": "20260102-030405", "completed": 2, "request_throughput": 1.0, "mean_ttft_ms": 5.0})


def test_one_bad_request_of_a_vllm_result_leaves_the_others() -> None:
    lists = {
        "ttfts": [0.1, "x"],
        "itls": [[0.1], []],
        "input_lens": [4, 4],
        "output_lens": [2, 1],
        "start_times": [9.5, 9.6],
    }
    found = read(lists | {"errors": ["", ""], "model_id": "m"})
    assert found.counts == {"good": 1, "bad": 1}
    assert "request 1, ttfts: is 'x'" in found.problems[0]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            sglang(request_received_ts=None),
            "request_received_ts: is None, not Unix seconds (start SGLang with --enable-metrics)",
        ),
        (sglang(e2e_latency="4"), "e2e_latency: is '4', not seconds"),
        ({"request_parameters": "{}"}, "request_received_ts"),
        ("{broken", "is not JSON"),
        ("[" * 100_000, "is not JSON: nested too deep"),
    ],
)
def test_a_bad_record_is_named_by_its_line(bad: Any, says: str) -> None:
    found = read(sglang(0), bad, sglang(1))
    assert found.counts == {"good": 2, "bad": 1}
    assert found.problems[0].startswith("f: line 2")
    assert says in found.problems[0]


def test_nothing_of_a_prompt_is_kept() -> None:
    secret = "the prompt itself"
    answer = {"id": "1", "content": secret, "prompt": secret, "timings": {"prompt_ms": 1.0, "predicted_ms": 1.0}}
    for found in (read(sglang(text=secret, request_parameters=secret)), read(answer), read(request_end(prompt=secret))):
        assert found.spans is not None
        assert secret not in json.dumps(found.spans.to_pylist())


def test_pickled_dumps_are_refused_unread() -> None:
    with pytest.raises(InputError, match="neither text that holds JSON nor an OTLP request"):
        import_bytes(b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.", "dump.pkl", PROFILES)


def framed(*messages: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(one)) + one for one in messages)


def delimited(*messages: bytes) -> bytes:
    found = b""
    for one in messages:
        length = len(one)
        while length > 0x7F:
            found += bytes([length & 0x7F | 0x80])
            length >>= 7
        found += bytes([length]) + one
    return found


def zstd(body: bytes) -> bytes:
    return bytes(pa.compress(body, codec="zstd", asbytes=True))


LOGS = [logs_request(request_end(request_id=f"r-{n}")).SerializeToString() for n in range(3)]
JSON_LINE = json.dumps(
    {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "5b8efff798038103d269b633813fc60c",
                                "spanId": "eee19b7ec3c1b174",
                                "name": "x",
                                "startTimeUnixNano": str(at(0)),
                                "endTimeUnixNano": str(at(1)),
                            }
                        ]
                    }
                ]
            }
        ]
    }
).encode()


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (framed(*LOGS), 3),
        (framed(*map(zstd, LOGS)), 3),
        (framed(zstd(JSON_LINE)), 1),
        (delimited(*LOGS), 3),
        (zstd(framed(*LOGS)), 3),
        (zstd(JSON_LINE + b"\n"), 1),
    ],
    ids=["collector", "collector, zstd", "collector, json and zstd", "specification", "zstd outside", "lines in zstd"],
)
def test_messages_with_their_lengths_in_front(tmp_path: Path, body: bytes, count: int) -> None:
    path = tmp_path / "traces"
    path.write_bytes(body)
    parts = list(pieces.pieces(path, most_bytes=700))
    spans = [import_bytes(one.body, "f", PROFILES, modified_unix_ns=at(9)).spans for one in parts]
    assert sum(table.num_rows for table in spans if table is not None) == count
    assert parts[-1].last
    whole = import_file(path, PROFILES)
    assert whole.spans is not None and whole.spans.num_rows == count


def test_a_broken_message_is_named_and_the_others_stay() -> None:
    found = import_bytes(framed(LOGS[0], b"\x0a\xff\xff\xff", LOGS[1]), "f", PROFILES)
    assert found.counts == {"good": 2, "bad": 1}
    assert found.problems[0].startswith("f: message 2")


def test_a_piece_that_holds_nothing_is_a_problem_and_no_end() -> None:
    found = import_piece(b"{broken\n{also\n", "f", PROFILES, modified_unix_ns=1, received_unix_ns=1, first_number=40)
    assert (found.kind, found.counts) == ("nothing", {"good": 0, "bad": 2})
    assert "line 40" in found.problems[0]


def test_a_page_of_metrics_is_a_scrape_at_the_time_of_its_file() -> None:
    page = b"# HELP vllm:num_requests_running Number.\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n"
    found = import_bytes(page, "metrics.txt", PROFILES, modified_unix_ns=at(5))
    assert found.format == "prometheus-text"
    assert [one.samples["unix_ns"].item() for one in found.samples] == [at(5)]
