"""Lists of requests: paged by the last row seen, so that rows arriving in between move nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pytest
from builders import START_UNIX_NS, make_request, request_table

from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.listing import (
    SORT_KEYS,
    Order,
    count_requests,
    find_requests,
    neighbours,
    parse_order,
    request_page,
)
from phasewise.analyzer.window import Window
from phasewise.collector.records import Request
from phasewise.collector.store import Store
from phasewise.rules.errors import InputError

ALL = rows_in(Window(0, 2**62))


def insert(store: Store, rows: list[Request]) -> None:
    with store.write() as transaction:
        transaction.insert("requests", request_table(rows))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "test.duckdb") as opened:
        yield opened


def paged(store: Store, order: Order, limit: int) -> list[str]:
    keys: list[str] = []
    cursor: str | None = None
    while True:
        page = request_page(store, ALL, order, cursor=cursor, limit=limit)
        keys += page.rows["request_key"].to_list()
        if page.next_cursor is None:
            return keys
        cursor = page.next_cursor


@pytest.mark.parametrize("text", ["finished:desc", "ttft:asc", "ttft:desc", "cached_tokens:desc", "cached_tokens:asc"])
def test_pages_together_are_the_whole_list_in_order(store: Store, text: str) -> None:
    chance = random.Random(1)
    insert(store, [make_request(at_s=i // 3, cached_tokens=chance.choice([None, 0, 7])) for i in range(57)])
    order = parse_order(text)
    column = SORT_KEYS[order.key]
    keys = paged(store, order, 10)
    whole = store.query(f'SELECT request_key, "{column}" AS v FROM requests').to_dicts()
    known = [row for row in whole if row["v"] is not None]
    known.sort(key=lambda row: row["request_key"])
    known.sort(key=lambda row: row["v"], reverse=order.descending)
    unknown = sorted(row["request_key"] for row in whole if row["v"] is None)
    assert keys == [row["request_key"] for row in known] + unknown
    assert count_requests(store, ALL) == 57


def test_rows_that_arrive_while_paging_move_nothing(store: Store) -> None:
    insert(store, [make_request(at_s=i) for i in range(20)])
    before = request_page(store, ALL, Order(), limit=10)
    insert(store, [make_request(at_s=100 + i) for i in range(5)])
    after = request_page(store, ALL, Order(), cursor=before.next_cursor, limit=10)
    seen = before.rows["request_key"].to_list() + after.rows["request_key"].to_list()
    assert len(set(seen)) == 20
    assert after.rows["finished_unix_ns"].max() < before.rows["finished_unix_ns"].min()  # type: ignore[operator]


@pytest.mark.parametrize("cursor", ["garbage!", "W10", "WyJlMmU6ZGVzYyIsIDEsICJhIl0", "é"])
def test_a_cursor_that_is_not_ours_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InputError, match="start without one"):
        request_page(store, ALL, Order(), cursor=cursor)


def test_orders_and_limits_are_allow_listed(store: Store) -> None:
    with pytest.raises(InputError, match="did you mean 'ttft'"):
        parse_order("tfft:desc")
    with pytest.raises(InputError, match="asc or desc"):
        parse_order("ttft:down")
    with pytest.raises(InputError, match="between 1 and"):
        request_page(store, ALL, Order(), limit=0)


def test_a_request_is_found_by_any_of_its_names(store: Store) -> None:
    row = make_request(client_request_id="x-1")
    insert(store, [row, make_request()])
    for name in (row.request_key, row.trace_id, row.request_id, "x-1"):
        assert find_requests(store, str(name))["request_key"].to_list() == [row.request_key]
    assert find_requests(store, "nobody").is_empty()


class Watched:
    """A store that tells what it was asked; `then` happens after the first question."""

    def __init__(self, store: Store, then: str = "") -> None:
        self.store, self.then = store, then
        self.asked: list[str] = []

    def query(self, sql: str, parameters: Sequence[object] = (), *, order_by: Sequence[str] = ()) -> pl.DataFrame:
        found = self.store.query(sql, parameters, order_by=order_by)
        if self.then and not self.asked:
            with self.store.write() as transaction:
                transaction.execute(self.then)
        self.asked.append(sql)
        return found


def test_whoever_waits_for_a_request_has_only_names_read(store: Store) -> None:
    insert(store, [make_request()])
    watched = Watched(store)
    assert find_requests(watched, "not-yet").is_empty()
    (asked,) = watched.asked
    assert "*" not in asked


def test_a_row_that_is_written_anew_meanwhile_is_found_all_the_same(store: Store) -> None:
    row = make_request()
    insert(store, [row, make_request()])
    watched = Watched(store, "UPDATE requests SET finished_unix_ns = finished_unix_ns + 5000000000")
    found = find_requests(watched, row.request_key)
    assert found["request_key"].to_list() == [row.request_key]
    assert found["finished_unix_ns"].to_list() == [row.finished_unix_ns + 5 * 10**9]


def test_neighbours_are_those_whose_prefill_overlapped(store: Store) -> None:
    me = make_request(at_s=0, decode_s=5.0)
    inside = make_request(at_s=2, prefill_s=1.0)
    before = make_request(at_s=-10, prefill_s=1.0)
    elsewhere = make_request(at_s=2, prefill_s=1.0, instance="gpu-7")
    insert(store, [me, inside, before, elsewhere])
    row = find_requests(store, me.request_key).row(0, named=True)
    found = neighbours(store, row)
    assert found["request_key"].to_list() == [inside.request_key]
    assert found["prefill_from_unix_ns"][0] == START_UNIX_NS + 2_010_000_000
