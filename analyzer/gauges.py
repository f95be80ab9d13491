"""Questions about the engines' own figures over time: running, waiting, KV use, preemptions, prefix cache.

Written once as Ibis expressions over the unbound relation ``samples``: the joined rows of `engine_samples`, with ``replica``
(the name spans know the instance by) and ``bin``. Counters become differences between neighbouring samples; a counter
that falls was reset, and counts from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import ibis
import polars as pl

from phasewise.analyzer.filters import Condition
from phasewise.analyzer.questions import Bins
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.records import EngineSample, columns

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

_IBIS = {int: "int64", float: "float64", str: "string", bool: "boolean"}
_SCHEMA = {name: _IBIS[kind] for name, kind in columns(EngineSample).items()} | {
    "replica": "string",
    "bin": "int64",
    "inside": "boolean",
}
# How far before the window the sample may lie that the first difference inside it starts from.
_REACH_BACK_NS = 120 * 10**9
_COUNTERS = (
    "preemptions",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "prompt_tokens",
    "output_tokens",
    "finished",
    "aborted",
    "refused",
    "ttft_count",
)
_COLUMNS = {"model": '"model"', "engine": '"engine"', "instance": '"replica"'}


def _differences(samples: Any) -> Any:
    in_order = ibis.window(group_by="replica", order_by="unix_ns")
    changes = {}
    for name in _COUNTERS:
        value = samples[name]
        before = value.lag().over(in_order)
        changes[f"{name}_change"] = ibis.ifelse(
            value >= before, value - before, ibis.ifelse(before.notnull(), value, None)
        )
    return samples.mutate(**changes).filter(ibis._["inside"])


def _samples() -> Any:
    return ibis.table(_SCHEMA, name="samples")


def _sql(expression: Any) -> str:
    return str(ibis.to_sql(expression, dialect="duckdb"))


@cache
def state_sql() -> str:
    """One row a time bin with samples: gauges summed over replicas (mean in the bin), the fullest KV pool, changes of counters."""
    samples = _differences(_samples())
    changes = {f"{name}_change": samples[f"{name}_change"].sum() for name in _COUNTERS}
    one = samples.group_by(["bin", "replica"]).aggregate(
        running=samples["running"].mean(),
        waiting=samples["waiting"].mean(),
        kv_usage_ratio=samples["kv_usage_ratio"].max(),
        retracted=samples["retracted"].max(),
        prefix_hit_ratio=samples["prefix_hit_ratio"].mean(),
        **changes,
    )
    answer = one.group_by("bin").aggregate(
        replicas_n=one.count(),
        running=one["running"].sum(),
        waiting=one["waiting"].sum(),
        kv_usage_ratio=one["kv_usage_ratio"].max(),
        retracted=one["retracted"].sum(),
        prefix_hit_ratio=one["prefix_hit_ratio"].mean(),
        **{f"{name}_change": one[f"{name}_change"].sum() for name in _COUNTERS},
    )
    return _sql(answer.order_by("bin"))


@cache
def totals_sql() -> str:
    """One row: what the counters moved by in the window, and the largest gauges seen."""
    samples = _differences(_samples())
    answer = samples.aggregate(
        samples_n=samples.count(),
        replicas_n=samples["replica"].nunique(),
        first_unix_ns=samples["unix_ns"].min(),
        last_unix_ns=samples["unix_ns"].max(),
        running_max=samples["running"].max(),
        waiting_max=samples["waiting"].max(),
        kv_usage_max_ratio=samples["kv_usage_ratio"].max(),
        prefix_hit_gauge_ratio=samples["prefix_hit_ratio"].mean(),
        **{f"{name}_change": samples[f"{name}_change"].sum() for name in _COUNTERS},
    )
    return _sql(answer)


def sample_conditions(filters: Sequence[Filter]) -> tuple[Condition, tuple[str, ...]]:
    """The filters that engine figures can answer (model, engine, instance), and the keys of those they cannot."""
    equal: dict[str, list[str]] = {}
    left: list[str] = []
    for filter_ in filters:
        if filter_.op in ("eq", "in") and filter_.key in _COLUMNS:
            equal.setdefault(filter_.key, []).extend(
                filter_.value.split(",") if filter_.op == "in" else [filter_.value]
            )
        else:
            left.append(filter_.key)
    sql = " AND ".join(f"list_contains(?, {_COLUMNS[key]})" for key in equal) or "TRUE"
    return Condition(sql, tuple(equal.values())), tuple(dict.fromkeys(left))


def ask_samples(
    store: Reader, sql: str, window: Window, filters: Sequence[Filter] = (), *, grid: Bins | None = None
) -> pl.DataFrame:
    """The answer to a question about the samples of a window. Samples that no instance could be told for are left out."""
    origin, width = (grid.origin_unix_ns, grid.width_ns) if grid else (0, 1)
    chosen, _ = sample_conditions(filters)
    statement = (
        'WITH "named" AS NOT MATERIALIZED (SELECT s.*, coalesce(i."joined_to", s."instance") AS "replica" '
        'FROM "engine_samples" s LEFT JOIN (SELECT "instance", "first_seen_unix_ns" AS "first", "last_seen_unix_ns" AS "last", '
        'min("joined_to") AS "joined_to" FROM "instances" WHERE "kind" = \'scrape\' GROUP BY ALL) i '
        'ON i."instance" = s."instance" AND s."unix_ns" BETWEEN i."first" AND i."last" WHERE s."joined" '
        'AND s."unix_ns" >= ? AND s."unix_ns" < ?), '
        '"samples" AS NOT MATERIALIZED (SELECT *, ("unix_ns" - ?) // ? AS "bin", "unix_ns" >= ? AS "inside" FROM "named" '
        f"WHERE {chosen.sql}) SELECT * FROM ({sql})"
    )
    parameters = (
        window.from_unix_ns - _REACH_BACK_NS,
        window.to_unix_ns,
        origin,
        width,
        window.from_unix_ns,
        *chosen.parameters,
    )
    return store.query(statement, parameters)
