"""Waiting for a request: who asks again and again for one that is not there costs the store one look a change of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from builders import make_request, request_table
from stocked import Served

ADDRESS = "/api/v1/requests/awaited"


@pytest.fixture
def looks(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that asked for it."""
    found: list[str] = []
    query = served.store.query

    def noted(sql: str, parameters: Sequence[object] = (), **more: Any) -> pl.DataFrame:
        if "awaited" in parameters:
            found.append(sql)
        return query(sql, parameters, **more)

    monkeypatch.setattr(served.store, "query", noted)
    return found


def status(served: Served) -> int:
    return int(served.client.get(ADDRESS).status_code)


def test_it_is_looked_for_once_until_rows_change(served: Served, looks: list[str]) -> None:
    assert [status(served) for _ in range(5)] == [404] * 5
    assert len(looks) == 1
    with served.store.write() as transaction:
        transaction.execute("INSERT INTO main.counters VALUES ('other', '', 1)")
    assert status(served) == 404
    assert len(looks) == 1
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([make_request(request_id="another")]))
    assert [status(served) for _ in range(5)] == [404] * 5
    assert len(looks) == 2
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([make_request(request_id="awaited")]))
    assert status(served) == 200


def test_what_is_rolled_back_changes_nothing(served: Served, looks: list[str]) -> None:
    assert status(served) == 404
    with pytest.raises(ZeroDivisionError), served.store.write() as transaction:
        transaction.insert("requests", request_table([make_request(request_id="awaited")]))
        raise ZeroDivisionError
    assert status(served) == 404
    assert len(looks) == 1


def test_a_row_that_is_changed_is_found_by_its_new_name(served: Served) -> None:
    assert status(served) == 404
    with served.store.write() as transaction:
        transaction.execute("UPDATE requests SET client_request_id = 'awaited' WHERE instance = 'gpu-0'")
    assert status(served) == 200


def test_a_broken_store_is_told_all_the_same(served: Served) -> None:
    assert status(served) == 404
    served.store.close()
    assert status(served) == 503
