"""More traces are open than memory should hold: what settles before its time ends in the rows it would have had, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from writing import Bench, bench

from phasewise.collector import buffer

TRACES = 6
SCOPE = "phasewise.engine"
# How often it was settled, and when its last span came.
NOT_COMPARED = ("revision", "received_unix_ns")


def spans_of(number: int) -> list[dict[str, Any]]:
    """A request whose parts end, and are sent, long before it does; within another one that somebody else reports."""
    trace, root, above = f"{number + 1:032x}", f"{number + 1:016x}", f"aa{number + 1:014x}"
    start_s = number * 0.5

    def part(name: str, place: int, from_s: float, to_s: float) -> dict[str, Any]:
        return {
            "trace": trace, "span_id": f"{place:02x}{number + 1:014x}", "parent": root, "name": name, "scope": SCOPE,
            "start_s": start_s + from_s, "end_s": start_s + to_s, "kind": 1,
        }  # fmt: skip

    told = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5, "gen_ai.request.id": f"r-{number}"}
    return [
        part("queue", 1, 0.0, 0.25),
        part("prefill", 2, 0.25, 1.0),
        {"trace": trace, "span_id": root, "parent": above, "name": "llm_request", "scope": SCOPE, "start_s": start_s,
         "end_s": start_s + 3.0, "attributes": told},
        {"trace": trace, "span_id": above, "name": "agent", "scope": "app", "start_s": start_s, "end_s": start_s + 4.0},
    ]  # fmt: skip


def in_stages(b: Bench, restart: bool = False) -> None:
    """First what ends first, of all traces."""
    traces = [spans_of(number) for number in range(TRACES)]
    for stage in range(4):
        for spans in traces:
            b.clock.forward(0.2)
            b.receive([spans[stage]])
            b.writer.step()
        b.clock.forward(1.5)
        b.writer.step()
        if restart:
            b.reopen()
    b.run(120.0)
    b.run(120.0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """With room for all of them."""
    with bench(tmp_path_factory.mktemp("roomy")) as b:
        in_stages(b)
        found = tables(b)
        assert b.writer.health()["evicted_traces"] == 0
    assert found["requests"].height == found["turns"].height == TRACES
    assert found["requests"]["queue_s"].to_list() == [0.25] * TRACES
    return found


def tables(b: Bench) -> dict[str, pl.DataFrame]:
    found = {table: b.store.query(f"SELECT * FROM {table}") for table in ("requests", "turns")}
    return {
        table: rows.drop(name for name in NOT_COMPARED if name in rows.columns).sort(rows.columns[0])
        for table, rows in found.items()
    }


@pytest.mark.parametrize(
    ("limit", "restart"),
    [
        pytest.param(("OPEN_SPANS", 3), False, marks=pytest.mark.slow),
        (("OPEN_BYTES", 1500), False),
        pytest.param(("OPEN_BYTES", 1500), True, marks=pytest.mark.slow),
        pytest.param(("OPEN_BYTES", 0), False, marks=pytest.mark.slow),
    ],
    ids=["spans", "bytes", "restarts", "none may wait"],
)
def test_they_end_in_the_same_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, pl.DataFrame],
    limit: tuple[str, int],
    restart: bool,
) -> None:
    monkeypatch.setattr(buffer, *limit)
    monkeypatch.setattr(buffer, "RECENT_SPANS", 4)  # what settles is soon out of sight: the archive brings it back
    with bench(tmp_path) as b:
        in_stages(b, restart)
        health = b.writer.health()
        for table, rows in tables(b).items():
            assert_frame_equal(rows, expected[table])
        assert b.counter("requests") == TRACES
        assert b.counter("spans") == 4 * TRACES
        assert b.counter("duplicate_spans") == 0
        assert b.counter("reopened_traces") > 0
    assert health["open_spans"] == 0
    assert restart or health["evicted_traces"]
