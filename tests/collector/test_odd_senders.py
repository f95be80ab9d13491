"""Senders that count, clock and link in ways of their own: what can be told beyond doubt is told, the rest is unknown and flagged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from span_tables import span_frame
from writing import NOW, SECOND, bench, engine_span, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.archive import SpanArchive
from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)
USAGE = "gen_ai.usage."


def rows_of(*spans: dict[str, Any]) -> list[dict[str, Any]]:
    return list(normalize(span_frame(spans), PROFILES).requests.iter_rows(named=True))


def row_of(*spans: dict[str, Any]) -> dict[str, Any]:
    (row,) = rows_of(*spans)
    return row


def chat(end_s: float = 3.0, **changes: Any) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": "chat", **changes.pop("attributes", {})}
    return {"name": "chat m", "kind": 3, "start_s": 0.0, "end_s": end_s, "attributes": attributes, **changes}


def flags(row: dict[str, Any]) -> list[str]:
    return list(json.loads(row["quality"] or "[]"))


def test_more_cached_tokens_than_input_are_counted_apart_by_a_client_and_unknown_of_an_engine() -> None:
    told = {USAGE + "input_tokens": 5, USAGE + "cache_read.input_tokens": 100}
    row = row_of(chat(attributes=told))
    assert (row["input_tokens"], row["cached_tokens"], flags(row)) == (105, 100, ["cached_apart"])
    sglang = {"name": " Req 1", "scope": "sglang server", "kind": 1, "start_s": 0, "end_s": 3,
              "attributes": {USAGE + "prompt_tokens": 5, USAGE + "cached_tokens": 100}}  # fmt: skip
    row = row_of(sglang)
    assert (row["input_tokens"], row["cached_tokens"], flags(row)) == (5, None, ["cached_beyond_input"])


def test_cached_tokens_within_the_input_stay_a_part_of_it() -> None:
    told = {
        USAGE + "input_tokens": 100,
        USAGE + "cache_read.input_tokens": 100,
        USAGE + "cache_creation.input_tokens": 7,
    }
    row = row_of(chat(attributes=told))
    assert (row["input_tokens"], row["cached_tokens"], row["quality"]) == (100, 100, None)


@pytest.mark.parametrize("value", [10**11, 2**63 - 1, -5])
def test_a_count_that_no_request_has_is_unknown(value: int) -> None:
    row = row_of(chat(attributes={USAGE + "input_tokens": value, USAGE + "output_tokens": 10**9}))
    assert (row["input_tokens"], row["output_tokens"]) == (None, 10**9)


def test_a_first_token_after_no_time_was_never_seen() -> None:
    row = row_of(engine_span(attributes={"gen_ai.latency.time_to_first_token": 0.0}))
    assert (row["ttft_s"], flags(row)) == (None, ["sentinel_ttft"])


def test_an_answer_told_at_once_has_no_time_per_token() -> None:
    latency = {"gen_ai.latency.e2e": 2.0, "gen_ai.latency.time_to_first_token": 2.0}
    whole = {"name": "llm_request", "scope": "acme", "kind": 2, "start_s": 0, "end_s": 2,
             "attributes": {**latency, USAGE + "completion_tokens": 50}}  # fmt: skip
    row = row_of(whole)
    assert (row["ttft_s"], row["decode_s"], row["tpot_s"], flags(row)) == (2.0, None, None, ["streaming_required"])
    single = {**whole, "attributes": {**latency, USAGE + "completion_tokens": 1}}
    row = row_of(single)
    assert (row["ttft_s"], row["decode_s"], row["tpot_s"], row["quality"]) == (2.0, 0.0, None, None)


def test_a_span_that_never_ended_says_so() -> None:
    row = row_of(chat(end_unix_ns=0))
    assert (row["e2e_s"], flags(row)) == (None, ["end_missing", "negative_duration"])


def test_times_in_another_unit_are_told_by_the_moment_they_came(tmp_path: Path) -> None:
    """Those that no unit explains stay as they are."""
    units_ns = {"1" * 32: 10**3, "2" * 32: 10**6, "3" * 32: 10**9}
    sent = {trace: (NOW // unit, (NOW + 4 * SECOND) // unit) for trace, unit in units_ns.items()}
    sent["4" * 32] = (7 * SECOND, 9 * SECOND)
    # As many nanoseconds after 1970 as there are milliseconds by now: a clock that began there half an hour ago, since as milliseconds the
    # span would last for days.
    sent["5" * 32] = (NOW // 10**6, NOW // 10**6 + 2 * SECOND)
    with bench(tmp_path) as b:
        b.receive([chat(trace=trace, start_unix_ns=start, end_unix_ns=end) for trace, (start, end) in sent.items()])
        b.run(5.0)
        rows = {row["trace_id"]: row for row in b.rows()}
        archive = SpanArchive(b.folder)
        kept = {trace: archive.trace(trace).to_pylist() for trace in sent}
    assert {trace: (one["start_unix_ns"], one["end_unix_ns"]) for trace, (one,) in kept.items()} == sent
    for trace in units_ns:
        row = rows[trace]
        assert (row["arrival_unix_ns"], row["e2e_s"], flags(row)) == (NOW, 4.0, ["unit_mismatch"])
    for trace in ("4" * 32, "5" * 32):
        old = rows[trace]
        assert (old["arrival_unix_ns"], old["e2e_s"], old["quality"]) == (sent[trace][0], 2.0, None)


def test_spans_whose_parents_form_a_ring_are_requests_once() -> None:
    rows = rows_of(chat(id="a", parent="a"))
    assert len(rows) == 1
    (row,) = rows_of(chat(id="a", parent="b"), chat(id="b", parent="a", end_s=2.0))
    assert row["entry_e2e_s"] in (2.0, 3.0)


def around(kind: int, host: str, **changes: Any) -> dict[str, Any]:
    return {"name": "POST /v1/completions", "id": "a", "kind": kind, "start_s": 0.0, "end_s": 20.0,
            "resource": {"host.name": host}, "attributes": {"http.request.method": "POST"}, **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "host", "side", "before_s"),
    [(2, "one", "server", 17.5), (3, "one", "client", 17.5), (2, "two", "server", None)],
)
def test_the_outer_boundary_tells_whose_it_is_and_what_lies_before(
    kind: int, host: str, side: str, before_s: float | None
) -> None:
    row = row_of(around(kind, host), engine_span(start_s=17.5, parent="a", resource={"host.name": "one"}))
    assert (row["entry_e2e_s"], row["entry_side"], row["entry_before_s"]) == (20.0, side, before_s)


def test_a_span_that_ends_after_its_longer_parent_on_another_host_has_another_clock() -> None:
    later = row_of(around(3, "one"), engine_span(start_s=300.0, parent="a", resource={"host.name": "two"}))
    assert ("clock_skew" in flags(later), later["entry_before_s"]) == (True, None)
    outlives = row_of(
        around(3, "one", end_s=1.0), engine_span(start_s=0.5, e2e_s=5.0, parent="a", resource={"host.name": "two"})
    )
    assert "clock_skew" not in flags(outlives)


@pytest.mark.parametrize("later_s", [0.5, pytest.param(4000.0, marks=pytest.mark.slow)])
def test_a_server_s_span_that_comes_late_changes_whose_time_it_was(tmp_path: Path, later_s: float) -> None:
    """An engine's span ends, and is sent, before that of the server around it."""
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.receive([engine_span(start_s=17.5, parent="a" * 16, resource={"host.name": "one"})])
        b.run(2.0)
        assert [row["primary_class"] for row in b.rows()] == ["bandwidth"]
        b.run(later_s)
        b.receive([around(2, "one", span_id="a" * 16)])
        b.run(2.0)
        b.run(5.0)
        (row,) = b.rows()
    assert (row["primary_class"], row["cause"], row["e2e_s"], row["entry_e2e_s"]) == ("host", "host", 2.0, 20.0)
