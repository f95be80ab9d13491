"""Contexts for attribution: rows, samples and settings of one engine replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl
from builders import make_request, record_table, request_table

from phasewise.analyzer.findings import Finding, decide
from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.slow_set import slow_set
from phasewise.analyzer.sums import RowSums
from phasewise.analyzer.window import Objective
from phasewise.collector.context import Context, Setting
from phasewise.collector.records import EngineSample, EngineStep, Request


def frame(rows: Iterable[Request]) -> pl.DataFrame:
    made = pl.from_arrow(request_table(rows))
    assert isinstance(made, pl.DataFrame)
    return made


def sample_frame(samples: Sequence[EngineSample]) -> pl.DataFrame:
    made = pl.from_arrow(record_table(EngineSample, samples))
    assert isinstance(made, pl.DataFrame)
    return made


def make_context(
    rows: Sequence[Request], samples: Sequence[EngineSample] = (), settings: dict[str, object] | None = None
) -> Context:
    steps = pl.from_arrow(record_table(EngineStep, []))
    assert isinstance(steps, pl.DataFrame)
    return Context(
        instance="gpu-0",
        requests=frame(rows),
        samples=sample_frame(samples),
        steps=steps,
        targets=frozenset(row.request_key for row in rows),
        settings={name: Setting(value, "test") for name, value in (settings or {}).items()},
    )


def judged(rows: pl.DataFrame, objectives: Sequence[Objective], flight: InFlight) -> Finding:
    """What is decided of these rows, all of them read."""
    return decide(slow_set(rows, objectives), RowSums(rows), flight)


def four_slots(waiting: int = 8) -> list[Request]:
    """Requests of 1 s (0.1 s prefill, 0.9 s decode) through four slots, all there from the start."""
    rows = []
    for number in range(4 + waiting):
        turn = number // 4
        rows.append(make_request(at_s=0.0, queue_s=float(turn), prefill_s=0.1, first_token_s=0.0, decode_s=0.9))
    return rows
