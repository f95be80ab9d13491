"""The newest rows of each instance, as attribution sees rows: the first attribution of new ones needs their neighbours at once, and
reading them back from the store would cost as much again.

They are a convenience: after a start there are none, and what changes in the store afterwards changes nothing here. What is said of
provisional rows with their help is said anew from the store when the rows become final.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from phasewise.collector.scope import CONTEXT_SCHEMA, LEAST_ROWS, ROWS_RATIO

TOTAL_ROWS = 200_000  # of all instances; beyond, those go whose last row came longest ago


class NewestRows:
    """As many rows of an instance as are looked at beside a batch like its last one."""

    def __init__(self) -> None:
        self._rows: dict[str, pl.DataFrame] = {}  # in the order of their last news
        self._total = 0

    def of(self, instances: Iterable[str]) -> pl.DataFrame:
        """Rows of a replica."""
        found = [self._rows[name] for name in instances if name in self._rows]
        return pl.concat(found) if found else pl.DataFrame(schema=CONTEXT_SCHEMA)

    def add(self, instance: str, rows: pl.DataFrame) -> None:
        """New rows of an instance."""
        before = self._rows.pop(instance, None)
        own = rows.select(list(CONTEXT_SCHEMA))
        kept = max(LEAST_ROWS, round(ROWS_RATIO * own.height))
        together = own if before is None else pl.concat([before, own])
        if together.height > kept:
            together = together.top_k(kept, by="finished_unix_ns")
        self._total += together.height - (0 if before is None else before.height)
        self._rows[instance] = together
        while self._total > TOTAL_ROWS and len(self._rows) > 1:
            self._total -= self._rows.pop(next(iter(self._rows))).height
