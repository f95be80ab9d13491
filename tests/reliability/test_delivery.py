"""F10 to F14: delivered twice, in another order, late, split over midnight, by clocks that disagree: the same result."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from call_trees import body, tree
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_messages import trace_request
from serving import phasewise, serving
from span_ledger import Ledger, Sender, assert_account, request_body, settle
from span_tables import at
from writing import NOW, SECOND, Bench, bench, engine_span, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.requests import ATTRIBUTED
from phasewise.collector.scan import scan_traces

SAME = ("status", "objective", "requests", "refused", "aborted")
EVERYTHING = ("--from", "0", "--to", "4102444800")


def batches(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    for first in range(0, len(spans), size):
        yield list(spans[first : first + size])


@pytest.mark.slow
@pytest.mark.live
def test_resends_over_both_transports_and_a_restart_change_nothing(tmp_path: Path) -> None:
    """F10: each request one to five times, at once over gRPC and HTTP, batched anew as a Collector would, before and after a
    restart: the same verdict to the byte, each span once, and the duplicates counted."""
    draw = random.Random(20261130)
    began = time.time_ns() - 60 * 10**9
    spans = [span for number in range(200) for span in tree(number, began + number * 10**8)]
    with serving(tmp_path / "once") as server:
        for batch in batches(spans, 32):
            server.send_traces(body(batch))
        server.verdict(200)
        server.stop()
    ledger = Ledger()
    sent = 0
    for _ in range(2):
        with serving(tmp_path / "often") as server:
            ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
            senders = [Sender(ledger, lambda p=port: p, name) for name, port in ports.items()]  # type: ignore[misc, arg-type]
            work = []
            for size in (7, 32, 50):
                for batch in batches(spans, size):
                    work += [(draw.choice(senders), batch) for _ in range(draw.randint(1, 2))]
            draw.shuffle(work)
            with ThreadPoolExecutor(8) as pool:
                answers = pool.map(lambda item: item[0].send(body(item[1]), [s.span_id.hex() for s in item[1]]), work)
                assert set(answers) == {"acknowledged"}
            sent += sum(len(batch) for _, batch in work)
            server.verdict(200)
            server.stop()
    told: dict[str, dict[str, Any]] = {}
    for name in ("once", "often"):
        settle(tmp_path / name, later_s=700.0)  # no row is provisional any more
        verdict = json.loads(phasewise("analyze", "--data", tmp_path / name, *EVERYTHING, "--json").stdout)
        with bench_of(tmp_path / name) as b:
            told[name] = {key: verdict[key] for key in SAME} | {"rows": rows_of(b, *ATTRIBUTED)}
    assert told["once"]["requests"] == 200
    assert told["once"] == told["often"]
    health = counters_of(tmp_path / "often")
    assert (health["spans"], health["duplicate_spans"]) == (400, sent - 400)
    assert "conflicting_duplicate" not in health


def counters_of(data: Path) -> dict[str, Any]:
    with bench_of(data) as b:
        counters = b.writer.health()["counters"]
        assert isinstance(counters, dict)
        return counters


def bench_of(data: Path) -> Any:
    return bench(data, attribute=attributor(rulebook()))


def test_the_first_copy_of_a_span_wins_across_a_restart(tmp_path: Path) -> None:
    """F11."""
    with bench(tmp_path) as b:
        b.receive([engine_span(e2e_s=2.0)])
        b.run(1.5)
        b.reopen()
        b.receive([engine_span(e2e_s=3.0)])
        b.receive([engine_span(e2e_s=2.0)])
        b.run(1.5)
        (row,) = b.rows()
        assert row["e2e_s"] == 2.0
        assert (b.counter("conflicting_duplicate"), b.counter("duplicate_spans"), b.counter("spans")) == (1, 1, 1)


def rows_of(b: Bench, *without: str) -> list[dict[str, Any]]:
    """All requests, but when they came and how often they were written."""
    left_out = ", ".join(dict.fromkeys(("received_unix_ns", "revision", *without)))
    return b.rows(f"SELECT * EXCLUDE ({left_out}) FROM requests ORDER BY request_key")


def story(b: Bench) -> dict[str, list[dict[str, Any]]]:
    """What must not depend on when something came."""
    return {
        "rows": rows_of(b),
        "turns": b.rows("SELECT * FROM turns ORDER BY turn_key"),
        "rollups": b.rows("SELECT * FROM rollups ORDER BY ALL"),
    }


def settled(folder: Path, order: Sequence[tuple[float, Span]]) -> dict[str, list[dict[str, Any]]]:
    """Spans received after their delay in seconds, and all that is made of them in the end."""
    with bench(folder, attribute=attributor(rulebook())) as b:
        began = b.clock.now
        for delay_s, span in order:
            b.clock.now = max(b.clock.now, began + round(delay_s * SECOND))
            b.journal.append("spans", scan_traces(body([span]), b.clock.now).rows)
            if random.random() < 0.2:
                b.journal.sync()
                b.writer.step()
        b.journal.sync()
        for _ in range(6):
            b.run(700.0)
        return story(b)


@pytest.mark.slow
def test_late_and_shuffled_spans_end_in_the_same_rows(tmp_path: Path) -> None:
    """F12: children before parents, delays from nothing to two days."""
    random.seed(7)
    spans = [span for number in range(60) for span in tree(number, NOW - 600 * SECOND + number * 10**8)]
    in_order = settled(tmp_path / "sorted", [(0.0, span) for span in spans])
    late = [(random.choice((0.0, 0.0, 1.5, 30.0, 400.0, 7200.0, 172_800.0)) * random.random(), span) for span in spans]
    shuffled = settled(tmp_path / "shuffled", sorted(late, key=lambda item: item[0]))
    assert len(in_order["rows"]) == 60
    assert shuffled == in_order


def test_a_trace_over_midnight_is_one(tmp_path: Path) -> None:
    """F13: both sides of midnight UTC, received in different hours."""
    midnight = (NOW // (86_400 * SECOND)) * 86_400 * SECOND
    outer, inner = tree(3, midnight - SECOND // 2)
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.clock.now = midnight + SECOND
        b.journal.append("spans", scan_traces(body([inner]), b.clock.now).rows)
        b.journal.sync()
        b.run(3700.0)
        b.journal.append("spans", scan_traces(body([outer]), b.clock.now).rows)
        b.journal.sync()
        b.run(3700.0)
        (row,) = b.rows()
        assert row["entry_e2e_s"] == pytest.approx(row["e2e_s"] + 0.01)


@pytest.mark.parametrize("ahead_s", [0.008, 0.017, 5.0, 3600.0, -5.0, -3600.0])
def test_a_clock_that_is_off_changes_no_duration(tmp_path: Path, ahead_s: float) -> None:
    """F14: the engine's host is ahead of the client's: raw times stay, durations are those of their own clock."""
    outer, inner = tree(5, NOW - 7200 * SECOND)
    true = inner.end_time_unix_nano - inner.start_time_unix_nano
    inner.start_time_unix_nano += round(ahead_s * 1e9)
    inner.end_time_unix_nano += round(ahead_s * 1e9)
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        for host, span in (("a", outer), ("b", inner)):
            made = trace_request(span, resource={"service.name": "x", "host.name": host}).SerializeToString()
            b.journal.append("spans", scan_traces(made, b.clock.now).rows)
        b.journal.sync()
        b.run(700.0)
        (row,) = b.rows()
        assert row["arrival_unix_ns"] == inner.start_time_unix_nano
        assert row["e2e_s"] == pytest.approx(true / 1e9)
        assert row["entry_e2e_s"] == pytest.approx(true / 1e9 + 0.01)
        flagged = "clock_skew" in (row["quality"] or "")
        # It starts before its parent, or ends over 5 ms after it although it is shorter: what is between may be a slow network.
        assert flagged == (ahead_s < -0.006 or ahead_s > 0.009)


@pytest.mark.parametrize(("year_s", "kept"), [(0, True), (4_070_908_800, True)])
def test_spans_of_1970_and_2099_are_kept_and_hurt_nobody(tmp_path: Path, year_s: int, kept: bool) -> None:
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.receive([engine_span()])
        strange = tree(9, year_s * SECOND + SECOND)[1]
        b.journal.append("spans", scan_traces(body([strange]), b.clock.now).rows)
        b.journal.sync()
        b.run(1.5)
        b.run(700.0)
        rows = b.rows()
        assert len(rows) == 1 + kept
        near = next(row for row in rows if row["arrival_unix_ns"] == at(0.0))
        assert near["final"] is True
        health = b.writer.health()
        assert all(mark < NOW + 1000 * SECOND for mark in health["watermarks"].values())  # type: ignore[attr-defined]
        future = year_s > NOW // SECOND
        buckets = {row["bucket_unix_ns"] for row in b.rows("SELECT DISTINCT bucket_unix_ns FROM rollups")}
        assert not (future and any(bucket > NOW + 700 * SECOND for bucket in buckets))


@pytest.mark.slow
@pytest.mark.live
def test_an_account_over_transports(tmp_path: Path) -> None:
    """The ledger itself: what it calls acknowledged is in the store."""
    ledger = Ledger()
    with serving(tmp_path / "data") as server:
        for name, port in (("grpc", server.ready["otlp_grpc_port"]), ("http", server.ready["otlp_http_port"])):
            sender = Sender(ledger, lambda p=port: p, name)  # type: ignore[misc, arg-type]
            for _ in range(5):
                assert sender.send(*request_body(10)) == "acknowledged"
        server.stop()
    assert assert_account(tmp_path / "data", ledger)["spans"] == 100
