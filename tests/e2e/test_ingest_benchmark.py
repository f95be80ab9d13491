"""The benchmark of the receiving side on a small load: every figure is there, and what was acknowledged was counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import ingest
from benchmarks.ingest_analysis import fill
from benchmarks.ingest_load import Load
from benchmarks.ingest_spans import SPANS_PER_REQUEST, Batch, Shape, Template
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from phasewise.collector.store import Store

NOW_UNIX_NS = 1_796_000_000_000_000_000
MEASURED = (
    "scan_spans_per_s durable_spans_per_s indexed_per_cpu_s_8 indexed_per_cpu_s_1 backlog_drain_s ack_p50_ms ack_p99_ms "
    "visible_p99_s visible_p99_at_half_rate_s receive_rss_mb store_rss_mb"
).split()
PEERS = ("rotel_spans_per_cpu_s", "phoenix_stored_spans_per_cpu_s")


@pytest.mark.parametrize("shape", SPANS_PER_REQUEST)
def test_a_body_is_new_each_time_and_its_trees_stay_whole(shape: Shape) -> None:
    batch = Batch(Template(shape, 1, 64), 7, 1)
    seen: set[bytes] = set()
    for at in (NOW_UNIX_NS, NOW_UNIX_NS + 5):
        (group,) = ExportTraceServiceRequest.FromString(batch.unique(at)).resource_spans
        spans = group.scope_spans[0].spans
        names = {a.key: a.value.string_value for a in group.resource.attributes}
        assert names["service.instance.id"] == "replica-007"
        assert len(spans) == batch.spans == 64
        assert max(span.end_time_unix_nano for span in spans) == at
        roots = {span.span_id: span for span in spans if not span.parent_span_id}
        assert len(roots) == batch.requests == 64 // SPANS_PER_REQUEST[shape]
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            assert sum(attribute.key.startswith("site.extra_") for attribute in span.attributes) == 3
            if span.parent_span_id:
                parent = by_id[span.parent_span_id]
                assert parent.trace_id == span.trace_id
                assert parent.start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= parent.end_time_unix_nano
            else:
                named = {attribute.key: attribute.value.string_value for attribute in span.attributes}
                assert named["gen_ai.request.id"] == span.trace_id.hex()
        assert not seen & by_id.keys()
        seen |= by_id.keys()


def test_a_load_with_a_rate_spreads_its_bodies_over_the_connections() -> None:
    load = Load(0, 1.0, connections=4, rate_spans_per_s=512.0)
    due = sorted(load.due_s(connection, body, 64) for connection in range(4) for body in range(3))
    assert due == [n / 8 for n in range(12)]
    assert Load(0, 1.0).due_s(3, 100, 64) == 0.0


def test_a_store_is_filled_with_as_many_requests_as_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, 250, drawn=100)
    with Store(tmp_path / "phasewise.duckdb") as store:
        (row,) = store.query(
            "SELECT count(DISTINCT request_key) AS n, count(DISTINCT finished_unix_ns) AS ends FROM requests"
        ).rows()
    assert row == (250, 250)


@pytest.mark.slow
@pytest.mark.live
def test_a_small_run_has_every_figure_and_balances(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--seconds", "2", "--connections", "4", "--limit-spans", "6144", "--rate", "3000"]
    assert ingest.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["benchmark"] == "ingest"
    assert all(told[name] > 0 for name in MEASURED), told
    assert all(told[name] is None for name in PEERS)
    assert told["acknowledged_spans"] >= 2 * 6144
    assert told["missing_spans"] == 0
    assert {"cpu", "cores", "versions"} <= told.keys()
