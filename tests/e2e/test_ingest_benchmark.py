"""The benchmark of the receiving side on a small load: every figure is there, and what was acknowledged was counted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks import ingest, ingest_analysis
from benchmarks.ingest_analysis import Asked, Window, fill
from benchmarks.ingest_figures import FIGURES, missed, named, table, worst
from benchmarks.ingest_load import Load
from benchmarks.ingest_peers import ROTEL, peers
from benchmarks.ingest_server import Measured, Probe
from benchmarks.ingest_spans import SPANS_PER_REQUEST, Batch, Shape, Template
from local_http import answering
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import Served
from waiting import until

from phasewise.collector.store import Store

NOW_UNIX_NS = 1_796_000_000_000_000_000
MEASURED = (
    "scan_spans_per_s durable_spans_per_s indexed_per_cpu_s_8 indexed_per_cpu_s_1 backlog_drain_s ack_p50_ms ack_p99_ms "
    "visible_p99_s visible_p99_s_1 visible_p99_at_half_rate_s receive_rss_mb store_rss_mb"
).split()
ANALYSIS = ("analysis_requests", "analysis_s", "ack_p99_during_analysis_ms")
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
    window = Window(NOW_UNIX_NS, NOW_UNIX_NS + 3600 * 10**9)
    fill(tmp_path, 250, window, drawn=100)
    with Store(tmp_path / "phasewise.duckdb") as store:
        (row,) = store.query(
            "SELECT count(DISTINCT request_key) AS n, count(DISTINCT finished_unix_ns) AS ends FROM requests"
        ).rows()
    assert row == (250, 250)


def test_stored_requests_have_finished_within_the_window(tmp_path: Path) -> None:
    window = Window.before(NOW_UNIX_NS, hours=0.5)
    assert window.last_unix_ns - window.first_unix_ns == 1800 * 10**9
    fill(tmp_path, 250, window, drawn=20)
    with Store(tmp_path / "phasewise.duckdb") as store:
        (row,) = store.query("SELECT min(arrival_unix_ns), max(finished_unix_ns) FROM requests").rows()
    assert window.first_unix_ns <= row[0] < row[1] < window.last_unix_ns == NOW_UNIX_NS
    assert row[1] - row[0] > 1500 * 10**9


def test_an_answer_that_is_an_error_is_told_with_its_status_and_first_line() -> None:
    refusal = (400, '{"error": "too much"}\nand more')
    with answering(lambda path, _: (200, {"requests": 7}) if path == "/ok" else refusal) as served:
        server = cast(Measured, SimpleNamespace(served=SimpleNamespace(url=served.url)))
        asked = Asked(Window(10, 20))
        assert asked.ask(server, "/ok", [("by", "model")]) == {"requests": 7}
        assert asked.ask(server, "/refused") == {}
    assert served.of("/ok")[0].query == {"from": "10", "to": "20", "by": "model"}
    assert served.of("/ok")[0].headers["Prefer"] == "wait=120"
    assert asked.failed == ['/refused: HTTP 400 {"error": "too much"}'] and list(asked.seconds) == ["/ok"]
    assert asked.ask(server, "/nobody") == {} and len(asked.failed) == 2


@pytest.mark.parametrize(("status", "told"), [(404, []), (503, []), (500, ["a probe was looked for: HTTP 500 broken"])])
def test_a_row_is_seen_only_in_an_answer_and_an_error_is_told(status: int, told: list[str]) -> None:
    answers = iter([(status, "broken"), (status, "broken"), (200, {})])
    with answering(lambda *_: next(answers)) as local:
        served = Served(cast(Any, None), Path(), {"url": local.url}, Path())
        probe = Probe(Measured(served, 0, 0), Template("tree", 1, 8))
        probe.waiting.append(("r-1", 0.0))
        looking = threading.Thread(target=probe._look, daemon=True)
        looking.start()
        until(lambda: not probe.waiting, 30)
        probe._ended.set()
        looking.join()
    assert len(local.asked) == 3 and len(probe.seen_s) == 1 and probe.failed == told


def test_every_floor_is_met_or_missed_and_what_nobody_measured_neither() -> None:
    floors = {figure.name: figure for figure in FIGURES if figure.least is not None or figure.most is not None}
    assert [name for name in floors if name != ANALYSIS[-1]] == MEASURED
    assert missed({}) == [] and set(named({}).values()) == {None}
    met = {name: figure.least or figure.most for name, figure in floors.items()}
    assert missed(met) == []
    for name, figure in floors.items():
        worse = figure.least - 1 if figure.least is not None else (figure.most or 0.0) + 1
        for value in (worse, None):
            assert missed(met | {name: value}) == [name]
            lines = list(table(met | {name: value}))
            assert [line.split()[1] for line in lines if line.startswith("MISSED")] == [f"{name}:"]
    assert [line.split()[0] for line in table({})] == ["figure", *named({})]
    assert worst([1.0, 3.0, 2.0]) == 3.0 and worst([1.0, None]) is None


@pytest.mark.parametrize(
    ("figures", "failures", "status"),
    [
        ({"analysis_s": 2.0, "ack_p99_during_analysis_ms": 999.0}, [], 0),
        ({"analysis_s": 2.0, "ack_p99_during_analysis_ms": 1001.0}, [], 1),
        ({"analysis_s": 2.0, "ack_p99_during_analysis_ms": None}, [], 1),
        ({"analysis_s": None, "ack_p99_during_analysis_ms": 9.0}, ["not answered: /api/v1/verdict: HTTP 503 busy"], 1),
    ],
)
def test_a_missed_floor_and_an_unfinished_analysis_are_exit_code_1(
    figures: dict[str, float | None],
    failures: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ingest, "during_analysis", lambda *_: (figures, failures))
    assert ingest.main(["--analysis-only", "--json"]) == status
    printed = capsys.readouterr().out
    assert all(f"FAILED {failure}" in printed for failure in failures)
    told = json.loads(printed.splitlines()[-1])
    assert told["failures"] == failures
    assert told["missed"] == (["ack_p99_during_analysis_ms"] if status and not failures else [])


def test_a_peer_that_is_not_installed_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEWISE_BENCH_CACHE", str(tmp_path / "cache"))
    found, absent = peers(tmp_path, 1.0, install=False)
    assert found == {} and not (tmp_path / "cache").exists()
    # One that is there is used without --peers; this one holds no program.
    (tmp_path / "cache" / "rotel").mkdir(parents=True)
    (tmp_path / "cache" / "rotel" / "installed").write_text(ROTEL)
    assert "holds no program for this machine" in peers(tmp_path, 1.0, install=False)[1][0]
    for name, line in zip(PEERS, absent, strict=True):
        assert line.startswith(f"{name}: not measured") and "--peers" in line and str(tmp_path / "cache") in line


@pytest.mark.slow
@pytest.mark.live
def test_a_small_run_has_every_figure_and_balances(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--seconds", "2", "--connections", "4", "--limit-spans", "6144", "--rate", "3000"]
    status = ingest.main([*arguments, "--peers", "none"])
    *_, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert told["benchmark"] == "ingest"
    assert all(told[name] > 0 for name in MEASURED), told
    assert all(told[name] is None for name in (*PEERS, *ANALYSIS))
    assert told["acknowledged_spans"] >= 2 * 6144
    assert told["missing_spans"] == 0 and told["failures"] == []
    # So small a load says nothing about a rate; whatever it misses is told.
    assert status == (1 if told["missed"] else 0)
    assert told["missed"] == missed({name: told[name] for name in MEASURED})
    assert {"cpu", "cores", "versions"} <= told.keys()


@pytest.mark.slow
@pytest.mark.live
def test_a_small_analysis_is_about_all_stored_requests(capsys: pytest.CaptureFixture[str]) -> None:
    status = ingest.main(["--analysis-only", "--requests", "3000", "--json"])
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert told["failures"] == []
    assert all(told[name] > 0 for name in ANALYSIS), told
    assert all(told[name] is None for name in MEASURED)
    assert status == (1 if told["missed"] else 0), printed
    for path in ("verdict", "slices", "differences", "timeline"):
        assert f"/api/v1/{path}: " in printed


@pytest.mark.slow
@pytest.mark.live
def test_an_analysis_that_does_not_finish_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_analysis, "_DIMENSIONS", ("no_such_dimension",))
    assert ingest.main(["--analysis-only", "--requests", "50", "--json"]) == 1
    printed = capsys.readouterr().out
    assert "/api/v1/slices: HTTP 400 {" in printed and "no_such_dimension" in printed
    told = json.loads(printed.splitlines()[-1])
    assert told["analysis_s"] is None and len(told["failures"]) == 2
