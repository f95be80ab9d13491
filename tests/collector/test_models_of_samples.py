"""Spans without a model get that of their replica's samples: those of their own time, whatever else becomes final with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from span_tables import at, span_table
from writing import Bench, Instant, bench, engine_span, give_time

from phasewise.collector import finisher
from phasewise.collector.exposition import read_exposition


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def spans(*start_s: float) -> list[dict[str, object]]:
    return [
        engine_span(start_s=start, trace=f"{n + 1:032x}", span_id=f"{n + 1:016x}") for n, start in enumerate(start_s)
    ]


def models(b: Bench, pages: dict[float, str], *start_s: float) -> list[str | None]:
    """Of the rows of requests that came as one import, after samples of their engine at some moments, each with its model."""
    found = [
        read_exposition(
            f'vllm:num_requests_running{{model_name="{model}"}} 1\n', at(second), b.writer._profiles, instance="i-1"
        )
        for second, model in pages.items()
    ]
    b.writer.add_samples([page for page in found if page is not None])
    b.writer.add_spans(span_table(spans(*start_s), received_unix_ns=b.clock.now))
    rows = b.rows()
    assert all(row["final"] for row in rows)
    assert [("inferred:samples" in (row["provenance"] or "")) for row in rows] == [
        row["model"] is not None for row in rows
    ]
    return [row["model"] for row in rows]


@pytest.mark.parametrize("together", [1, 20_000])
@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({-8998.0: "first", 1.0: "second"}, ["first", "second"]),
        ({-8998.0: "first", -8990.0: "other", 1.0: "second"}, [None, "second"]),
        ({-8998.0: "first"}, ["first", None]),
    ],
)
def test_each_block_has_the_model_of_its_own_samples(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    together: int,
    pages: dict[float, str],
    expected: list[str | None],
) -> None:
    monkeypatch.setattr(finisher, "PORTION_ROWS", together)
    with bench(tmp_path) as b:
        assert models(b, pages, -9000.0, 0.0) == expected
