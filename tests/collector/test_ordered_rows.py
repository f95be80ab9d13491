"""Rows in an order are the same rows, whether they are read at once or some columns at a time."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from phasewise.collector import ordered_rows
from phasewise.collector.ordered_rows import ordered
from phasewise.collector.store import Store

MANY = ordered_rows.MANY_ROWS
SQL = (
    "SELECT (i * 7919) % 1000 AS at, 'k' || hash(i) AS key, i % 3 = 0 AS c, CASE WHEN i % 5 > 0 THEN i / 7 END AS d, sum(i) OVER () AS "
    "\"all\", repeat('x', (i % 40)::INT) AS e, i AS f, i AS g, i AS h, [i] AS l FROM range(?) r(i) WHERE i > ?"
)


@pytest.mark.parametrize("rows", [0, 1, 1000, MANY + 1000])
def test_rows_are_those_of_the_question_in_the_order(tmp_path: Path, rows: int) -> None:
    with Store(tmp_path / "s.duckdb") as store:
        found = store.query(SQL, (rows + 2, 1), order_by=("at", "key"))
        assert found.height == rows
        assert_frame_equal(found, store.query(SQL, (rows + 2, 1)).sort("at", "key"))


def test_a_database_that_gives_rows_in_another_order_each_time_is_read_at_once() -> None:
    whole = pl.DataFrame({"at": range(MANY), "key": range(MANY), **{f"c{n}": range(MANY) for n in range(20)}})
    asked: list[str] = []

    def read(sql: str) -> pl.DataFrame:
        asked.append(sql)
        if sql == "rows":
            return whole.reverse()
        if "LIMIT 0" in sql:
            return whole.clear()
        names = [name for name in whole.columns if f'"{name}"' in sql]
        return whole.select(names).sample(fraction=1.0, shuffle=True, seed=len(asked))

    assert_frame_equal(ordered(read, "rows", ("at", "key")), whole)
    assert asked[-1] == "rows"
