"""Histograms of rollups out of rows and out of finer rollups: entries sorted as numbers, not one by one in a tree for every group.

A frame of histograms has the columns of KEYS, each combination once, and `NAME_histogram` as DuckDB's MAP(INTEGER, UBIGINT): bucket to
count, by bucket; NULL where no row of the group has that duration.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from phasewise.collector.tables import ROLLUP_HISTOGRAMS

KEYS = ("bucket_unix_ns", "input_log2", "output_log2", "model", "instance", "cause", "outcome")
PLACE = "place"  # of a group among those of a frame
_Numbers = npt.NDArray[np.int64]
_LOWEST = 2**31  # so that no bucket is below zero
_HISTOGRAM = pa.map_(pa.int32(), pa.uint64())


def of_rows(rows: pl.DataFrame) -> pa.Table:
    """rows: KEYS, and the bucket of each duration in a column of its name, null where it is unknown."""
    groups = rows.group_by(KEYS).agg(ROLLUP_HISTOGRAMS)
    found = {}
    for name in ROLLUP_HISTOGRAMS:
        places = np.repeat(np.arange(groups.height), groups[name].list.len().to_numpy())
        buckets = groups[name].explode()
        known = buckets.is_not_null().to_numpy()
        found[name] = _maps(groups.height, places[known], buckets.drop_nulls().to_numpy(), None)
    return _table(groups, found)


def of_entries(groups: pl.DataFrame, entries: pl.DataFrame) -> pa.Table:
    """groups: KEYS, at their place; entries: place of the group, `of` (the number of the duration in ROLLUP_HISTOGRAMS), bucket, n."""
    found = {}
    for number, name in enumerate(ROLLUP_HISTOGRAMS):
        own = entries.filter(pl.col("of") == number)
        found[name] = _maps(groups.height, own[PLACE].to_numpy(), own["bucket"].to_numpy(), own["n"].to_numpy())
    return _table(groups, found)


def _table(groups: pl.DataFrame, found: dict[str, pa.MapArray]) -> pa.Table:
    table = groups.select(KEYS).to_arrow()
    for name, histograms in found.items():
        table = table.append_column(f"{name}_histogram", histograms)
    return table


def _maps(
    height: int, places: _Numbers, buckets: npt.NDArray[np.int32], counts: npt.NDArray[np.uint64] | None
) -> pa.MapArray:
    """One map for each of `height` groups. counts: None where each entry counts once."""
    numbers = (places.astype(np.int64) << 32) + (buckets.astype(np.int64) + _LOWEST)
    if counts is None:
        numbers.sort()
    else:
        order = np.argsort(numbers)
        numbers, counts = numbers[order], counts[order]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    if counts is None:
        totals = np.diff(starts, append=len(numbers)).astype(np.uint64)
    else:
        totals = np.add.reduceat(counts, starts) if len(starts) else counts
    different = numbers[starts]
    offsets = np.searchsorted(different >> 32, np.arange(height + 1))
    keys = ((different & (2**32 - 1)) - _LOWEST).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), keys, totals, type=_HISTOGRAM, mask=pa.array(offsets[1:] == offsets[:-1])
    )
