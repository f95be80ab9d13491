"""A trace is in the buffer once: open, or among those that settled lately."""

from __future__ import annotations

import polars as pl
import pytest

from phasewise.collector import buffer as module
from phasewise.collector.buffer import RECENT_NS, TraceBuffer, buffered_schema
from phasewise.collector.frames import frame_of

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


@pytest.mark.parametrize("limit", [("OPEN_SPANS", 4), ("OPEN_BYTES", 1500)], ids=["spans", "bytes"])
def test_of_very_many_open_ones_those_that_wait_longest_settle(
    monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    """Two traces of two spans have room, and no third, of at least 288 bytes a span."""
    monkeypatch.setattr(module, *limit)
    kept = TraceBuffer()
    for received_s, trace in enumerate(("a", "b", "a", "c", "d", "b", "d", "c")):
        kept.add(spans(trace, received_s=received_s, role="part"), named())
    kept.add(spans("e", received_s=9, role="engine", at_once=True), named())
    assert held(kept.take_due(S, 9 * S)) == ["a", "a", "b", "b", "e"]
    assert held(kept.open) == ["c", "c", "d", "d"]
    assert kept.evicted == 2
    assert kept.take_due(S, 9 * S).is_empty()
    assert kept.evicted == 2


def test_large_texts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that has no room alone does not wait either; in between nothing is taken before its time."""
    monkeypatch.setattr(module, "OPEN_BYTES", 10_000)
    kept = TraceBuffer()
    kept.add(spans("a", "b", role="part").with_columns(attributes=pl.lit("x" * 4_000)), named())
    assert kept.take_due(-S, 0).is_empty()
    kept.add(spans("c", received_s=1, role="part").with_columns(attributes=pl.lit("y" * 20_000)), named())
    assert held(kept.take_due(-S, S)) == ["a", "b", "c"]
    assert kept.evicted == 3


def test_the_bytes_of_a_span_are_those_of_memory() -> None:
    """At least, and little more: Polars counts no text twice that stands in memory once."""
    ids = pl.int_range(1000).cast(pl.String)
    told = spans(*(f"{number:032x}" for number in range(1000)), role="part")
    told = told.with_columns(attributes=ids.str.zfill(600), resource=ids.str.zfill(300))
    counted = told.select(module._BYTES.sum()).item()
    assert told.estimated_size() <= counted <= 1.3 * told.estimated_size()


def test_what_waits_does_not_hold_the_texts_of_what_came_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each batch one span waits for its request, the others settle."""
    monkeypatch.setattr(module, "_SLACK_BYTES", 1 << 20)
    monkeypatch.setattr(module, "RECENT_BYTES", 0)
    kept, texts = TraceBuffer(), pl.int_range(500).cast(pl.String).str.zfill(1_000)
    for number in range(40):
        batch = spans(*(f"{number}-{place}" for place in range(500)), received_s=number)
        waits = pl.int_range(500) == 7
        batch = batch.with_columns(
            attributes=texts, role=pl.when(waits).then(pl.lit("part")).otherwise(pl.lit("engine"))
        )
        kept.add(frame_of(batch.to_arrow(compat_level=pl.CompatLevel.oldest())), named())
        assert kept.take_due(number * S, number * S).height == 499
        held_bytes = kept.open.to_arrow(compat_level=pl.CompatLevel.newest()).get_total_buffer_size()
        assert held_bytes < 3 << 20, "a batch has 0.6 MiB"
    assert held(kept.open) == sorted(f"{number}-7" for number in range(40))
    assert kept.open.schema == pl.DataFrame(schema=buffered_schema()).schema
    assert set(kept.open["attributes"]) == {"7".zfill(1_000)}
