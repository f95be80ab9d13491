"""The scrapes of a time: all of them, or so many that what is read of them does not grow with the window.

Counters are cumulative: between two scrapes that are kept they moved by what they moved by. Kept are the last scrape of each stretch
of the window, the first of each engine, those around a restart, and all of the last minutes, which tell of requests in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from phasewise.analyzer.draw import Drawn
from phasewise.analyzer.window import Window

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

MOST_SCRAPES = 50_000
_RECENT_NS = 180 * 10**9
_IN_TIME = "unix_ns >= ? AND unix_ns < ?"
_KEPT = f"""
SELECT instance, unix_ns FROM (
  SELECT instance, unix_ns,
    row_number() OVER (PARTITION BY instance, (unix_ns - ?) // ? ORDER BY unix_ns DESC) = 1 AS ends,
    lag(unix_ns) OVER one IS NULL AS begins,
    coalesce(counted < lag(counted) OVER one, FALSE) OR coalesce(lead(counted) OVER one < counted, FALSE) AS restarts
  FROM (
    SELECT instance, unix_ns, coalesce(finished, ttft_count, output_tokens) AS counted FROM engine_samples WHERE {_IN_TIME}
  )
  WINDOW one AS (PARTITION BY instance ORDER BY unix_ns)
) WHERE ends OR begins OR restarts OR unix_ns >= ?
"""


def read_scrapes(
    store: Reader, window: Window, from_unix_ns: int, to_unix_ns: int
) -> tuple[pl.DataFrame, Drawn | None]:
    """Rows of `engine_samples` by instance and time, and how many of how many they are where that is not all. window: its beginning is
    that of a stretch, so that nothing that counters moved by before it is counted."""
    told = store.query(
        "SELECT count(*) AS n, count(DISTINCT instance) AS instances, min(unix_ns) AS first, max(unix_ns) AS last"
        f" FROM engine_samples WHERE {_IN_TIME}",
        (from_unix_ns, to_unix_ns),
    ).row(0, named=True)
    if told["n"] <= MOST_SCRAPES:
        every = f"SELECT * FROM engine_samples WHERE {_IN_TIME} ORDER BY instance, unix_ns"
        return store.query(every, (from_unix_ns, to_unix_ns)), None
    first, last = told["first"], told["last"]
    width = (last - first) // max(MOST_SCRAPES // told["instances"], 1) + 1
    origin = window.from_unix_ns - -(-max(window.from_unix_ns - first, 0) // width) * width
    found = store.query(
        f"SELECT * FROM engine_samples WHERE {_IN_TIME} AND (instance, unix_ns) IN ({_KEPT}) ORDER BY instance, unix_ns",
        (from_unix_ns, to_unix_ns, origin, width, from_unix_ns, to_unix_ns, last - _RECENT_NS),
    )
    return found, Drawn(len(found), told["n"])
