"""The sums of a verdict, made by the database over rows that stay there: the formulas of `RowSums` as SQL, with equal results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import polars as pl

from phasewise.analyzer.filters import Condition
from phasewise.analyzer.sums import DROPPED_MARK, PHASES, STALL_MARK, TOLD, UNKNOWN_WAIT_MARK, WAITS
from phasewise.rules.vocabulary import CAUSES, CLASSES, cause_column

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader


@dataclass(frozen=True, slots=True)
class StoredSums:
    """See `phasewise.analyzer.sums.Sums`."""

    count: int
    unattributed: int
    provisional: int
    clamped: int
    dropped: int
    unknown_waits: int
    stalled: int
    with_phases: int
    by_class: Mapping[str, int]
    told: Mapping[str, int]
    e2e_s: float
    measured_s: float
    phases_s: Mapping[str, float | None]
    seconds: Mapping[str, float]
    stepped: int
    stepped_s: Mapping[str, float]
    first_s: Mapping[str, float]
    coarse_s: Mapping[str, float]
    unexplained_wait_s: float
    preemptions: int | None
    cached_tokens: int | None
    prompts_with_cache_tokens: int
    outside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def outside_s(self, metric: str = "e2e") -> Mapping[str, float]:
        return self.outside["ttft" if metric == "ttft" else "e2e"]


def stored_sums(store: Reader, rows: Condition, part: Condition) -> tuple[StoredSums, StoredSums]:
    """Of the requests that `rows` keeps, and of those of them that `part` keeps: both out of one reading."""
    chosen = f'coalesce({part.sql}, FALSE) AS "chosen"'
    parameters = (*part.parameters, *rows.parameters)
    told = store.query(f'SELECT {chosen}, {_sums_sql()} FROM "requests" WHERE {rows.sql} GROUP BY 1', parameters)
    stepped = pl.DataFrame()
    if told["stepped"].sum():
        stepped = store.query(
            f'SELECT "chosen", {_stepped_sql()} FROM (SELECT *, {chosen}, json_transform("first_causes", ?) AS f FROM "requests"'
            f' WHERE {rows.sql} AND "first_causes" IS NOT NULL) GROUP BY 1',
            (*part.parameters, _SHAPE, *rows.parameters),
        )
    outside = told.select("chosen").with_columns(pl.lit(0).alias(name) for name in _outside_sums())
    if told["entries"].sum():  # seconds outside the engine: no more than one look where nobody tells of any
        listed = ", ".join(f'{sql} AS "{name}"' for name, sql in _outside_sums().items())
        outside = store.query(
            f'SELECT {chosen}, {listed} FROM "requests" WHERE {rows.sql} AND {_ENTERED} GROUP BY 1', parameters
        )
    found = [
        _sums(_added(told, only_chosen) | _added(outside, only_chosen), _added(stepped, only_chosen))
        for only_chosen in (False, True)
    ]
    return found[0], found[1]


def _added(told: pl.DataFrame, only_chosen: bool) -> dict[str, int | None]:
    """Whole numbers all of them; None where no request knows it."""
    own = told.filter(pl.col("chosen")) if only_chosen and len(told) else told
    return {
        name: int(own[name].sum()) if own[name].null_count() < len(own) else None
        for name in own.columns
        if name != "chosen"
    }


def _sums(told: Mapping[str, int | None], stepped: Mapping[str, int | None]) -> StoredSums:
    seconds = _by_cause(told, "all")
    with_steps, first = _by_cause(stepped, "all"), _by_cause(stepped, "first")
    rest = {name: (told[name] or 0) - (stepped.get(name) or 0) for name in (f"all {cause}" for cause in CAUSES)}
    return StoredSums(
        **{name: told[name] or 0 for name in _COUNTS},
        by_class={name: told[f"class {name}"] or 0 for name in CLASSES},
        told={name: told[f"told {name}"] or 0 for name in TOLD},
        e2e_s=_seconds(told["e2e"]),
        measured_s=_seconds(told["measured"]),
        phases_s={name: None if (found := told[f"phase {name}"]) is None else _seconds(found) for name in PHASES},
        seconds=seconds,
        stepped=told["stepped"] or 0,
        stepped_s=with_steps,
        first_s=first,
        coarse_s=_by_cause(rest, "all"),
        unexplained_wait_s=_seconds(told["unexplained_wait"]),
        preemptions=told["preempted"],
        cached_tokens=told["cached"],
        prompts_with_cache_tokens=told["cached_of"] or 0,
        outside={metric: _outside(told, metric) for metric in ("e2e", "ttft")},
    )


_COUNTS: Mapping[str, str] = {
    "count": "count(*)",
    "unattributed": 'count(*) FILTER ("revision" IS NULL)',
    "provisional": 'count(*) FILTER (NOT coalesce("final", FALSE))',
    "clamped": 'count(*) FILTER ("clamped")',
    "dropped": f"count(*) FILTER (contains(\"quality\", '{DROPPED_MARK}'))",
    "unknown_waits": f"count(*) FILTER (contains(\"missing_signals\", '{UNKNOWN_WAIT_MARK}'))",
    "stalled": f"count(*) FILTER (contains(\"missing_signals\", '{STALL_MARK}'))",
    "with_phases": 'count(*) FILTER ("revision" IS NOT NULL AND ("queue_s" IS NOT NULL OR "prefill_s" IS NOT NULL))',
}


def _nanoseconds(value: str) -> str:
    """Whole ones: a sum of floats would depend on the order of the rows. The cast rounds to even, as NumPy does, and leaves out what does
    not fit."""
    return f"sum(TRY_CAST(({value}) * 1e9 AS BIGINT))"


def _known(value: str) -> str:
    return f"CASE WHEN isfinite({value}) THEN {value} ELSE 0 END"


# An entry that took longer than the engine's own time; of others nothing passed outside.
_ENTERED = '("entry_e2e_s" > "e2e_s" OR "entry_ttft_s" > "ttft_s")'


@cache
def _outside_sums() -> Mapping[str, str]:
    by_client = 'coalesce("entry_side" = \'client\', "entry_ttft_s" IS NOT NULL)'
    ends = {"e2e": ("entry_e2e_s", "e2e_s"), "ttft": ("entry_ttft_s", "ttft_s")}
    between = {name: _known(f'("{outer}" - "{inner}")') for name, (outer, inner) in ends.items()}
    gaps = {name: f"greatest({seconds}, 0)" for name, seconds in between.items()}
    hosts = {name: f"CASE WHEN {by_client} THEN 0 ELSE {gap} END" for name, gap in gaps.items()}
    hosts["ttft"] = f"least({hosts['ttft']}, {_known(chr(34) + 'entry_before_s' + chr(34))})"
    return {f"host {name}": _nanoseconds(host) for name, host in hosts.items()} | {
        f"client {name}": _nanoseconds(f"{gaps[name]} - {host}") for name, host in hosts.items()
    }


@cache
def _sums_sql() -> str:
    waited = " - ".join(_known(f'"{name}"') for name in ("queue_s", *map(cause_column, WAITS)))
    unexplained = _known(f'"{cause_column("unexplained")}"')
    found = {
        **_COUNTS,
        "stepped": 'count("first_causes")',
        **{f"class {name}": f"count(*) FILTER (\"primary_class\" = '{name}')" for name in CLASSES},
        **{f"told {name}": f'count("{name}")' for name in TOLD},
        "e2e": _nanoseconds('"e2e_s"'),
        "measured": _nanoseconds('"measured_s"'),
        **{f"phase {name}": _nanoseconds(f'"{name}_s"') for name in PHASES},
        **{f"all {cause}": _nanoseconds(f'"{cause_column(cause)}"') for cause in CAUSES},
        "unexplained_wait": _nanoseconds(f"least(greatest({waited}, 0), {unexplained})"),
        "preempted": 'sum("preemptions")',
        "cached": 'sum("cached_tokens")',
        "cached_of": 'sum("input_tokens") FILTER ("cached_tokens" IS NOT NULL)',
        "entries": f"count(*) FILTER ({_ENTERED})",
    }
    return ", ".join(f'{sql} AS "{name}"' for name, sql in found.items())


@cache
def _stepped_sql() -> str:
    own = {f"all {cause}": _nanoseconds(f'"{cause_column(cause)}"') for cause in CAUSES}
    first = {f"first {cause}": _nanoseconds(f'f."{cause}"') for cause in CAUSES}
    return ", ".join(f'{sql} AS "{name}"' for name, sql in (own | first).items())


_SHAPE = "{" + ", ".join(f'"{cause}":"DOUBLE"' for cause in CAUSES) + "}"


def _seconds(nanoseconds: int | None) -> float:
    return (nanoseconds or 0) / 1e9


def _by_cause(told: Mapping[str, int | None], what: str) -> dict[str, float]:
    return {cause: _seconds(told.get(f"{what} {cause}")) for cause in CAUSES}


def _outside(told: Mapping[str, int | None], metric: str) -> dict[str, float]:
    found = {cause: _seconds(told[f"{cause} {metric}"]) for cause in ("host", "client")}
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}
