"""Keys are stable, spread and tolerant of identifiers that are no hex."""

from __future__ import annotations

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.collector.keys import span_hashes, span_keys, text_key, trace_hashes

traces = st.text("0123456789abcdef", min_size=32, max_size=32)
spans = st.text("0123456789abcdef", min_size=16, max_size=16)


def test_keys_are_the_same_in_every_release() -> None:
    keys = span_keys(pl.Series(["184dcb204631035a972064993ce31de6"]), pl.Series(["4e84f84c78c1563f"]))
    assert keys.to_list() == ["715d2510dead080ed1bc5f213ec46043"]
    assert text_key("a", "b") == "4fc56058b4df0ca122be9a2e429541d6"
    assert text_key("ab", "") != text_key("a", "b")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(traces, spans), min_size=1, max_size=50, unique=True))
def test_different_spans_have_different_keys(pairs: list[tuple[str, str]]) -> None:
    ids, own = pl.Series([p[0] for p in pairs]), pl.Series([p[1] for p in pairs])
    assert span_keys(ids, own).n_unique() == len(pairs)
    assert span_hashes(ids, own).n_unique() == len(pairs)
    assert span_keys(ids.reverse(), own.reverse()).reverse().to_list() == span_keys(ids, own).to_list()
    assert trace_hashes(ids).n_unique() == ids.n_unique()


def test_identifiers_that_are_no_hex_still_have_keys() -> None:
    keys = span_keys(pl.Series(["row 1", "row 2", ""]), pl.Series(["a", "a", "a"]))
    assert keys.n_unique() == 3
    assert keys.str.len_chars().to_list() == [32, 32, 32]
