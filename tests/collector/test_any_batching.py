"""What a request is finally booked to follows from what was sent, whatever came together with what, and whenever the store was restarted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from span_tables import at, span_table
from writing import Bench, Clock, Instant, bench, give_time, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector import blocks

FROM_S, TO_S = 430.0, 610.0  # a span of the clock ends at 500
LONG_S = 95.0  # more than the least wait for neighbours


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a busy engine made small: blocks end by their rows as well, and look back for less than all."""
    give_time(monkeypatch, Instant())
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 100)
    monkeypatch.setattr(blocks, "CALIBRATING_ROWS", 40)
    monkeypatch.setattr(blocks, "OVERLAP_ROWS", 60)


def load() -> list[dict[str, Any]]:
    """Requests of a busy and of a quiet engine, in the order in which they end; a few take longer than all before them."""
    source = random.Random(7)
    spans = []
    for number in range(400):
        quiet = number % 7 == 0
        end_s = source.uniform(FROM_S, TO_S)
        queue_s, prefill_s = source.expovariate(2.0), source.expovariate(4.0)
        tokens = 2 + source.randrange(200)
        decode_s = LONG_S if number % 60 == 5 else tokens * source.uniform(0.01, 0.03)
        e2e_s = queue_s + prefill_s + decode_s + 0.01
        attributes = {
            "gen_ai.latency.e2e": e2e_s,
            "gen_ai.latency.time_to_first_token": e2e_s - decode_s,
            "gen_ai.latency.time_in_queue": queue_s,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.usage.prompt_tokens": source.randrange(16, 4000),
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.response.model": "meta-llama/Llama-3.1-8B-Instruct",
        }
        spans.append(
            {
                "name": "llm_request",
                "scope": "vllm.tracing.otel",
                "trace": f"{number + 1:032x}",
                "span_id": f"{number + 1:016x}",
                "start_s": end_s - e2e_s,
                "end_s": end_s,
                "attributes": attributes,
                "resource": {"service.name": "s", "service.instance.id": "quiet" if quiet else "busy"},
            }
        )
    return sorted(spans, key=lambda span: float(span["end_s"]))


def live(b: Bench, spans: Sequence[dict[str, Any]], step_s: float, restart_at_s: float | None = None) -> None:
    """What ended within a step arrives at its end."""
    now_s, sent = FROM_S, 0
    while now_s < TO_S:
        now_s += step_s
        b.clock.now = at(now_s)
        due = [span for span in spans[sent:] if span["end_s"] <= now_s]
        if due:
            b.receive(due)
            sent += len(due)
        b.writer.step()
        if restart_at_s is not None and now_s >= restart_at_s:
            b.reopen()
            restart_at_s = None
    assert sent == len(spans)


def in_one_second_steps(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    live(b, spans, 1.0)


def in_half_minutes_with_a_restart(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    live(b, spans, 30.0, restart_at_s=550.0)


def as_a_backlog(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    b.receive(spans)


def as_one_import(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    b.writer.add_spans(span_table(spans))


def as_imports_in_pieces(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    for start in range(0, len(spans), 150):
        b.writer.add_spans(span_table(spans[start : start + 150]))


def as_imports_newest_first(b: Bench, spans: Sequence[dict[str, Any]]) -> None:
    for start in reversed(range(0, len(spans), 150)):
        b.writer.add_spans(span_table(spans[start : start + 150]))


def rows(folder: Path, feed: Callable[[Bench, Sequence[dict[str, Any]]], None]) -> pl.DataFrame:
    folder.mkdir()
    with bench(folder, attribute=attributor(rulebook()), clock=Clock(at(TO_S + 60))) as b:
        feed(b, load())
        b.clock.now = max(b.clock.now, at(TO_S))
        for _ in range(7):
            b.run(31.0)
        found = b.store.query("SELECT * FROM requests ORDER BY request_key")
    assert found["final"].all()
    return found.drop("revision", "received_unix_ns")


def test_the_load_is_cut_into_blocks_of_both_kinds(tmp_path: Path) -> None:
    ends = [round(float(span["end_s"])) for span in load() if span["resource"]["service.instance.id"] == "busy"]
    slots = [
        blocks.Slot(at(second), ends.count(second) * 5, at(second), 0)
        for second in range(430, 615, 5)
        if ends.count(second)
    ]
    cut = list(blocks.blocks_of(slots, at(FROM_S)))
    assert {block.end_unix_ns % blocks.SPAN_NS == 0 for block in cut} == {True, False}


@pytest.mark.parametrize(
    "feed",
    [
        in_half_minutes_with_a_restart,
        as_a_backlog,
        pytest.param(as_imports_in_pieces, marks=pytest.mark.slow),
        pytest.param(as_imports_newest_first, marks=pytest.mark.slow),
        pytest.param(in_one_second_steps, marks=pytest.mark.slow),
    ],
)
def test_all_columns_are_the_same_in_any_batching(
    tmp_path: Path, feed: Callable[[Bench, Sequence[dict[str, Any]]], None]
) -> None:
    expected = rows(tmp_path / "expected", as_one_import)
    assert expected["cause"].n_unique() > 2
    assert_frame_equal(rows(tmp_path / "found", feed), expected, check_exact=True)
