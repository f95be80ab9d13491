"""A trace is in the buffer once: open, or among those that settled lately."""

from __future__ import annotations

import polars as pl
import pytest

from phasewise.collector import buffer as module
from phasewise.collector.buffer import RECENT_NS, TraceBuffer, buffered_schema

S = 10**9


def spans(*traces: str, received_s: float = 0.0, role: str = "engine", at_once: bool = False) -> pl.DataFrame:
    """A span of each trace, numbered by its place."""
    told = {
        "trace_id": list(traces),
        "span_id": [str(place) for place in range(len(traces))],
        "received_unix_ns": [round(received_s * S)] * len(traces),
        "role": [role] * len(traces),
        "at_once": [at_once] * len(traces),
    }
    return pl.DataFrame({name: told.get(name, [None] * len(traces)) for name in buffered_schema()}, buffered_schema())


def named(*traces: str) -> pl.DataFrame:
    return pl.DataFrame({"trace_id": list(traces)}, schema={"trace_id": pl.String})


def held(found: pl.DataFrame) -> list[str]:
    return sorted(found["trace_id"])


def test_a_late_span_brings_its_settled_trace_back() -> None:
    kept = TraceBuffer()
    kept.add(spans("a", "b", "b"), named())
    assert held(kept.take_due(S, S)) == ["a", "b", "b"]
    kept.add(spans("b", "c", received_s=2), named("b"))
    assert held(kept.open) == ["b", "b", "b", "c"]
    assert kept.missing(named("a", "b", "c", "d")) == ["d"]
    assert held(kept.take_due(3 * S, 3 * S)) == ["b", "b", "b", "c"]
    kept.add(spans("a", "b", received_s=4), named("a", "b"))
    assert held(kept.open) == ["a", "a", "b", "b", "b", "b"]


def test_some_settle_and_some_wait() -> None:
    kept = TraceBuffer()
    kept.add(spans("a", "b"), named())
    kept.add(spans("c", received_s=5), named())
    kept.add(spans("d", received_s=5, at_once=True), named())
    kept.add(spans("e", role="part"), named())
    taken = kept.take_due(S, S)
    assert held(taken) == ["a", "b", "d"]
    assert not taken["at_once"].any()
    assert held(kept.open) == ["c", "e"]
    assert held(kept.take_traces(named("e"), S)) == ["e"]
    assert held(kept.open) == ["c"]


def test_what_settled_long_ago_is_forgotten() -> None:
    kept = TraceBuffer()
    kept.add(spans("a"), named())
    kept.take_due(S, S)
    kept.add(spans("b", received_s=100), named())
    kept.take_due(101 * S, 101 * S)
    kept.take_due(101 * S, RECENT_NS + 1)
    assert kept.missing(named("a", "b")) == ["a"]


@pytest.mark.parametrize("limit", [("RECENT_SPANS", 3), ("RECENT_BYTES", 200)], ids=["spans", "bytes"])
def test_of_very_many_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]) -> None:
    monkeypatch.setattr(module, *limit)
    kept = TraceBuffer()
    for trace in ("a", "b", "c"):
        kept.add(spans(trace, trace), named())
        kept.take_due(S, S)
    assert kept.missing(named("a", "b", "c")) == ["a", "b"]
