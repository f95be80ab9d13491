"""Attributes read as typed columns say what reading each span by itself says, whatever senders mix."""

from __future__ import annotations

import json
import math
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.collector.attribute_columns import LEAST_ROWS, Wanted, columns_of, repeated_columns
from phasewise.collector.readings import counts, numbers, texts, triples

WANTED: dict[str, Wanted] = {"t": "number", "c": "count", "s": "text", "l": "text", "g": "list", "never": "number"}
READERS = {"t": numbers, "c": counts, "s": texts, "l": texts, "g": triples}
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "t": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    "c": st.integers(-5, 2**62),
    "s": st.text(max_size=4) | st.sampled_from(["[", '["a","b"]', "[1]", ""]),
    "l": st.lists(st.text(max_size=3), max_size=2),
    "g": st.lists(st.integers(0, 9), max_size=6),
}
ODD: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.just("12.5") | st.integers(0, 9) | st.floats(0, 9) | st.just([]) | st.just({"t": 1})
)


def plain(rows: list[dict[str, Any]], name: str) -> pl.Series:
    return READERS[name]([row.get(name) for row in rows])


def read(rows: list[dict[str, Any]], name: str) -> pl.Series:
    told = pl.Series([json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows])
    found = columns_of(told, WANTED)
    assert "never" not in found
    return READERS[name](found[name]) if name in found else READERS[name]([None] * len(rows))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_typed_columns_are_the_plain_ones(data: st.DataObject) -> None:
    few = data.draw(st.lists(st.fixed_dictionaries({}, optional=USUAL), min_size=1, max_size=8))
    odd = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(USUAL, ODD)), max_size=2))
    rows = [*few * (LEAST_ROWS // len(few) + 1), *odd]
    for name in READERS:
        assert read(rows, name).equals(plain(rows, name), null_equal=True), name


@pytest.mark.parametrize("text", ["1e999", "1E3", "-0.0", "5", "12345678901234567890123", "0.1"])
def test_numbers_are_read_as_python_reads_them(text: str) -> None:
    told = pl.Series([f'{{"t":{text}}}'] * LEAST_ROWS)
    (value,) = numbers(columns_of(told, {"t": "number"})["t"]).unique()
    assert value == float(text) and math.copysign(1, value) == math.copysign(1, float(text))


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ({"c": 5}, {"c": 1.5}),
        ({"c": 5}, {"c": True}),
        ({"c": 5}, {"c": "7"}),
        ({"c": 5}, {"c": 2**53 + 1}),
        ({"t": 0.5}, {"t": False}),
        ({"t": 0.5}, {"t": "1.5"}),
        ({"s": "a"}, {"s": 12}),
        ({"s": "a"}, {"s": 1e3}),
        ({"s": "a"}, {"s": "12"}),
        ({"s": "a"}, {"s": True}),
        ({"s": "a"}, {"s": "true"}),
        ({"l": ["a"]}, {"l": [5]}),
        ({"g": [1, 2, 3]}, {"g": [1.5, 2, 3]}),
        ({"g": [1, 2, 3]}, {"g": [1, None, 3]}),
    ],
)
def test_one_odd_value_is_read_as_it_stands(usual: dict[str, Any], odd: dict[str, Any]) -> None:
    rows = [*[usual] * LEAST_ROWS, odd]
    (name,) = usual
    assert read(rows, name).equals(plain(rows, name), null_equal=True)
    assert read([odd, *rows], name).equals(plain([odd, *rows], name), null_equal=True)


def test_halves_of_characters_are_read_as_python_reads_them() -> None:
    told = pl.Series(['{"s":"\\ud83d\\ude00"}'] * LEAST_ROWS)
    assert texts(columns_of(told, WANTED)["s"])[0] == "\U0001f600"


def test_a_name_inside_a_text_is_no_attribute() -> None:
    told = pl.Series([json.dumps({"s": 'say "c":1'}, separators=(",", ":"))] * LEAST_ROWS)
    assert "c" not in columns_of(told, WANTED)


def test_resources_are_read_once_each() -> None:
    told = pl.Series(['{"v":"1"}', "{}", None, '{"v":"2"}'] * 100)
    found = repeated_columns(told, ["v", "w"])
    assert {key: list(values) for key, values in found.items()} == {"v": ["1", None, None, "2"] * 100}
    assert repeated_columns(told, []) == {}
    assert list(repeated_columns(told.head(1).new_from_index(0, 3), ["v"])["v"]) == ["1"] * 3


def test_resources_may_mix_kinds_of_values() -> None:
    told = pl.Series(['{"v":1}', '{"v":"1"}', '{"v":[2]}', "{}"] * 2)
    assert list(repeated_columns(told, ["v"])["v"]) == [1, "1", [2], None] * 2
