"""The newest rows of each instance, as attribution sees rows: the first attribution of new ones needs their neighbours at once, and
reading them back from the store would cost as much again.

They are a convenience: after a start there are none, and what changes in the store afterwards changes nothing here. What is said of
provisional rows with their help is said anew from the store when the rows become final.
"""

from __future__ import annotations

import polars as pl

from phasewise.collector.scope import CONTEXT_SCHEMA, LEAST_ROWS, OF, ROWS_RATIO

TOTAL_ROWS = 200_000  # of all instances; beyond, those go whose last row came longest ago


class NewestRows:
    """rows: as many of each instance (CONTEXT_SCHEMA) as are looked at beside a batch like its last one."""

    def __init__(self) -> None:
        self.rows = pl.DataFrame(schema=CONTEXT_SCHEMA)
        self._kept: dict[str, int] = {}  # how many of each, in the order of their last news

    def add(self, new: pl.DataFrame) -> None:
        """New rows of any instances (`of`)."""
        for instance, n in new.group_by("of", maintain_order=True).len().iter_rows():
            self._kept.pop(instance, None)
            self._kept[instance] = max(LEAST_ROWS, round(ROWS_RATIO * n))
        together = pl.concat([self.rows, new.select(list(CONTEXT_SCHEMA))])
        rank = pl.col("finished_unix_ns").rank("ordinal", descending=True).over(OF)
        self.rows = together.filter(rank <= OF.replace_strict(self._kept, return_dtype=pl.UInt32))
        if len(self.rows) > TOTAL_ROWS:
            self._forget()

    def _forget(self) -> None:
        sizes = dict(self.rows.group_by(OF).len().iter_rows())
        total = len(self.rows)
        for oldest in list(self._kept)[:-1]:
            if total <= TOTAL_ROWS:
                break
            del self._kept[oldest]
            total -= sizes[oldest]
        self.rows = self.rows.filter(OF.is_in(list(self._kept)))
