"""No value that somebody sends ever becomes part of a statement: the text depends on keys and operators alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from hostile_texts import all_texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phasewise.analyzer.filters import FILTER_KEYS, conditions, filter_key, rows_in
from phasewise.analyzer.listing import SORT_KEYS, Order, find_requests, parse_order, request_page
from phasewise.analyzer.window import Filter, Window
from phasewise.rules.errors import InputError

TEXTS = st.one_of(st.text(max_size=60), st.sampled_from([text[:200] for text in all_texts()]))
WINDOW = Window(0, 10**18)
TEXT_KEYS = [name for name, key in FILTER_KEYS.items() if key.kind == "text"]
ROW = pl.DataFrame({"n": [0], "request_key": ["k"], "finished_unix_ns": [0]})


class Recorder:
    """A store that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[object, ...]]] = []

    def query(self, sql: str, parameters: Sequence[object] = (), *, order_by: Sequence[str] = ()) -> pl.DataFrame:
        self.asked.append((sql, tuple(parameters)))
        return ROW


def statement(filters: list[Filter], order: Order = Order()) -> tuple[str, tuple[object, ...]]:  # noqa: B008
    store: Any = Recorder()
    request_page(store, rows_in(WINDOW, filters), order)
    (asked,) = store.asked
    return asked  # type: ignore[no-any-return]


@settings(max_examples=120)
@given(st.sampled_from(TEXT_KEYS), st.sampled_from(["eq", "ne", "prefix", "in"]), TEXTS)
@example("model", "eq", "'; DROP TABLE requests; --")
@example("route", "prefix", "%_\\' OR 1=1")
def test_the_statement_is_the_same_for_every_value(key: str, operator: str, value: str) -> None:
    told, parameters = statement([Filter(key, operator, value)])
    assert told == statement([Filter(key, operator, "x")])[0]
    bound = [item for one in parameters for item in (one if isinstance(one, list) else [one])]
    assert all(part in bound for part in (value.split(",") if operator == "in" else [value]))


@settings(max_examples=120)
@given(TEXTS)
@example("model\x00")
@example('model" OR 1=1 --')
def test_a_key_is_known_or_refused(name: str) -> None:
    try:
        found = filter_key(name)
    except InputError:
        return
    assert found in FILTER_KEYS.values()


@settings(max_examples=120)
@given(TEXTS)
@example("e2e; DROP TABLE requests")
@example("e2e:desc;")
def test_an_order_is_known_or_refused(text: str) -> None:
    try:
        order = parse_order(text)
    except InputError:
        return
    assert order.key in SORT_KEYS
    assert statement([], order)[0].count(";") == 0


@settings(max_examples=100)
@given(TEXTS)
def test_an_identifier_is_bound(identifier: str) -> None:
    store: Any = Recorder()
    find_requests(store, identifier)
    other: Any = Recorder()
    find_requests(other, "x")
    assert [sql for sql, _ in store.asked] == [sql for sql, _ in other.asked]
    assert store.asked[0][1][:4] == (identifier,) * 4


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@given(
    st.lists(
        st.builds(Filter, st.sampled_from(TEXT_KEYS), st.sampled_from(["eq", "ne", "prefix", "in"]), TEXTS), max_size=5
    )
)
def test_ten_thousand_of_them(filters: list[Filter]) -> None:
    plain = [Filter(one.key, one.op, "x") for one in filters]
    assert conditions(filters).sql == conditions(plain).sql
