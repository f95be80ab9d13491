"""A window of which only some requests are read: the figures that rest on all of them are made by the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from phasewise.analyzer.coverage import Sampling
from phasewise.analyzer.filters import Condition
from phasewise.analyzer.slow_set import (
    BROKEN_RATIO,
    SlowSet,
    objective_column,
    slowest,
    tenth,
)
from phasewise.analyzer.stored_sums import StoredSums, stored_sums
from phasewise.analyzer.stored_traffic import StoredTraffic
from phasewise.analyzer.window import Objective

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

EXAMPLES = 5  # of a slow set, and of each class in it
_ATTRIBUTED = '"revision" IS NOT NULL'


@dataclass(frozen=True, slots=True)
class Whole:
    """All requests of a window: what they add up to, how they came and ran, and which are under question.

    objectives: those that `slow` was chosen by; examples: the slowest of `slow`, and of each class in it.
    """

    sums: StoredSums
    traffic: StoredTraffic
    objectives: tuple[Objective, ...]
    slow: SlowSet
    examples: pl.DataFrame


def read_whole(
    store: Reader,
    rows: Condition,
    drawn: pl.DataFrame,
    traffic: StoredTraffic,
    objectives: Sequence[Objective],
    sampling: Sampling,
) -> Whole:
    """rows: served calls of the window; drawn: those that were read."""
    attributed = Condition(f"{rows.sql} AND {_ATTRIBUTED}", rows.parameters)
    own = drawn.filter(pl.col("revision").is_not_null())
    objective, over, column, count = _most_broken(store, attributed, objectives)
    broken = own.filter(pl.col(column) > objective.limit_s) if objective is not None else own.clear()
    share = over / max(count, 1)
    if sampling.strata and sampling.is_partial:  # requests stand for different numbers of them
        share = sampling.share(broken, own)
    breaks = objective is not None and share > BROKEN_RATIO
    if objective is not None and breaks:
        chosen, found = Condition(f'"{column}" > ?', (objective.limit_s,)), broken
    else:
        chosen, found = _slowest(store, attributed, own, sampling)
    slow = Condition(f"{attributed.sql} AND {chosen.sql}", (*attributed.parameters, *chosen.parameters))
    sums, slow_sums = stored_sums(store, rows, Condition(f"{_ATTRIBUTED} AND {chosen.sql}", chosen.parameters))
    return Whole(
        sums=sums,
        traffic=traffic,
        objectives=tuple(objectives),
        slow=SlowSet(objective, over if objective is not None else None, breaks, found, slow_sums),
        examples=_examples(store, slow),
    )


def _most_broken(
    store: Reader, rows: Condition, objectives: Sequence[Objective]
) -> tuple[Objective | None, int, str, int]:
    """The objective that most requests break, how many do, the column it is about, and of how many; see `slow_set.most_broken`."""
    told = store.query(
        f'SELECT count(*) AS n, count("itl_p95_s") AS gaps FROM "requests" WHERE {rows.sql}', rows.parameters
    )
    count, knows_gaps = told.row(0)
    if not objectives:
        return None, 0, "", int(count)
    columns = [objective_column(one, knows_gaps > 0) for one in objectives]
    counts = ", ".join(f'count(*) FILTER ("{column}" > ?) AS "{place}"' for place, column in enumerate(columns))
    over = store.query(
        f'SELECT {counts} FROM "requests" WHERE {rows.sql}', (*(one.limit_s for one in objectives), *rows.parameters)
    ).row(0)
    place = max(range(len(over)), key=lambda one: (over[one], -one))
    return objectives[place], int(over[place]), columns[place], int(count)


def _slowest(store: Reader, rows: Condition, drawn: pl.DataFrame, sampling: Sampling) -> tuple[Condition, pl.DataFrame]:
    """The slowest tenth as a condition, and which of the drawn rows it keeps; see `slow_set.slowest`."""
    if sampling.is_partial:
        edge = slowest(drawn, sampling).select("e2e_s", "request_key").tail(1)
    else:
        edge = slow_edge(store, rows)
    if edge.is_empty():
        return Condition("FALSE", ()), drawn.clear()
    seconds, key = edge.row(0)
    ended = pl.col("e2e_s")
    kept = drawn.filter((ended > seconds) | ((ended == seconds) & (pl.col("request_key") <= key)))
    # In the order that a reading of all rows puts them in.
    kept = kept.sort("e2e_s", "request_key", descending=[True, False])
    return Condition('("e2e_s" > ? OR ("e2e_s" = ? AND "request_key" <= ?))', (seconds, seconds, key)), kept


def slow_edge(store: Reader, rows: Condition) -> pl.DataFrame:
    """Time and key of the last request of the slowest tenth; no row where no request tells its time.

    Not by sorting: a quantile of a number takes a tenth of the time, and its ties are few.
    """
    known = Condition(f'{rows.sql} AND "e2e_s" IS NOT NULL', rows.parameters)
    count = int(store.query(f'SELECT count(*) AS n FROM "requests" WHERE {known.sql}', known.parameters)["n"][0])
    if not count:
        return pl.DataFrame()
    wanted = min(tenth(count), count)
    at = (count - wanted + 0.5) / count  # the middle of its place: no rounding reaches a neighbour
    seconds = store.query(
        f'SELECT quantile_disc("e2e_s", ?) AS s FROM "requests" WHERE {known.sql}', (at, *known.parameters)
    )["s"][0]
    above = store.query(
        f'SELECT count(*) AS n FROM "requests" WHERE {known.sql} AND "e2e_s" > ?', (*known.parameters, seconds)
    )["n"][0]
    return store.query(
        f'SELECT "e2e_s", "request_key" FROM "requests" WHERE {known.sql} AND "e2e_s" = ? ORDER BY "request_key" LIMIT 1 OFFSET ?',
        (*known.parameters, seconds, max(wanted - int(above) - 1, 0)),
    )


def _examples(store: Reader, slow: Condition) -> pl.DataFrame:
    """The slowest of each class, and so of all. Their names are long texts: which times they may have is asked first."""
    least = store.query(
        f'SELECT "primary_class", max("e2e_s", {EXAMPLES})[{EXAMPLES}] AS "least_s" FROM "requests" WHERE {slow.sql} GROUP BY 1',
        slow.parameters,
    ).sort("primary_class")
    parts, values = ["FALSE"], list[object]()
    for name, seconds in least.iter_rows():  # fewer of a class than are shown tell no least time: all of them may be
        parts.append('"primary_class" IS NOT DISTINCT FROM ?' + ("" if seconds is None else ' AND "e2e_s" >= ?'))
        values += [name] if seconds is None else [name, seconds]
    return store.query(
        'SELECT "request_key", "trace_id", "e2e_s", "cause", "primary_class" FROM "requests"'
        f' WHERE {slow.sql} AND ({" OR ".join(parts)}) QUALIFY row_number() OVER (PARTITION BY "primary_class"'
        f' ORDER BY "e2e_s" DESC NULLS LAST, "request_key") <= {EXAMPLES} ORDER BY "e2e_s" DESC NULLS LAST, "request_key"',
        (*slow.parameters, *values),
    )
