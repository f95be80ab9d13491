"""The aggregate questions, each written once as an Ibis expression over unbound tables.

An expression compiles to SQL for the store here, or for a distributed engine elsewhere, with equal results. It reads one
relation, ``rows``: the requests of a window (see `ask`), with two columns more than the table: ``bin``, the index of the
time bin its completion falls into, and ``marked``, whether it belongs to the set under question (the slow ones, a box
drawn on a heatmap). Values reach the statement as bound parameters only.

Percentiles are linear interpolation between order statistics (``quantile_cont``). Durations are added up as whole nanoseconds
(`exact_sum`): a sum of floats would depend on the order of the rows, and so on threads and on the tier they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import ibis
import polars as pl
from polars import selectors

from phasewise.analyzer.dimensions import METRICS, UNKNOWN, Dimension, dimension, metric
from phasewise.analyzer.filters import Condition
from phasewise.analyzer.window import Window
from phasewise.collector.records import Request, columns
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

PERCENTILES = (0.5, 0.95, 0.99)
_IBIS = {int: "int64", float: "float64", str: "string", bool: "boolean", bytes: "binary"}
_SCHEMA = {name: _IBIS[kind] for name, kind in columns(Request).items()} | {"bin": "int64", "marked": "boolean"}
# Phases of the identity in the order of time, as the stack draws them. `combined` is what an engine cannot split.
PHASES = ("queue", "context", "prefill", "combined", "first_token", "decode", "external", "residual")
# Heatmap rows: quarter octaves of a second.
STEPS_AN_OCTAVE = 4
_MOST_BUCKETS = 100  # of a dimension, `unknown` included


def few(n: int, p: float) -> bool:
    """Too few rows for this percentile: under 1/(1-p) it is only a maximum in disguise."""
    return n < 1 / (1 - p) - 1e-9


def _rows() -> Any:
    return ibis.table(_SCHEMA, name="rows")


def _sql(expression: Any) -> str:
    return str(ibis.to_sql(expression, dialect="duckdb"))


def exact_sum(seconds: Any) -> Any:
    """Seconds of all rows, the same to the last bit in whatever order they are added; NULL where none is known."""
    # Values that are no duration (not a number, centuries) do not fit, and are left out.
    return (seconds * 1e9).try_cast("int64").sum() / 1e9


def exact_mean(value: Any) -> Any:
    """The mean of what is known, to nine digits after the point."""
    return exact_sum(value) / value.count().nullif(0)


def _value(rows: Any, by: Dimension) -> Any:
    """What rows are put together by: the place of the bucket, or the text."""
    if by.edges is None:
        return rows[by.column].cast("string").fill_null(UNKNOWN)
    if by.column == "cached_ratio":
        value = rows["cached_tokens"].cast("float64") / rows["input_tokens"].nullif(0)
        edges: Sequence[float] = by.edges
    else:
        value = rows[by.column]
        edges = [
            math.ceil(edge) for edge in by.edges
        ]  # of whole numbers; compared as such they take a third of the time
    branches = [(value.isnull(), len(by.labels)), *((value < edge, place) for place, edge in enumerate(edges))]
    return ibis.cases(*branches, else_=len(by.labels) - 1)


def _label(value: Any, by: Dimension) -> Any:
    """The value of a dimension as text, `unknown` where it is not known: said once a group, not once a row."""
    if by.edges is None:
        return value
    return ibis.cases(*((value == place, label) for place, label in enumerate(by.labels)), else_=UNKNOWN)


def _many(flag: Any) -> Any:
    """How many rows a condition holds for."""
    return flag.cast("int64").sum().fill_null(0).cast("int64")


def _percentiles(column: Any, prefix: str) -> dict[str, Any]:
    # Asked one by one, each percentile keeps all values of the column in memory for itself.
    told = column.quantile(list(PERCENTILES))
    named = {f"{prefix}_p{round(p * 100)}_s": told[place] for place, p in enumerate(PERCENTILES)}
    return {f"{prefix}_n": column.count(), **named}


def _class_seconds(rows: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CLASSES:
        parts = [rows[cause_column(cause)].fill_null(0.0) for cause in CAUSES if CLASS_OF_CAUSE[cause] == name]
        found[f"{name}_s"] = exact_sum(reduce(add, parts)).fill_null(0.0)
    return found


@cache
def slices_sql(by: tuple[str, ...], metric_name: str) -> str:
    """One row a combination of values: n, percentiles of the metric, marked rows, seconds by class, end-to-end seconds."""
    rows = _rows()
    dims = {f"by_{i}": dimension(name) for i, name in enumerate(by)}
    keys = {key: _value(rows, found) for key, found in dims.items()}
    column = rows[metric(metric_name).column]
    answer = rows.group_by(**keys).aggregate(
        n=rows.count(),
        marked_n=_many(rows["marked"]),
        **_percentiles(column, "metric"),
        e2e_s=exact_sum(rows["e2e_s"]),
        **_class_seconds(rows),
    )
    answer = answer.mutate(**{key: _label(answer[key], found) for key, found in dims.items()})
    return _sql(answer.order_by(list(keys)))


@cache
def overview_sql() -> str:
    """One row: how many requests, their tokens, and the percentiles of every metric, each with its own n."""
    rows = _rows()
    measures: dict[str, Any] = {
        "n": rows.count(),
        "marked_n": _many(rows["marked"]),
        # Their hashes: distinct texts would all be kept in memory.
        "calls_n": rows["call_key"].fill_null(rows["request_key"]).hash().nunique(),
        "error_n": _many(rows["outcome"] == "error"),
        "provisional_n": _many(~rows["final"].fill_null(False)),
        "phases_n": _many(rows["queue_s"].notnull() | rows["prefill_s"].notnull() | rows["decode_s"].notnull()),
        "cached_n": rows["cached_tokens"].count(),
        "first_finished_unix_ns": rows["finished_unix_ns"].min(),
        "last_finished_unix_ns": rows["finished_unix_ns"].max(),
        **{name: rows[name].sum().cast("int64") for name in ("input_tokens", "output_tokens", "cached_tokens")},
        "e2e_s": exact_sum(rows["e2e_s"]),
    }
    for name, found in METRICS.items():
        measures |= _percentiles(rows[found.column], name.replace(".", "_"))
    return _sql(rows.aggregate(**measures))


@cache
def trend_sql(metric_names: tuple[str, ...]) -> str:
    """One row a time bin with requests: n, tokens, and percentiles of the metrics. Bins without requests have no row."""
    rows = _rows()
    measures: dict[str, Any] = {
        "n": rows.count(),
        "error_n": _many(rows["outcome"] == "error"),
        "input_tokens": rows["input_tokens"].sum().cast("int64"),
        "output_tokens": rows["output_tokens"].sum().cast("int64"),
    }
    for name in metric_names:
        measures |= _percentiles(rows[metric(name).column], name.replace(".", "_"))
    return _sql(rows.group_by("bin").aggregate(**measures).order_by("bin"))


@cache
def causes_over_time_sql() -> str:
    """Seconds booked to each cause, and end-to-end seconds, a time bin."""
    rows = _rows()
    seconds = {cause: exact_sum(rows[cause_column(cause)]).fill_null(0.0) for cause in CAUSES}
    answer = rows.group_by("bin").aggregate(n=rows.count(), e2e_s=exact_sum(rows["e2e_s"]), **seconds)
    return _sql(answer.order_by("bin"))


@cache
def heat_sql(metric_name: str) -> str:
    """How many requests a time bin and a quarter octave of the metric; zero and unknown durations are left out."""
    rows = _rows()
    value = rows[metric(metric_name).column]
    kept = rows.filter(value > 0)
    level = (kept[metric(metric_name).column].log2() * STEPS_AN_OCTAVE).floor().cast("int64")
    answer = kept.group_by("bin", level=level).aggregate(n=kept.count(), marked_n=_many(kept["marked"]))
    return _sql(answer.order_by(["bin", "level"]))


@cache
def histogram_sql(metric_name: str) -> str:
    """How many requests a quarter octave of the metric, and how many of them are marked."""
    rows = _rows()
    column = metric(metric_name).column
    kept = rows.filter(rows[column] > 0)
    level = (kept[column].log2() * STEPS_AN_OCTAVE).floor().cast("int64")
    answer = kept.group_by(level=level).aggregate(n=kept.count(), marked_n=_many(kept["marked"]))
    return _sql(answer.order_by("level"))


@cache
def facet_sql(by: str) -> str:
    """The values of a dimension by how often they occur, at most fifty."""
    rows = _rows()
    found = dimension(by)
    answer = rows.group_by(value=_value(rows, found)).aggregate(n=rows.count(), marked_n=_many(rows["marked"]))
    answer = answer.mutate(value=_label(answer["value"], found))
    return _sql(answer.order_by([ibis.desc("n"), "value"]).limit(50))


@cache
def phases_sql() -> str:
    """Seconds of each phase for the marked requests and for the others, each with the n that knows the phase."""
    rows = _rows()
    measures: dict[str, Any] = {"n": rows.count(), "e2e_s": exact_sum(rows["e2e_s"]), "e2e_n": rows["e2e_s"].count()}
    for name in PHASES:
        column = rows[f"{name}_s"]
        measures[f"{name}_s"] = exact_sum(column)
        measures[f"{name}_n"] = column.count()
    return _sql(rows.group_by("marked").aggregate(**measures).order_by("marked"))


@cache
def differences_sql(by: str, metric_name: str) -> str:
    """For each value of a dimension: marked and other requests, and the excess seconds it explains.

    excess: seconds of a marked request above the mean of the others of its shape (prompt and output bucket), floored at 0.
    explained: the part of it that would vanish if requests with this value took as long as those of other values in the
    same shape. A field that is itself part of the shape is left out of it.
    """
    rows = _rows()
    found = dimension(by)
    column = metric(metric_name).column
    shape = [name for name in ("input", "output") if name != found.name]
    known = rows.filter(rows[column].notnull())
    shape_place = reduce(
        lambda told, one: told * _MOST_BUCKETS + one, (_value(known, dimension(name)) for name in shape)
    )
    nanoseconds = (known[column] * 1e9).try_cast("int64")
    known = known.select(
        "marked", value=_value(known, found), shape=shape_place, seconds=known[column], nanoseconds=nanoseconds
    )
    rest_ns = ibis.ifelse(known["marked"], 0, known["nanoseconds"]).sum()
    cells = known.group_by("shape", "value").aggregate(
        n=known.count(), ns=known["nanoseconds"].sum(), marked_n=_many(known["marked"]), rest_ns=rest_ns
    )
    shapes = cells.group_by("shape").aggregate(
        shape_n=cells["n"].sum(), shape_ns=cells["ns"].sum(), rest_n=(cells["n"] - cells["marked_n"]).sum(),
        shape_rest_ns=cells["rest_ns"].sum(),
    )  # fmt: skip
    whole = cells.aggregate(all_n=(cells["n"] - cells["marked_n"]).sum(), all_ns=cells["rest_ns"].sum())
    typical = cells.join(shapes, "shape").cross_join(whole)
    typical = typical.select(
        "shape",
        "value",
        typical_rest=ibis.coalesce(
            typical["shape_rest_ns"] / 1e9 / typical["rest_n"].nullif(0),
            typical["all_ns"] / 1e9 / typical["all_n"].nullif(0),
        ),
        typical_other=(typical["shape_ns"] - typical["ns"]) / 1e9 / (typical["shape_n"] - typical["n"]).nullif(0),
    )
    judged = known.filter(known["marked"]).join(typical, ["shape", "value"])
    over = judged["seconds"] - judged["typical_rest"]
    judged = judged.mutate(excess=ibis.ifelse(over > 0, over, 0.0))
    # Where no other value has this shape, nothing can be said: LEAST alone would pass over the unknown.
    gone = judged["seconds"] - judged["typical_other"]
    comparable = (judged["excess"] > 0) & judged["typical_other"].notnull() & (gone > 0)
    judged = judged.mutate(explained=ibis.ifelse(comparable, ibis.least(judged["excess"], gone), 0.0))
    sums = judged.group_by("value").aggregate(
        excess_s=exact_sum(judged["excess"]), explained_s=exact_sum(judged["explained"])
    )
    counts = cells.group_by("value").aggregate(marked_n=cells["marked_n"].sum(), n=cells["n"].sum())
    answer = counts.left_join(sums, "value").select(
        "value",
        "marked_n",
        "n",
        excess_s=ibis._["excess_s"].fill_null(0.0),
        explained_s=ibis._["explained_s"].fill_null(0.0),
    )
    answer = answer.mutate(value=_label(answer["value"], found))
    return _sql(answer.order_by("value"))


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal time bins of a window: index i covers [origin + i * width, origin + (i + 1) * width)."""

    origin_unix_ns: int
    width_ns: int
    count: int

    @property
    def starts_unix_ns(self) -> list[int]:
        return [self.origin_unix_ns + i * self.width_ns for i in range(self.count)]


_WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def bins(window: Window, most: int = 90) -> Bins:
    """Round bin widths, aligned to the clock, at most `most` of them (whole days beyond that)."""
    width_s = next((w for w in _WIDTHS_S if window.seconds / w <= most), None)
    if width_s is None:
        width_s = math.ceil(window.seconds / most / 86400) * 86400
    width = width_s * 10**9
    origin = window.from_unix_ns // width * width
    return Bins(origin, width, -(-(window.to_unix_ns - origin) // width))


NOTHING_MARKED = Condition("FALSE", ())


def ask(
    store: Reader,
    sql: str,
    rows: Condition,
    *,
    grid: Bins | None = None,
    marked: Condition = NOTHING_MARKED,
) -> pl.DataFrame:
    """The answer to a question about the requests that `rows` keeps; `grid` and `marked` fill `bin` and `marked`."""
    origin, width = (grid.origin_unix_ns, grid.width_ns) if grid else (0, 1)
    # NOT MATERIALIZED, so that the columns a question does not name are never read.
    statement = (
        f'WITH "rows" AS NOT MATERIALIZED (SELECT *, ("finished_unix_ns" - ?) // ? AS "bin", '
        f'coalesce({marked.sql}, FALSE) AS "marked" FROM "requests" WHERE {rows.sql}) SELECT * FROM ({sql})'
    )
    found = store.query(statement, (origin, width, *marked.parameters, *rows.parameters))
    # DuckDB sums integers to 128 bits; counts of rows and tokens fit into 64.
    return found.with_columns(selectors.decimal().cast(pl.Int64))


def sorted_by(frame: pl.DataFrame, by: Sequence[Dimension]) -> pl.DataFrame:
    """Rows of a sliced answer in the order of their axes."""
    if frame.is_empty():
        return frame
    keys = [[found.order(label) for label in frame[f"by_{i}"].to_list()] for i, found in enumerate(by)]
    order = sorted(range(frame.height), key=lambda row: [column[row] for column in keys])
    return frame[order]
