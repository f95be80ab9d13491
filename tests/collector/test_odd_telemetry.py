"""Payloads as odd senders make them (shared/cases/telemetry), through scan, journal and writer to rows."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_data import shared_path
from writing import NOW, Bench, bench, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.archive import SpanArchive
from phasewise.collector.otlp_json import json_to_protobuf
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed

NAMES = (
    "T001",
    "T003",
    "T005",
    "T007",
    "T008",
    "T010",
    "T012",
    "T014",
    "T015",
    "T017",
    "T019",
    "T021",
    "T023",
    "T024",
    "T026",
)
# Names in a case -> how a row of `requests` says it.
VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "duration_ms": lambda row: None if row["e2e_s"] is None else row["e2e_s"] * 1e3,
    "queue_ms": lambda row: row["queue_s"] * 1e3,
    "ttft_ms": lambda row: row["ttft_s"] * 1e3,
    "tpot_ms": lambda row: row["tpot_s"] * 1e3,
    "input_tokens": lambda row: row["input_tokens"],
    "output_tokens": lambda row: row["output_tokens"],
    "cached_tokens": lambda row: row["cached_tokens"],
    "cache_hit_ratio": lambda row: row["cached_tokens"] / row["input_tokens"],
    "model": lambda row: row["model"],
}
# Cases name these too, which no column holds: they follow from the raw span that the archive keeps, and from its row.
RAW: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "cache_creation_tokens": lambda _, raw: created(raw),
    "uncached_tokens": lambda row, raw: row["input_tokens"] - row["cached_tokens"] - (created(raw) or 0),
    "time_to_first_content_ms": lambda _, raw: (first_content(raw) - raw["start_unix_ns"]) / 1e6,
}


def created(raw: dict[str, Any]) -> int | None:
    """Prompt tokens that were written into a cache."""
    value = json.loads(raw["attributes"]).get("gen_ai.usage.cache_creation.input_tokens")
    return None if value is None else int(value)


def first_content(raw: dict[str, Any]) -> int:
    """When the first token came that is no reasoning (Unix nanoseconds)."""
    (moment,) = [
        event["unix_ns"] for event in json.loads(raw["events"]) if event["name"] == "gen_ai.content.first_chunk"
    ]
    return int(moment)


def bodies(case: dict[str, Any]) -> Iterator[bytes]:
    for request in case["requests"]:
        body = (
            base64.b64decode(request["body_base64"])
            if "body_base64" in request
            else json.dumps(request["body"]).encode()
        )
        if expand := request.get("expand"):
            text = (expand["repeat_text"] * expand["times"]).encode()
            body = body.replace(expand["placeholder"].encode(), text)
        yield body


def rejected(b: Bench, case: dict[str, Any]) -> int:
    """Everything sent; spans that were refused."""
    count = 0
    for body in bodies(case):
        try:
            scanned = scan_traces(json_to_protobuf(body, "traces"), b.clock.now)
        except Malformed:
            count += 1
            continue
        count += sum(scanned.rejected.values())
        if scanned.rows.num_rows:
            b.journal.append("spans", scanned.rows)
            b.journal.sync()
        b.run()
    b.run(1.5)
    return count


def among(value: int, allowed: object) -> bool:
    return value in allowed if isinstance(allowed, list) else value == allowed


@pytest.mark.parametrize("name", NAMES)
def test_case(tmp_path: Path, name: str) -> None:
    case = json.loads(shared_path("cases", "telemetry", f"{name}.json").read_text(encoding="utf-8"))
    expected = case["expected"]
    expected = expected | expected.get("if_200", {})
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        refused = rejected(b, case)
        rows = {row["span_id"]: row for row in b.rows()}
        assert among(b.counter("spans"), expected["stored_spans"])
        assert refused == expected.get("rejected_spans", refused)
        assert b.counter("broken_traces") == 0
        for span, values in expected.get("normalized", {}).items():
            raw = {one["span_id"]: one for one in SpanArchive(b.folder).trace(rows[span]["trace_id"]).to_pylist()}
            for key, value in values.items():
                found = RAW[key](rows[span], raw[span]) if key in RAW else VALUES[key](rows[span])
                exactly = value is None or isinstance(value, str)
                assert found == (value if exactly else pytest.approx(value, rel=5e-3)), key
        for span, flags in expected.get("flags", {}).items():
            assert set(flags) <= set(json.loads(rows[span]["quality"] or "[]"))
        for span in expected.get("stats_excluding", []):
            assert (rows[span]["e2e_s"], rows[span]["ttft_s"], rows[span]["tpot_s"]) == (None, None, None)
        for span, row in rows.items():
            if span == expected.get("diagnosis", {}).get("span"):
                allowed, never = (expected["diagnosis"].get(key) for key in ("allowed_primary", "must_not_primary"))
                assert allowed is None or row["primary_class"] in allowed
                assert row["primary_class"] not in (never or ())
        if totals := expected.get("totals"):
            assert len(rows) == totals["requests"]
            assert all(
                sum(row[key] for row in rows.values()) == totals[key] for key in ("input_tokens", "output_tokens")
            )
        if "residual_client_minus_server_ms" in expected:
            (row,) = rows.values()
            assert (row["entry_e2e_s"] - row["e2e_s"]) * 1e3 == pytest.approx(
                expected["residual_client_minus_server_ms"]
            )
        if name == "T010":
            (turn,) = b.rows("SELECT * FROM turns")
            told = (turn["external_s"], turn["calls_s"], turn["unattributed_s"])
            assert told == pytest.approx((1.0, 3.6, 0.4))
        if name == "T023":
            (row,) = rows.values()
            assert (row["entry_e2e_s"], row["e2e_s"], row["queue_s"]) == (20.0, 2.0, 0.02)
        if name == "T026":
            (row,) = rows.values()
            assert row["entry_ttft_s"] == pytest.approx(16.5)


def test_every_case_is_replayed() -> None:
    assert sorted(path.stem for path in shared_path("cases", "telemetry").glob("T*.json")) == sorted(NAMES)


def test_the_clock_of_these_tests_is_later_than_the_cases() -> None:
    assert NOW > 1_768_435_500 * 10**9
