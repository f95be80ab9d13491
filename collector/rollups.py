"""Rollups: one row a 10 s, minute or hour, model, instance, shape, cause and outcome; dirty buckets are rebuilt.

Rows of `requests` are the source of all three, so they must be kept at least as long as a row may still come late.
A shape is the whole part of the binary logarithm of prompt and of output length, NULL where the length is unknown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from phasewise.collector.cold import Reading
from phasewise.collector.rollup_histograms import KEYS, PLACE, of_entries, of_rows
from phasewise.collector.tables import GAMMA, ROLLUP_HISTOGRAMS, ROLLUP_SUMS
from phasewise.collector.transaction import Transaction
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

SECOND_NS = 10**9
TEN_S_NS = 10 * SECOND_NS
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 3600 * SECOND_NS
# A busy writer rebuilds what no row was written into for so long: most minutes once, when their rows have become final.
QUIET_NS = 120 * SECOND_NS
# An idle one rebuilds at once what is final, or cheap: a minute into which more rows were written waits until they change no more.
LIVE_ROWS = 5_000
LEAST_REST_NS = 5 * SECOND_NS
CHEAP_NS = SECOND_NS  # rebuilding that took longer rests RATIO times as long: a busy hour holds many rows
RATIO = 20
_PART_ROWS = 250_000  # of requests whose histograms are counted together
POSITION = "dirty_rollups"  # among the positions


@dataclass(slots=True)
class _Written:
    """Into a minute: when last (writer's clock; 0 where that is not known any more), and how many rows."""

    at_ns: int = 0
    rows: int = 0


class DirtyRollups:
    """Minutes and hours whose rollups do not say what the rows say.

    They are part of what is committed with the rows: after a crash they are still known.
    """

    def __init__(self, stored: str | None = None) -> None:
        told = json.loads(stored) if stored else {}
        self._minutes = {int(minute): _Written() for minute in told.get("minutes", ())}
        self._hours = {int(hour): 0 for hour in told.get("hours", ())}  # when they were written into last
        self._stored = stored or ""
        self._rest_until_ns = 0

    def add(self, rows: pl.DataFrame, now_ns: int) -> None:
        """Rows (finished_unix_ns) were written. Those of the future are in no rollup: they are written once more, as final ones, when
        their time has come."""
        past = rows["finished_unix_ns"].filter(rows["finished_unix_ns"] <= now_ns + FUTURE_NS)
        for minute, count in (past // MINUTE_NS * MINUTE_NS).value_counts().iter_rows():
            written = self._minutes.setdefault(minute, _Written())
            written.at_ns, written.rows = now_ns, written.rows + count
            self._hours[minute // HOUR_NS * HOUR_NS] = now_ns

    def is_due(self, now_ns: int, idle: bool, provisional_from_unix_ns: int) -> bool:
        """Whether `rebuild` would do anything now."""
        return now_ns >= self._rest_until_ns and any(self._due(now_ns, idle, provisional_from_unix_ns))

    def rebuild(self, transaction: Transaction, now_ns: int, idle: bool, provisional_from_unix_ns: int) -> None:
        """Rebuild what is quiet; when the writer is idle also what is cheap, and what lies before the end of the first row that is not
        final."""
        minutes, hours = self._due(now_ns, idle, provisional_from_unix_ns)
        started = time.monotonic()
        rebuild(transaction, minutes, hours)
        spent_ns = int((time.monotonic() - started) * 1e9)
        self._rest_until_ns = now_ns + (LEAST_REST_NS if spent_ns < CHEAP_NS else RATIO * spent_ns)
        for minute in minutes:
            del self._minutes[minute]
        for hour in hours:
            del self._hours[hour]

    def _due(self, now_ns: int, idle: bool, provisional_from_unix_ns: int) -> tuple[list[int], list[int]]:
        """Minutes to rebuild, and hours, none of whose minutes has to wait."""
        quiet_since_ns = now_ns - QUIET_NS
        minutes = [
            start
            for start, written in self._minutes.items()
            if written.at_ns <= quiet_since_ns
            or (idle and (written.rows <= LIVE_ROWS or start + MINUTE_NS <= provisional_from_unix_ns))
        ]
        waiting = {start // HOUR_NS * HOUR_NS for start in self._minutes.keys() - set(minutes)}
        hours = [
            start for start, at_ns in self._hours.items() if at_ns <= quiet_since_ns or (idle and start not in waiting)
        ]
        return minutes, hours

    def rebuild_all(self, transaction: Transaction) -> None:
        """Rebuild everything that is dirty."""
        rebuild(transaction, self._minutes, self._hours)
        self._minutes.clear()
        self._hours.clear()

    def store(self, transaction: Transaction) -> None:
        """Write which they are, where that changed."""
        told = ""
        if self._minutes or self._hours:
            told = json.dumps({"minutes": sorted(self._minutes), "hours": sorted(self._hours)})
        if told != self._stored:
            transaction.execute("DELETE FROM positions WHERE name = ?", [POSITION])
            if told:
                transaction.execute("INSERT INTO positions VALUES (?, ?)", [POSITION, told])
            self._stored = told


def rebuild(transaction: Transaction, minutes: Collection[int], hours: Collection[int], *, cold: bool = False) -> None:
    """Make anew, from the hot `requests` (`cold`: and those of sealed hours), the rollups of these minutes and of the 10 s inside
    them, and those of these hours (as Unix nanoseconds of their start).

    Minutes are summed up from their 10 s, hours from their minutes, none of which may be dirty without being among `minutes`: a busy
    hour holds many rows. Durations are summed as whole nanoseconds, so the sums do not depend on the order of rows. Bucket b of a
    histogram holds values from GAMMA^b up to GAMMA^(b+1) seconds; zero and less stand in bucket -2000000000. An hour whose rows
    expired once keeps what they said: what comes late for it is in its minutes only.
    """
    if hours:
        hours = set(hours) - _expired(transaction, min(hours), max(hours))
    if cold and minutes:
        transaction.look_back("requests", within=(min(minutes), max(minutes) + MINUTE_NS))
    schema = "whole" if cold else "main"
    for width_s, span_ns, chosen in ((10, MINUTE_NS, minutes), (60, MINUTE_NS, minutes), (3600, HOUR_NS, hours)):
        if chosen:
            starts = sorted(chosen)
            dirty = _dirty(starts)
            transaction.run(_DELETE, [width_s, starts[0], starts[-1] + span_ns, span_ns, span_ns], dirty=dirty)
    for part in _parts(transaction, schema, sorted(minutes)):
        _insert_sums(transaction, part, MINUTE_NS, _from_rows(schema), _histograms_of_rows(transaction, part, schema))
        _merge(transaction, part, MINUTE_NS, 60, 10)
    for hour in sorted(hours):
        _merge(transaction, [hour], HOUR_NS, 3600, 60)


def _parts(transaction: Transaction, schema: str, minutes: list[int]) -> Iterator[list[int]]:
    """Minutes that hold few enough rows to be looked at together; each alone where it is busy."""
    if not minutes:
        return
    found = transaction.query(
        f"SELECT finished_unix_ns // {MINUTE_NS} * {MINUTE_NS} AS start_unix_ns, count(*) AS n FROM {schema}.requests "
        "WHERE finished_unix_ns >= ? AND finished_unix_ns < ? GROUP BY 1",
        [minutes[0], minutes[-1] + MINUTE_NS],
    )
    rows = dict(found.iter_rows())
    part: list[int] = []
    held = 0
    for minute in minutes:
        own = rows.get(minute, 0)
        if part and held + own > _PART_ROWS:
            yield part
            part, held = [], 0
        if own:
            part.append(minute)
            held += own
    if part:
        yield part


def _histograms_of_rows(transaction: Transaction, minutes: list[int], schema: str) -> pa.Table:
    """Of the 10 s inside these minutes, which are looked at one after the other where a minute alone holds many rows."""
    low, high = minutes[0], minutes[-1] + MINUTE_NS
    step = high - low if len(minutes) > 1 else TEN_S_NS
    told = f"""
        SELECT {_group(10)}, {", ".join(_bucket(name) for name in ROLLUP_HISTOGRAMS)}
        FROM {schema}.requests WHERE {_WITHIN.format(column="finished_unix_ns", span_ns=MINUTE_NS)}"""
    found = [
        of_rows(transaction.query(told, [start, start + step], dirty=_dirty(minutes)))
        for start in range(low, high, step)
    ]
    return pa.concat_tables(found)


def _merge(transaction: Transaction, starts: list[int], span_ns: int, width_s: int, finer_s: int) -> None:
    """Rollups from finer ones, whose sums and histograms add up."""
    bounds = [starts[0], starts[-1] + span_ns]
    finer = f"""
        FROM main.rollups f WHERE width_s = {finer_s} AND {_WITHIN.format(column="bucket_unix_ns", span_ns=span_ns)}"""
    width_ns = width_s * SECOND_NS
    bucket = f"bucket_unix_ns // {width_ns} * {width_ns} AS bucket_unix_ns"
    merged = f"{bucket}, {', '.join(KEYS[1:])}"
    groups = transaction.query(
        f"SELECT {merged}, count(*) AS n {finer} GROUP BY ALL", bounds, dirty=_dirty(starts)
    ).with_row_index(PLACE)
    # A group of one is that one: DuckDB takes long to see that a histogram from outside has no bucket twice.
    alone = groups.filter(pl.col("n") == 1)
    transaction.run(
        f"INSERT INTO rollups BY NAME WITH told AS (SELECT f.* REPLACE ({width_s} AS width_s, {bucket}) {finer}) "
        f"SELECT t.* FROM told t SEMI JOIN alone g ON {_same('t', 'g')}",
        bounds,
        dirty=_dirty(starts),
        alone=alone,
    )
    several = groups.filter(pl.col("n") > 1).drop(PLACE).with_row_index(PLACE)
    if several.is_empty():
        return
    histograms = ", ".join(f"{name}_histogram" for name in ROLLUP_HISTOGRAMS)
    entries = " UNION ALL ".join(
        f"SELECT {PLACE}, {number}::UTINYINT AS of, unnest(map_entries({name}_histogram)) AS one FROM placed"
        for number, name in enumerate(ROLLUP_HISTOGRAMS)
    )
    counted = transaction.query(
        f"""
        WITH told AS (SELECT {merged}, {histograms} {finer}),
        placed AS MATERIALIZED (SELECT g.{PLACE}, t.* FROM told t JOIN several g ON {_same("t", "g")})
        SELECT {PLACE}, of, one.key AS bucket, sum(one.value)::UBIGINT AS n FROM ({entries}) GROUP BY ALL""",
        bounds,
        dirty=_dirty(starts),
        several=several,
    )
    sums = f"SELECT {width_s} AS width_s, {merged}, {', '.join(f'sum({n}) AS {n}' for n in _SUMS)} {finer} GROUP BY ALL"
    _insert_sums(transaction, starts, span_ns, sums, of_entries(several, counted))


def _insert_sums(transaction: Transaction, starts: list[int], span_ns: int, sums: str, histograms: pa.Table) -> None:
    """Write rollups: what `sums` selects, with the histogram of each."""
    told = ", ".join(f"h.{name}_histogram" for name in ROLLUP_HISTOGRAMS)
    transaction.run(
        f"INSERT INTO rollups BY NAME WITH sums AS ({sums}) "
        f"SELECT s.*, {told} FROM histograms h JOIN sums s ON {_same('s', 'h')}",
        [starts[0], starts[-1] + span_ns],
        dirty=_dirty(starts),
        histograms=histograms,
    )


def _dirty(starts: list[int]) -> pl.DataFrame:
    return pl.DataFrame({"start_unix_ns": starts}, schema={"start_unix_ns": pl.Int64})


def _expired(transaction: Transaction, low_unix_ns: int, high_unix_ns: int) -> set[int]:
    found = transaction.query(
        "SELECT hour FROM main.sealed_hours WHERE expired_unix_ns IS NOT NULL AND hour BETWEEN ? AND ?",
        [low_unix_ns // HOUR_NS, high_unix_ns // HOUR_NS],
    )
    return {hour * HOUR_NS for hour in found["hour"]}


def dirty_hours(statements: Reading) -> set[int]:
    """Hours (whole ones since 1970) with rollups that do not say what their rows say, as far as it is committed."""
    found = statements.query("SELECT position FROM main.positions WHERE name = ?", [POSITION])
    told = json.loads(found["position"].item()) if found.height else {}
    return {start // HOUR_NS for name in ("minutes", "hours") for start in told.get(name, ())}


def _nanoseconds(column: str, name: str) -> str:
    return f"sum(CAST(round({column} * 1e9) AS BIGINT)) AS {name}"


def _bucket(name: str) -> str:
    column = f"{name}_s"
    return (
        f"CASE WHEN {column} > 0 THEN CAST(floor(ln({column}) / ln({GAMMA})) AS INTEGER) "
        f"WHEN {column} IS NOT NULL THEN -2000000000 END AS {name}"
    )


def _same(left: str, right: str) -> str:
    return " AND ".join(f"{left}.{name} IS NOT DISTINCT FROM {right}.{name}" for name in KEYS)


_COLUMNS = ", ".join(
    [
        *(_nanoseconds(f"{name}_s", f"{name}_ns") for name in ROLLUP_SUMS),
        *(_nanoseconds(column, f"{column.removesuffix('_s')}_ns") for column in CAUSE_COLUMNS),
    ]
)
_COUNTS = ("requests", "input_tokens", "output_tokens", "preemptions")
_SUMS = [
    *_COUNTS,
    *(f"{name}_ns" for name in ROLLUP_SUMS),
    *(f"{name.removesuffix('_s')}_ns" for name in CAUSE_COLUMNS),
]
_WITHIN = "{column} >= ? AND {column} < ? AND {column} // {span_ns} * {span_ns} IN (SELECT start_unix_ns FROM dirty)"
_DELETE = """
DELETE FROM rollups WHERE width_s = ? AND bucket_unix_ns >= ? AND bucket_unix_ns < ?
  AND bucket_unix_ns // ? * ? IN (SELECT start_unix_ns FROM dirty)
"""


def _group(width_s: int) -> str:
    width_ns = width_s * SECOND_NS
    return f"""finished_unix_ns // {width_ns} * {width_ns} AS bucket_unix_ns,
  CAST(floor(log2(nullif(input_tokens, 0))) AS BIGINT) AS input_log2,
  CAST(floor(log2(nullif(output_tokens, 0))) AS BIGINT) AS output_log2, model, instance, cause, outcome"""


def _from_rows(schema: str) -> str:
    """The 10 s of rows, but for histograms."""
    return f"""
SELECT 10 AS width_s, {_group(10)}, count(*) AS requests, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
  sum(preemptions) AS preemptions, {_COLUMNS}
FROM {schema}.requests WHERE {_WITHIN.format(column="finished_unix_ns", span_ns=MINUTE_NS)}
GROUP BY ALL
"""
