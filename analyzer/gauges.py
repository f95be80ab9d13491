"""Questions about the engines' own figures over time: running, waiting, KV use, preemptions, prefix cache.

Written once as Ibis expressions over the unbound relation ``samples``: the joined rows of `engine_samples`, with ``replica``
(the name spans know the instance by) and ``bin``. Counters become differences between neighbouring samples; a counter
that falls was reset, and counts from zero. What moved while scrapes failed is known in sum and not when: in a time bin such a change
is unknown. An engine that nobody scrapes and that sends its steps is told by those, thinned as
for a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import ibis
import polars as pl

from phasewise.analyzer.filters import sample_conditions
from phasewise.analyzer.questions import Bins, exact_mean, exact_sum
from phasewise.analyzer.step_samples import COUNTERS as STEP_COUNTERS
from phasewise.analyzer.step_samples import SOURCE as STEPS
from phasewise.analyzer.step_samples import THINNED_SQL, stretches
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
# A neighbour further away than this many usual distances is behind a gap.
_GAP = 3.0
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


def _with_gaps(samples: Any) -> Any:
    """`gap`: the sample before lies behind a gap that reaches over a whole bin. Steps have none: an idle engine makes no step."""
    in_order = ibis.window(group_by="replica", order_by="unix_ns")
    timed = samples.mutate(
        _apart=samples["unix_ns"] - samples["unix_ns"].lag().over(in_order),
        _bins=samples["bin"] - samples["bin"].lag().over(in_order),
    )
    usual = timed["_apart"].median().over(ibis.window(group_by="replica"))
    is_gap = (timed["_bins"] > 1) & (timed["_apart"] > _GAP * usual) & (timed["source"].fill_null("") != STEPS)
    return timed.mutate(gap=is_gap.fill_null(False)).drop("_apart", "_bins")


def _samples() -> Any:
    return ibis.table(_SCHEMA, name="samples")


def _sql(expression: Any) -> str:
    return str(ibis.to_sql(expression, dialect="duckdb"))


@cache
def state_sql() -> str:
    """One row a time bin with samples: gauges summed over replicas (mean in the bin), the fullest KV pool, changes of counters
    (null where one of them reaches back over a gap)."""
    samples = _differences(_with_gaps(_samples()))
    changes = {f"{name}_change": samples[f"{name}_change"].sum() for name in _COUNTERS}
    one = samples.group_by(["bin", "replica"]).aggregate(
        running=exact_mean(samples["running"]),
        waiting=exact_mean(samples["waiting"]),
        kv_usage_ratio=samples["kv_usage_ratio"].max(),
        retracted=samples["retracted"].max(),
        prefix_hit_ratio=exact_mean(samples["prefix_hit_ratio"]),
        gap=samples["gap"].any(),
        **changes,
    )
    answer = one.group_by("bin").aggregate(
        replicas_n=one.count(),
        running=exact_sum(one["running"]),
        waiting=exact_sum(one["waiting"]),
        kv_usage_ratio=one["kv_usage_ratio"].max(),
        retracted=one["retracted"].sum(),
        prefix_hit_ratio=exact_mean(one["prefix_hit_ratio"]),
        **{f"{name}_change": ibis.ifelse(one["gap"].any(), None, one[f"{name}_change"].sum()) for name in _COUNTERS},
    )
    return _sql(answer.order_by("bin"))


@cache
def totals_sql() -> str:
    """One row: what the counters moved by in the window, and the largest gauges seen."""
    samples = _differences(_samples())
    answer = samples.aggregate(
        samples_n=(samples["source"].fill_null("") != STEPS).sum().fill_null(0),
        replicas_n=samples["replica"].nunique(),
        first_unix_ns=samples["unix_ns"].min(),
        last_unix_ns=samples["unix_ns"].max(),
        running_max=samples["running"].max(),
        waiting_max=samples["waiting"].max(),
        kv_usage_max_ratio=samples["kv_usage_ratio"].max(),
        prefix_hit_gauge_ratio=exact_mean(samples["prefix_hit_ratio"]),
        **{f"{name}_change": samples[f"{name}_change"].sum() for name in _COUNTERS},
    )
    return _sql(answer)


def ask_samples(
    store: Reader, sql: str, window: Window, filters: Sequence[Filter] = (), *, grid: Bins | None = None
) -> pl.DataFrame:
    """The answer to a question about the samples of a window. Samples that no instance could be told for are left out."""
    origin, width = (grid.origin_unix_ns, grid.width_ns) if grid else (0, 1)
    chosen, _ = sample_conditions(filters)
    reach = (window.from_unix_ns - _REACH_BACK_NS, window.to_unix_ns)
    thinned = stretches(store, *reach)
    stepped = "" if thinned is None else f", {_STEPPED}"
    both = '"named"' if thinned is None else '(SELECT * FROM "named" UNION ALL BY NAME SELECT * FROM "stepped")'
    statement = (
        'WITH "named" AS NOT MATERIALIZED (SELECT s.*, coalesce(i."joined_to", s."instance") AS "replica" '
        'FROM "engine_samples" s LEFT JOIN (SELECT "instance", "first_seen_unix_ns" AS "first", "last_seen_unix_ns" AS "last", '
        'min("joined_to") AS "joined_to" FROM "instances" WHERE "kind" = \'scrape\' GROUP BY ALL) i '
        'ON i."instance" = s."instance" AND s."unix_ns" BETWEEN i."first" AND i."last" WHERE s."joined" '
        f'AND s."unix_ns" >= ? AND s."unix_ns" < ?){stepped}, '
        '"samples" AS NOT MATERIALIZED (SELECT *, ("unix_ns" - ?) // ? AS "bin", "unix_ns" >= ? AS "inside" '
        f"FROM {both} WHERE {chosen.sql}) SELECT * FROM ({sql})"
    )
    parameters = (
        *reach,
        *(() if thinned is None else (*reach, *thinned, window.from_unix_ns)),
        origin,
        width,
        window.from_unix_ns,
        *chosen.parameters,
    )
    return store.query(statement, parameters)


def _counted(name: str) -> str:
    """A counter that some step of the instance does not tell is unknown."""
    return f'CASE WHEN bool_and("{name}" IS NOT NULL) OVER whole THEN sum("{name}") OVER one END AS "{name}"'


# Rows like samples, of engines without any: counters run from zero at the first step in sight, and a row before it says so.
_STEPPED = f"""
"thin" AS MATERIALIZED (SELECT * FROM ({THINNED_SQL}) WHERE "instance" NOT IN (SELECT "replica" FROM "named")),
"counted" AS (
  SELECT * REPLACE ({", ".join(_counted(name) for name in STEP_COUNTERS)}) FROM "thin"
  WINDOW one AS (PARTITION BY "instance" ORDER BY "unix_ns"), whole AS (PARTITION BY "instance")
  UNION ALL BY NAME
  SELECT "instance", least(min("unix_ns"), ?) - 1 AS "unix_ns", {", ".join(f'0.0 AS "{name}"' for name in STEP_COUNTERS)}
  FROM "thin" GROUP BY "instance"
),
"stepped" AS (
  SELECT c.*, c."instance" AS "replica", 'phasewise' AS "engine", '{STEPS}' AS "source", TRUE AS "joined", i."model"
  FROM "counted" c LEFT JOIN (
    SELECT "instance", min("model") AS "model" FROM "instances" WHERE "kind" = 'spans' GROUP BY "instance"
  ) i ON i."instance" = c."instance"
)
"""
