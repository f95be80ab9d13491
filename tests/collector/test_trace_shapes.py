"""Intervals and ancestors over many traces at once, against the obvious way for one."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.collector.trees import ancestors, merged, overlaps, owners, union_seconds

SECOND = 10**9
intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=20)


def frame(spans: list[tuple[int, int]], group: str = "t") -> pl.DataFrame:
    rows = [(group, "part", start * SECOND, (start + length) * SECOND) for start, length in spans]
    schema = {"trace_id": pl.String, "name": pl.String, "start_unix_ns": pl.Int64, "end_unix_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {second for start, length in spans for second in range(start, start + length)}


@settings(max_examples=40, deadline=None)
@given(intervals)
def test_the_union_counts_every_second_once(spans: list[tuple[int, int]]) -> None:
    both = pl.concat([frame(spans, "a"), frame(spans, "b")])
    found = dict(union_seconds(both, ["trace_id"], "s").iter_rows())
    for group in ("a", "b"):
        assert abs(found.get(group, 0.0) - len(covered(spans))) < 1e-9


@settings(max_examples=40, deadline=None)
@given(intervals, st.tuples(st.integers(0, 50), st.integers(0, 20)))
def test_overlap_is_the_common_part(spans: list[tuple[int, int]], one: tuple[int, int]) -> None:
    found = overlaps(frame([one]), merged(frame(spans), ["trace_id"]), ["trace_id"])
    assert abs(float(found["overlap_s"].sum()) - len(covered(spans) & covered([one]))) < 1e-9


def tree(*edges: tuple[str, str | None]) -> pl.DataFrame:
    schema = {"trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String}
    return pl.DataFrame([("t", child, parent) for child, parent in edges], schema=schema, orient="row")


def test_ancestors_are_found_up_to_the_root_and_loops_end() -> None:
    spans = tree(("a", None), ("b", "a"), ("c", "b"), ("x", "y"), ("y", "x"), ("o", "missing"))
    found = ancestors(spans.filter(pl.col("span_id").is_in(["c", "o"])), spans, ())
    assert found.select("node", "depth", "span_id").sort("depth").rows() == [("c", 1, "b"), ("c", 2, "a")]


@pytest.mark.parametrize(
    ("edges", "above"),
    [
        ((("a", "a"), ("b", "a")), {"a": [], "b": ["a"]}),
        ((("a", "b"), ("b", "a"), ("c", "b")), {"a": [], "b": ["a"], "c": ["b", "a"]}),
        (
            (("a", "b"), ("b", "c"), ("c", "a"), ("o", None), ("p", "o")),
            {"a": [], "b": ["c", "a"], "c": ["a"], "p": ["o"]},
        ),
    ],
)
def test_one_span_of_a_ring_is_its_top(edges: tuple[tuple[str, str | None], ...], above: dict[str, list[str]]) -> None:
    """Else each of its spans would lie below another, and none would be a request."""
    spans = tree(*edges)
    found = ancestors(spans, spans, ())
    told = {node: found.filter(pl.col("node") == node).sort("depth")["span_id"].to_list() for node in above}
    assert told == above


def test_a_long_chain_is_cut_and_no_ring() -> None:
    spans = tree(*((f"{n:03}", f"{n + 1:03}") for n in range(100)))
    found = ancestors(spans.filter(pl.col("span_id") == "000"), spans, ())
    assert found.sort("depth")["span_id"].to_list() == [f"{n:03}" for n in range(1, 65)]


def test_parts_belong_to_the_nearest_request_above() -> None:
    spans = tree(("r1", None), ("r2", None), ("t1", "r1"), ("p1", "t1"), ("p2", "r2"), ("lost", "nobody"))
    roots = spans.filter(pl.col("span_id").is_in(["r1", "r2"]))
    parts = spans.filter(pl.col("span_id").is_in(["p1", "p2", "lost"]))
    assert dict(owners(parts, roots, spans).select("span_id", "root").iter_rows()) == {"p1": "r1", "p2": "r2"}


def test_a_trace_with_one_request_owns_parts_whose_parents_have_not_come() -> None:
    spans = tree(("r", None), ("p", "not yet"))
    found = owners(spans.filter(pl.col("span_id") == "p"), spans.filter(pl.col("span_id") == "r"), spans)
    assert found["root"].to_list() == ["r"]
