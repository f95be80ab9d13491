"""A finished run of the engine, handed over: the rows are those a receiver and a scraper would have made of it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hand_run import KV_BLOCKS, START, hand_run, moment

from phasewise.analyzer.attribution import attributor
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.commands import engine_recording
from phasewise.dashboard.commands.engine_recording import Sender
from phasewise.instrumented_engine import vllm_scrapes
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.vllm_scrapes import VllmServer
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
SENDER = Sender("engine-7", "llama-3.1-8b", "1.2.3")


def stored(folder: Path, spans: object, samples: object = ()) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Rows of requests by id, steps and samples."""
    with Store(folder / "phasewise.duckdb") as store:
        writer = Writer(store, folder, RULES, attributor(RULES), clock=lambda: moment(60_000))
        engine_recording.hand_over(writer, spans, samples)  # type: ignore[arg-type]
        return (
            store.query("SELECT * FROM requests ORDER BY request_id"),
            store.query("SELECT * FROM engine_steps ORDER BY step"),
            store.query("SELECT * FROM engine_samples ORDER BY unix_ns"),
        )


def test_the_engine_s_own_spans_and_steps_become_rows(tmp_path: Path) -> None:
    recording = hand_run()
    rows, steps, _ = stored(tmp_path, engine_recording.spans_of(recording, SENDER))
    assert rows["request_id"].to_list() == ["a", "b", "c", "gone"]
    assert set(rows["instance"]) == {"engine-7"} and set(rows["model"]) == {"llama-3.1-8b"}
    by_id = {row["request_id"]: row for row in rows.iter_rows(named=True)}
    b, c = by_id["b"], by_id["c"]
    assert [b[name] for name in ("e2e_s", "ttft_s", "queue_s", "prefill_s", "decode_s", "external_s")] == pytest.approx(
        [0.83, 0.28, 0.03, 0.25, 0.05, 0.5]
    )
    assert [c["context_s"], c["e2e_s"]] == pytest.approx([0.1, 0.2])
    assert by_id["gone"]["outcome"] != "ok"
    assert (rows["residual_s"].abs() < 1e-6).all()
    assert steps["step"].to_list() == list(range(6))
    assert steps["start_unix_ns"].to_list() == [row[0] for row in recording.steps]
    assert steps["duration_s"].to_list() == pytest.approx([row[1] / 1e9 for row in recording.steps])
    assert steps["kv_blocks_total"].to_list() == [KV_BLOCKS] * 6
    assert rows["final"].all() and rows["revision"].null_count() == 0


def test_what_vllm_would_have_sent_is_joined_with_its_scrapes(tmp_path: Path) -> None:
    recording = hand_run()
    server = VllmServer(
        model="llama-3.1-8b", started_ns=START - 10**9, kv_blocks=KV_BLOCKS, block_tokens=16, prefix_caching=True
    )
    pages = vllm_scrapes.pages(recording, server, [moment(ms) for ms in (-100, 200, 460, 1000)])
    samples = engine_recording.vllm_samples_of(pages, Profiles(RULES.engines), "engine-7:8000")
    rows, steps, scraped = stored(tmp_path, engine_recording.vllm_spans_of(recording, "engine-7"), samples)
    assert rows["request_id"].to_list() == ["cmpl-a-0", "cmpl-b-0", "cmpl-c-0"]
    assert set(rows["engine"]) == {"vllm_v1"} and set(rows["model"]) == {"llama-3.1-8b"}  # told by the scrapes alone
    assert rows["combined_s"].to_list() == pytest.approx([0.0, 0.03, 0.0])
    assert rows["context_s"].null_count() == rows["external_s"].null_count() == 3
    assert steps.is_empty() and len(scraped) == 4 and scraped["joined"].all()


def test_a_run_without_requests_has_no_spans() -> None:
    assert engine_recording.spans_of(Recording(kv_blocks_total=8), SENDER).num_rows == 0
    assert engine_recording.ended_ns(Recording(kv_blocks_total=8)) == 0


def test_a_request_is_not_divided_among_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_recording, "MESSAGE_SPANS", 4)
    bodies = list(engine_recording.messages_of(hand_run(), SENDER))
    traces = [set(scan_traces(body, START).rows["trace_id"].to_pylist()) for body in bodies]
    assert len(bodies) > 2 and sum(map(len, traces)) == len(set.union(*traces))
