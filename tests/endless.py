"""Reads of a store that would take hours, so that what happens then can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from phasewise.collector.store import Store

# A few bytes ask for it, and nothing in it can be answered from statistics.
ENDLESS = (
    "SELECT sum(a.range * b.range % 7) AS s FROM range(10000000) a, range(10000000) b WHERE a.range % 7 = b.range % 5"
)

# Words of the SQL that one part of a page reads with, and no other part of it.
VERDICT, LIST, HEAT, ENGINE = (
    "FROM requests WHERE",
    "NULLS LAST",
    '"bin",\n    CAST(FLOOR(LOG',
    's."kv_usage_ratio" FROM "engine_samples"',
)


def slow_down(store: Store, words: str) -> None:
    """Every read whose SQL has these words takes for ever; `words` that occur nowhere make the store fast again."""
    query = Store.query

    def slowed(sql: str, parameters: Sequence[object] = (), **more: Any) -> pl.DataFrame:
        return (
            query(store, ENDLESS, **more | {"order_by": ()}) if words in sql else query(store, sql, parameters, **more)
        )

    store.query = slowed  # type: ignore[method-assign]
