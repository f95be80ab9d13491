"""Filters become conditions with bound values; nothing a user writes reaches the text of a statement."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import attributed, make_request, request_table
from hypothesis import given
from hypothesis import strategies as st

from phasewise.analyzer.dimensions import DIMENSIONS, UNKNOWN, dimension, metric
from phasewise.analyzer.filters import FILTER_KEYS, condition, conditions, filter_key, rows_in
from phasewise.analyzer.window import OPERATORS, Filter, Window, parse_filter
from phasewise.collector.store import Store
from phasewise.rules.errors import InputError

ALL_TIME = Window(0, 2**62)


def counted(store: Store, *texts: str) -> int:
    rows = rows_in(ALL_TIME, [parse_filter(text) for text in texts])
    return int(store.query(f"SELECT count(*) AS n FROM requests WHERE {rows.sql}", rows.parameters)["n"][0])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "test.duckdb")
    rows = [
        make_request(model="a", queue_s=0.05, cached_tokens=0, input_tokens=100),
        make_request(model="b", queue_s=3.0, cached_tokens=60, input_tokens=100),
        make_request(model="c", queue_s=5.0, input_tokens=4096, outcome="refused"),
        make_request(model=None, queue_s=5.0, input_tokens=None),
        make_request(model="it's; DROP TABLE requests --", queue_s=0.01),
    ]
    with opened.write() as transaction:
        transaction.insert("requests", request_table([attributed(row) for row in rows]))
    return opened


@pytest.mark.parametrize(
    ("texts", "n"),
    [
        ((), 4),
        (("model:eq:a",), 1),
        (("model:eq:a", "model:eq:b"), 2),
        (("model_name:in:a,b",), 2),
        (("model:ne:a",), 3),
        (("model:exists:false",), 1),
        (("model:prefix:it's",), 1),
        (("model:eq:it's; DROP TABLE requests --",), 1),
        (("queue:gt:80ms",), 2),
        (("queue_s:ge:3", "model:exists:true"), 1),
        (("cached_ratio:ge:50%",), 1),
        (("cached_ratio:eq:0",), 1),
        (("cached_ratio:exists:false",), 2),
        (("input_tokens:ge:0.1k",), 3),
        (("final:eq:true",), 4),
    ],
)
def test_filters_keep_the_rows_they_say(store: Store, texts: tuple[str, ...], n: int) -> None:
    assert counted(store, *texts) == n


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("modl:eq:a", "did you mean 'model'"),
        ("zzz:eq:a", "keys are model"),
        ("ttft:gt:soon", "like 2s or 80ms"),
        ("ttft:gt:1e999", "like 2s or 80ms"),
        ("ttft:gt:5%", "like 2s or 80ms"),
        ("input_tokens:gt:2s", "like 4096 or 4k"),
        ("model:exists:maybe", "model:exists:true"),
        ("ttft:prefix:1", "use ge and le"),
        ("final:eq:1", "true or false"),
    ],
)
def test_a_wrong_filter_says_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        condition(parse_filter(text))


@given(st.sampled_from(sorted(FILTER_KEYS)), st.sampled_from(OPERATORS), st.text())
def test_the_statement_does_not_depend_on_the_value(key: str, op: str, value: str) -> None:
    try:
        made = condition(Filter(key, op, value))
    except InputError:
        return
    plain = {"exists": value, "in": "1,2"}.get(op, "true" if FILTER_KEYS[key].kind == "truth" else "1")
    assert made.sql == condition(Filter(key, op, plain)).sql


@given(st.text())
def test_any_other_key_is_refused(text: str) -> None:
    try:
        known = filter_key(text)
    except InputError:
        return
    assert known in FILTER_KEYS.values()


def test_no_filter_is_no_condition() -> None:
    assert conditions([]).sql == "TRUE"


@pytest.mark.parametrize("name", [name for name, found in DIMENSIONS.items() if found.edges is not None])
def test_the_filters_of_a_bucket_keep_its_requests_and_no_others(name: str, tmp_path: Path) -> None:
    found = dimension(name)
    rows = [
        make_request(input_tokens=tokens, output_tokens=tokens, concurrency_at_arrival=tokens, cached_tokens=cached)
        for tokens, cached in [
            (1, 0),
            (2, None),
            (15, 1),
            (16, 15),
            (127, 64),
            (128, 127),
            (130, 1),
            (4096, 4096),
            (40000, 0),
        ]
    ]
    with Store(tmp_path / "test.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("requests", request_table(rows))
        seen = 0
        for label in (*found.labels, UNKNOWN):
            rows_of = rows_in(ALL_TIME, found.filters(label))
            seen += int(
                store.query(f"SELECT count(*) AS n FROM requests WHERE {rows_of.sql}", rows_of.parameters)["n"][0]
            )
    assert seen == len(rows)


@pytest.mark.parametrize("look_up", [dimension, metric])
def test_unknown_names_are_suggested(look_up: object) -> None:
    with pytest.raises(InputError, match="did you mean"):
        look_up("inptu" if look_up is dimension else "ttftt")  # type: ignore[operator]
