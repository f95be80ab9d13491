"""Telemetry that cannot be true: kept, flagged, and left out of every figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from span_tables import at, span_frame
from writing import NOW, SECOND, bench, engine_span, rulebook

from phasewise.collector.attribution import typed
from phasewise.collector.exposition import read_exposition
from phasewise.collector.normalize import normalize
from phasewise.collector.phases import told_within
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Request, columns

PROFILES = Profiles(rulebook().engines)
LATENCY = "gen_ai.latency."


def row_of(*spans: dict[str, Any]) -> dict[str, Any]:
    (row,) = normalize(span_frame(spans), PROFILES).requests.iter_rows(named=True)
    return row


@pytest.mark.parametrize(
    ("key", "column", "flag"),
    [
        ("time_to_first_token", "ttft_s", "ttft_beyond_end"),
        ("time_in_queue", "queue_s", "queue_beyond_end"),
        ("time_in_model_prefill", "prefill_s", "prefill_beyond_end"),
        ("time_in_model_decode", "decode_s", "decode_beyond_end"),
    ],
)
def test_a_part_longer_than_the_whole_is_unknown(key: str, column: str, flag: str) -> None:
    row = row_of(engine_span(e2e_s=3.0, attributes={LATENCY + key: 50.0}))
    assert row[column] is None
    assert flag in json.loads(row["quality"])
    assert all(
        row[name] is None or row[name] <= 3.03 for name in ("ttft_s", "combined_s", "queue_s", "decode_s", "tpot_s")
    )


@pytest.mark.parametrize(("ttft_s", "kept"), [(3.0, True), (3.029, True), (3.031, False)])
def test_a_hundredth_is_no_contradiction(ttft_s: float, kept: bool) -> None:
    row = row_of(engine_span(e2e_s=3.0, attributes={LATENCY + "time_to_first_token": ttft_s}))
    assert (row["ttft_s"] is not None) is kept


def test_two_milliseconds_are_no_contradiction() -> None:
    row = row_of(engine_span(e2e_s=0.01, attributes={LATENCY + "time_to_first_token": 0.0119}))
    assert row["ttft_s"] == 0.0119


def test_a_child_span_that_ends_after_the_request_is_no_phase_of_it() -> None:
    root = {"name": " Req 1", "id": "a", "scope": "sglang server", "kind": 1, "start_s": 0, "end_s": 3,
            "attributes": {"gen_ai.usage.completion_tokens": 3}}  # fmt: skip
    part = {"name": "decode_forward", "parent": "a", "scope": "sglang server", "kind": 1, "start_s": 1, "end_s": 60}
    row = row_of(root, part)
    assert (row["decode_s"], row["tpot_s"]) == (None, None)
    assert "decode_beyond_end" in json.loads(row["quality"])


def test_a_client_span_is_held_to_its_own_end() -> None:
    chat = {"name": "chat m", "kind": 3, "start_s": 0, "end_s": 2,
            "attributes": {"gen_ai.operation.name": "chat", "gen_ai.response.time_to_first_chunk": 40.0}}  # fmt: skip
    row = row_of(chat)
    assert (row["ttft_s"], row["entry_ttft_s"], row["entry_e2e_s"]) == (None, None, 2.0)
    assert json.loads(row["quality"]) == ["ttft_beyond_end"]


def test_a_record_of_a_client_is_held_to_its_own_end() -> None:
    empty = typed(pl.DataFrame({"request_key": ["k"]}, schema_overrides={"request_key": pl.String}))
    assert set(empty.columns) == set(columns(Request))
    row = empty.with_columns(pl.lit(2.0).alias("entry_e2e_s"), pl.lit(40.0).alias("entry_ttft_s"))
    (told,) = told_within(row).iter_rows(named=True)
    assert (told["entry_ttft_s"], told["quality"]) == (None, '["ttft_beyond_end"]')


def test_a_request_from_the_year_2099_says_nothing_about_now(tmp_path: Path) -> None:
    far = 2_280_000_000.0
    with bench(tmp_path) as b:
        b.receive([engine_span(start_s=0.0, trace="1" * 32), engine_span(start_s=far, trace="2" * 32)])
        b.run()
        assert ["future" in (row["quality"] or "") for row in b.rows()] == [False, True]
        (instance,) = b.rows("SELECT * FROM instances")
        assert instance["last_seen_unix_ns"] == at(2)
        marks = b.writer.health()["watermarks"]
        assert isinstance(marks, dict)
        assert max(marks.values(), default=0) < NOW
        b.reopen()
        b.receive([engine_span(start_s=1.0, trace="3" * 32)])
        b.run()
        marks = b.writer.health()["watermarks"]
        assert marks == {"i-1": at(3) - 60 * SECOND}


def test_a_scrape_from_the_future_is_kept_and_moves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for unix_ns in (NOW, NOW + 3600 * SECOND):
            read = read_exposition("vllm:num_requests_running 1\n", unix_ns, PROFILES, instance="x")
            assert read is not None
            b.writer.add_samples([read])
        (instance,) = b.rows("SELECT * FROM instances")
        assert instance["last_seen_unix_ns"] == NOW
        assert len(b.rows("SELECT * FROM engine_samples")) == 2
        assert b.counter("future_samples") == 1
