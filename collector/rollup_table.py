"""Hourly rollups as Arrow tables: what is kept of hours whose rows are gone, and what an export holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from phasewise.collector.lake import HOUR_NS
from phasewise.collector.tables import ROLLUP_HISTOGRAMS, ROLLUP_SUMS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

if TYPE_CHECKING:
    from phasewise.collector.transaction import Transaction

HOURLY_S = 3600
KEY = ("bucket_unix_ns", "input_log2", "output_log2", "model", "instance", "cause", "outcome")
_COUNTS = ("requests", "input_tokens", "output_tokens", "preemptions")
# In the store sums are wider; of one hour and group they stay below 2^63 ns, which 2.5 million requests at any time would take.
_SUMS = (
    *(f"{name}_ns" for name in ROLLUP_SUMS),
    *(f"{name.removesuffix('_s')}_ns" for name in CAUSE_COLUMNS),
)
_HISTOGRAMS = tuple(f"{name}_histogram" for name in ROLLUP_HISTOGRAMS)
_BUCKETS = pa.list_(pa.struct([("key", pa.int32()), ("value", pa.uint64())]))
SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("width_s", "bucket_unix_ns", "input_log2", "output_log2")),
        *((name, pa.string()) for name in ("model", "instance", "cause", "outcome")),
        *((name, pa.int64()) for name in (*_COUNTS, *_SUMS)),
        *((name, _BUCKETS) for name in _HISTOGRAMS),
    ]
)
# The columns of SCHEMA out of the table `rollups`.
SELECTED = ", ".join(
    [
        *(f'"{field.name}"' for field in SCHEMA if field.name not in (*_SUMS, *_HISTOGRAMS)),
        *(f'CAST("{name}" AS BIGINT) AS "{name}"' for name in _SUMS),
        *(f'map_entries("{name}") AS "{name}"' for name in _HISTOGRAMS),
    ]
)
_MAPS = ", ".join(f'map_from_entries("{name}") AS "{name}"' for name in _HISTOGRAMS)


def add_rollups(transaction: Transaction, rows: pa.Table) -> None:
    """Hourly rollups (SCHEMA) into the store, those that have no row of the same key there."""
    if rows.num_rows:
        same = " AND ".join(f"t.{name} IS NOT DISTINCT FROM n.{name}" for name in KEY)
        transaction.run(
            f"INSERT INTO main.rollups BY NAME SELECT * REPLACE ({_MAPS}) FROM new_rows n WHERE NOT EXISTS "
            f"(SELECT 1 FROM main.rollups t WHERE t.width_s = {HOURLY_S} AND {same})",
            new_rows=rows,
        )


def take_fuller(transaction: Transaction, rows: pa.Table) -> pa.Table:
    """Of hourly rollups (SCHEMA; of each hour all that were told) those that speak of more requests of an instance in an hour than the
    store's own, which then go. Not where the store has unsealed requests of other instances in that hour: these may change it yet."""
    found = transaction.query(
        f"""
        WITH told AS (SELECT bucket_unix_ns, instance, sum(requests) AS n FROM new_rows GROUP BY ALL),
        own AS (SELECT bucket_unix_ns, instance, sum(requests) AS n FROM main.rollups WHERE width_s = {HOURLY_S} GROUP BY ALL),
        busy AS (
          SELECT DISTINCT r.finished_unix_ns // {HOUR_NS} * {HOUR_NS} AS start FROM main.requests r WHERE NOT EXISTS (
            SELECT 1 FROM told t WHERE t.bucket_unix_ns = r.finished_unix_ns // {HOUR_NS} * {HOUR_NS}
              AND t.instance IS NOT DISTINCT FROM r.instance))
        SELECT t.bucket_unix_ns, t.instance FROM told t
        LEFT JOIN own o ON o.bucket_unix_ns = t.bucket_unix_ns AND o.instance IS NOT DISTINCT FROM t.instance
        WHERE t.n > coalesce(o.n, 0) AND t.bucket_unix_ns NOT IN (SELECT start FROM busy)
        """,
        new_rows=rows,
    )
    same = "f.bucket_unix_ns = t.bucket_unix_ns AND f.instance IS NOT DISTINCT FROM t.instance"
    transaction.run(
        f"DELETE FROM main.rollups t WHERE width_s = {HOURLY_S} AND EXISTS (SELECT 1 FROM fuller f WHERE {same})",
        fuller=found,
    )
    taken = transaction.query(
        f"SELECT t.* FROM new_rows t WHERE EXISTS (SELECT 1 FROM fuller f WHERE {same})", new_rows=rows, fuller=found
    )
    return taken.select(SCHEMA.names).to_arrow().cast(SCHEMA)


def mark_expired(transaction: Transaction, hours: list[int], now_unix_ns: int) -> None:
    """Hours of which there are rollups alone: rows that come late do not change them."""
    transaction.execute(
        "UPDATE main.sealed_hours SET expired_unix_ns = coalesce(expired_unix_ns, ?) WHERE list_contains(?, hour)",
        [now_unix_ns, hours],
    )
    transaction.execute(
        "INSERT INTO main.sealed_hours BY NAME SELECT hour, 0 AS generation, 'expired' AS state, ? AS sealed_unix_ns, "
        "0 AS rows, ? AS expired_unix_ns FROM (SELECT unnest(?::BIGINT[]) AS hour) n "
        "WHERE NOT EXISTS (SELECT 1 FROM main.sealed_hours s WHERE s.hour = n.hour)",
        [now_unix_ns, now_unix_ns, hours],
    )
