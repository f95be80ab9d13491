"""The writer: settle, once and only once, late spans, crash, watermark, attribution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from span_tables import at, span_table
from writing import NOW, SLICES, Clock, bench, each, engine_span, plain_attribute, stand_still, traces

from phasewise.collector.context import Context
from phasewise.collector.exposition import read_exposition
from phasewise.collector.normalize import Normalized, normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import METRIC_SCHEMA, Annotation


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)


def test_a_request_of_one_span_is_a_row_in_the_next_step(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        assert b.run() == 1
        (row,) = b.rows()
        assert (row["queue_s"], row["engine"], row["instance"], row["outcome"]) == (0.25, "vllm_v1", "i-1", "ok")
        assert (row["primary_class"], row["final"], row["revision"]) == ("queueing", False, 0)
        (instance,) = b.rows("SELECT * FROM instances")
        assert (instance["instance"], instance["kind"], instance["engine"]) == ("i-1", "spans", "vllm_v1")


def test_a_resend_changes_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(3))
        b.run()
        before = b.rows()
        b.receive(traces(3))
        b.receive(list(reversed(traces(3))))
        b.run(0.5)
        assert b.rows() == before
        assert b.counter("duplicate_spans") == 6
        assert b.counter("conflicting_duplicate") == 0


def test_a_resend_after_a_restart_changes_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(3))
        b.run()
        before = b.rows()
        b.reopen()
        b.receive(traces(3))
        b.run(0.5)
        assert b.rows() == before


def test_the_first_of_two_different_copies_wins_and_is_counted(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.run()
        b.receive([engine_span(attributes={"gen_ai.latency.time_in_queue": 9.0})])
        b.run(0.5)
        assert [row["queue_s"] for row in b.rows()] == [0.25]
        assert b.counter("conflicting_duplicate") == 1


def test_a_crash_replays_exactly_once(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        whole = span_table(SLICES, received_unix_ns=b.clock.now)
        b.journal.append("spans", whole.slice(0, 2))
        b.receive(traces(2))
        b.run()
        b.reopen()  # the tree was read and had not settled
        b.journal.append("spans", whole.slice(2))
        b.journal.sync()
        b.run(1.5)
        assert sorted(row["engine"] for row in b.rows()) == ["sglang", "vllm_v1", "vllm_v1"]
        assert [row["decode_s"] for row in b.rows() if row["engine"] == "sglang"] == [1.0]
        assert b.counter("spans") == 6
        assert b.counter("requests") == 3


def test_a_failed_pass_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(2))
        monkeypatch.setattr("phasewise.collector.row_writer.changes_of", _fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            b.writer.step()
        assert b.rows() == []
        assert b.rows("SELECT * FROM span_ledger") == []
        monkeypatch.undo()
        b.run()
        assert len(b.rows()) == 2
        assert b.counter("duplicate_spans") == 0


def _fails(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_rows_are_final_once_the_watermark_has_passed(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(1))
        b.run()
        assert [row["final"] for row in b.rows()] == [False]
        b.receive([engine_span(start_s=300.0)], "f" * 32)
        b.run(0.6)
        rows = b.rows()
        assert [row["final"] for row in rows] == [True, False]
        assert rows[0]["revision"] == 1
        b.run(61)  # nothing came for W
        assert [row["final"] for row in b.rows()] == [True, True]


def test_a_late_row_attributes_its_neighbours_anew(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span(start_s=0.0)], "1" * 32)
        b.run()
        b.run(61)
        (row,) = b.rows()
        assert (row["final"], row["concurrency_at_arrival"], row["revision"]) == (True, 1, 1)
        b.receive([engine_span(start_s=1.0)], "2" * 32)
        b.run(1)
        first, _ = b.rows()
        assert (first["final"], first["concurrency_at_arrival"], first["revision"]) == (True, 2, 2)


def test_a_failing_attribution_loses_no_rows(tmp_path: Path) -> None:
    broken = True

    def attribute(context: Context) -> pl.DataFrame:
        if broken:
            raise ValueError("no such luck")
        return plain_attribute(context)

    with bench(tmp_path, attribute=each(attribute)) as b:
        b.receive(traces(2))
        b.run()
        assert [row["primary_class"] for row in b.rows()] == [None, None]
        assert b.writer.health()["attribution_error"] == "ValueError: no such luck"
        broken = False
        b.run(61)
        assert [row["primary_class"] for row in b.rows()] == ["queueing", "queueing"]


def test_attribution_sees_whole_hours_and_only_its_instance(tmp_path: Path) -> None:
    seen: list[Context] = []

    def attribute(context: Context) -> pl.DataFrame:
        seen.append(context)
        return plain_attribute(context)

    other: dict[str, Any] = {"resource": {"service.instance.id": "i-2"}}
    with bench(tmp_path, attribute=each(attribute)) as b:
        b.receive([engine_span(start_s=-1800, trace="1" * 32), engine_span(start_s=-9000, trace="2" * 32)])
        b.receive([engine_span(start_s=0, trace="3" * 32), engine_span(start_s=0, trace="4" * 32, **other)])
        b.run()
        b.run(1)
        assert {context.instance for context in seen} == {"i-1", "i-2"}
        b.receive([engine_span(start_s=1, trace="5" * 32)])
        b.run()
        last = seen[-1]
        assert (last.instance, last.requests.height) == ("i-1", 3)  # not the one 2.5 h before


def test_steps_events_and_unknown_spans(tmp_path: Path) -> None:
    steps = {
        f"phasewise.step.{name}": [1, 2] for name in ("start_unix_ns", "duration_ns", "prefill_tokens", "decode_seqs")
    }
    spans = [
        {"name": "engine.steps", "scope": "phasewise.engine", "start_s": 0, "end_s": 1,
         "attributes": {"phasewise.step.first": 5, **steps}},
        {"name": "Load weights", "scope": "vllm.x", "kind": 1, "start_s": 0, "end_s": 68,
         "resource": {"vllm.instrumenting_module_name": "vllm.worker"}},
        {"name": "job 17", "scope": "acme", "start_s": 0, "end_s": 1},
    ]  # fmt: skip
    with bench(tmp_path) as b:
        b.receive(spans)
        b.run()
        b.receive(spans)
        b.run(1.5)
        assert b.rows() == []
        assert [row["step"] for row in b.rows("SELECT * FROM engine_steps ORDER BY step")] == [5, 6]
        (mark,) = b.rows("SELECT * FROM annotations")
        assert (mark["kind"], mark["text"]) == ("startup", "Load weights: 68 s")
        assert b.writer.health()["unmapped"] == {"acme / job #": 1}


def test_a_supplement_fills_the_row_of_its_request(tmp_path: Path) -> None:
    extra = {
        "name": "llm_request", "scope": "phasewise.engine", "start_s": 0, "end_s": 2,
        "attributes": {"phasewise.supplement": True, "gen_ai.request.id": "r-1", "phasewise.preemptions": 2},
    }  # fmt: skip
    with bench(tmp_path) as b:
        b.receive([extra], "1" * 32)
        b.run(1.5)
        assert b.rows() == []
        b.receive([engine_span(attributes={"gen_ai.request.id": "r-1"})], "2" * 32)
        b.run()
        (row,) = b.rows()
        assert (row["engine"], row["preemptions"], row["queue_s"]) == ("vllm_v1", 2, 0.25)
        assert b.rows("SELECT * FROM supplements") == []


def test_sequences_of_one_call_share_its_key(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        same: dict[str, Any] = {"attributes": {"gen_ai.request.id": "chatcmpl-1"}}
        b.receive([engine_span(trace=f"{i + 1:032x}", **same) for i in range(2)])
        b.run()
        keys = {row["call_key"] for row in b.rows()}
        assert len(b.rows()) == 2
        assert keys == {f"i-1/chatcmpl-1/{at(0)}"}


def test_an_import_is_final_and_attributed_when_it_returns(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        assert b.writer.add_spans(span_table(traces(3))) == 3
        assert [(row["final"], row["primary_class"]) for row in b.rows()] == [(True, "queueing")] * 3
        assert b.rows("SELECT sum(requests) AS n FROM rollups WHERE width_s = 60") == [{"n": 3}]
        assert b.writer.add_spans(span_table(traces(3))) == 0
        assert len(b.rows()) == 3


def test_an_import_in_pieces_counts_each_request_once(tmp_path: Path) -> None:
    """Whether a piece completes a request of one before, or is told of its neighbours anew."""
    client = {
        "name": "chat m",
        "kind": 3,
        "start_s": -0.1,
        "end_s": 2.1,
        "attributes": {"gen_ai.operation.name": "chat"},
    }
    pieces = [engine_span(trace="a" * 32), {**client, "trace": "a" * 32}, engine_span(start_s=1.0, trace="b" * 32)]
    with bench(tmp_path) as b:
        told = [b.writer.add_spans(span_table([{**one, "span_id": f"{n:016x}"}])) for n, one in enumerate(pieces, 1)]
        assert sum(told) == len(b.rows())


def test_rollups_follow_the_rows(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(3))
        b.run()
        b.run(6)
        (rollup,) = b.rows("SELECT * FROM rollups WHERE width_s = 60")
        assert (rollup["requests"], rollup["e2e_ns"], rollup["queue_ns"]) == (3, 6 * 10**9, 750_000_000)
        b.receive([engine_span(start_s=0.5)], "f" * 32)
        b.run(6)
        (rollup,) = b.rows(
            "SELECT requests, list_sum(map_values(e2e_histogram)) AS counted FROM rollups WHERE width_s = 60"
        )
        assert rollup == {"requests": 4, "counted": 4}
        by_width = b.rows(
            "SELECT width_s, sum(requests) AS n, sum(e2e_ns)::BIGINT AS ns FROM rollups GROUP BY 1 ORDER BY 1"
        )
        assert [row["width_s"] for row in by_width] == [10, 60, 3600]
        assert len({(row["n"], row["ns"]) for row in by_width}) == 1


def test_a_trace_that_holds_every_request_stays_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.collector.ledger.CROWDED_SPANS", 3)
    with bench(tmp_path) as b:
        for i in range(6):
            b.receive([engine_span(start_s=float(i), span_id=f"{i + 1:016x}")])
            b.run(0.5)
        assert len(b.rows()) == 6
        assert b.writer.health()["open_spans"] == 0


def test_scrapes_nobody_can_place_are_kept_and_used_by_nothing(tmp_path: Path) -> None:
    text = "vllm:num_requests_running 1\nprocess_start_time_seconds 1.7e9\n"
    other: dict[str, Any] = {"resource": {"service.instance.id": "i-2"}}
    with bench(tmp_path) as b:
        b.receive([engine_span(trace="1" * 32), engine_span(trace="2" * 32, **other)])
        b.run()
        for second in range(3):
            read = read_exposition(text, at(second), b.writer._profiles, source="import")
            assert read is not None
            b.writer.add_samples([read])
        assert b.rows("SELECT DISTINCT joined FROM engine_samples") == [{"joined": False}]
        assert b.writer.health()["unjoined_samples"] == 3
        b.reopen()
        assert b.rows("SELECT joined_to FROM instances") == [{"joined_to": None}] * 3


def test_a_trace_that_cannot_be_read_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(spans: pl.DataFrame, profiles: Profiles) -> Normalized:
        if (spans["trace_id"] == f"{2:032x}").any():
            raise ValueError("never seen such a thing")
        return normalize(spans, profiles)

    monkeypatch.setattr("phasewise.collector.assembly.normalize", picky)
    with bench(tmp_path) as b:
        b.receive(traces(3))
        b.run()
        assert [row["trace_id"] for row in b.rows()] == [f"{1:032x}", f"{3:032x}"]
        assert b.counter("broken_traces") == 1


def test_metrics_pushed_by_the_engine_are_samples_of_its_own_replica(tmp_path: Path) -> None:
    point = {
        **dict.fromkeys(METRIC_SCHEMA.names), "name": "vllm:num_requests_running", "kind": "gauge", "unix_ns": at(1), "value": 3.0,
        "resource": '{"service.instance.id":"i-1","service.name":"engine"}', "attributes": '{"model_name":"m"}', "received_unix_ns": NOW,
    }  # fmt: skip
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.journal.append("metrics", pa.Table.from_pylist([point, {**point, "name": "other"}], schema=METRIC_SCHEMA))
        b.journal.sync()
        b.run()
        (sample,) = b.rows("SELECT * FROM engine_samples")
        assert (sample["instance"], sample["running"], sample["source"]) == ("i-1", 3.0, "otlp")
        b.run(1)
        (row,) = b.rows()
        assert row["model"] == "m"
        assert json.loads(row["provenance"])["model"] == "inferred:samples"
        assert b.rows("SELECT joined_by FROM instances WHERE kind = 'spans'") == [{"joined_by": "resource"}]
        assert b.counter("unmapped_metric_points") == 1


def test_health_balances(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(traces(3))
        b.receive(traces(3))
        b.run()
        health = b.writer.health()
        assert health["counters"] == {"spans": 3, "duplicate_spans": 3, "requests": 3}
        journal = health["journal"]
        assert isinstance(journal, dict)
        assert journal["lag_bytes"] == 0
        assert json.dumps(health)


def test_marks_come_once(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        mark = Annotation(unix_ns=at(1), kind="deploy", text="v2")
        b.writer.annotate([mark, mark])
        b.writer.annotate([mark])
        assert len(b.rows("SELECT * FROM annotations")) == 1


def test_order_of_receipt_does_not_change_the_rows(tmp_path: Path) -> None:
    results = []
    for name, order in (("a", 1), ("b", -1)):
        with bench(tmp_path / name, clock=Clock()) as b:
            for span in traces(5)[::order]:
                b.receive([span])
                b.run(0.1)
            b.run(61)
            results.append(
                b.store.query(
                    "SELECT * EXCLUDE (received_unix_ns, revision, span_id, request_key) FROM requests ORDER BY trace_id"
                )
            )
    assert results[0].equals(results[1])
