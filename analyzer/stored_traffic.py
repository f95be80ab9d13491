"""How the requests of a window came, ran side by side and ended, told by the database of rows that stay there.

How many there were at once is looked at on a grid of moments: what a step function of millions of steps says of them is exact, and
what lies between two of them (a ten-thousandth of the window) is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from phasewise.analyzer.filters import Condition
from phasewise.analyzer.intervals import Steps
from phasewise.analyzer.replicas import Replica

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

MOMENTS = 10_000  # of the grid
MOST_CELLS = 100_000  # moments times instances
_SPANS = ("running", "waiting")


@dataclass(frozen=True, slots=True)
class StoredTraffic:
    """See `phasewise.analyzer.traffic.Traffic`. crowd: a row for each instance, engine and outcome; levels: for each instance and
    moment of the grid by how much the numbers of running and of waiting requests change there."""

    load: Mapping[str, float | None]
    need_tokens: float
    crowd: pl.DataFrame
    levels: pl.DataFrame
    grid: Grid

    def span_unix_ns(self, replica: Replica) -> tuple[int, int] | None:
        own = self.crowd.filter(pl.col("instance").is_in(_names(replica)))
        first, last = own["arrival_min_unix_ns"].min(), own["finished_max_unix_ns"].max()
        return (first, last) if isinstance(first, int) and isinstance(last, int) else None

    def running(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        return self._level(replica, "running", origin_unix_ns)

    def waiting(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        return self._level(replica, "waiting", origin_unix_ns)

    def _level(self, replica: Replica, name: str, origin_unix_ns: int) -> Steps | None:
        if self.span_unix_ns(replica) is None:
            return None
        own = self.levels.filter(pl.col("instance").is_in(_names(replica)) & (pl.col(name) != 0))
        own = own.group_by("place").agg(pl.col(name).sum()).sort("place")
        moments = own["place"].to_numpy() * self.grid.width_ns + (self.grid.origin_unix_ns - origin_unix_ns)
        return Steps(moments / 1e9, np.cumsum(own[name].to_numpy(), dtype=np.float64))


def _names(replica: Replica) -> list[str]:
    return [replica.instance, *replica.members]


@dataclass(frozen=True, slots=True)
class Grid:
    """Moments `width_ns` apart; `count` of them."""

    origin_unix_ns: int
    width_ns: int
    count: int

    @classmethod
    def over(cls, first_unix_ns: int, last_unix_ns: int, most: int) -> Grid:
        width = max(1, (last_unix_ns - first_unix_ns) // max(most, 1) + 1)
        return cls(first_unix_ns, width, (last_unix_ns - first_unix_ns) // width + 2)

    def place(self, column: str) -> Condition:
        """The first moment at or after a time, as SQL."""
        return Condition(
            f'greatest(("{column}" - ?) // ?, 0)', (self.origin_unix_ns - self.width_ns + 1, self.width_ns)
        )


def stored_traffic(store: Reader, rows: Condition, crowd: pl.DataFrame) -> StoredTraffic:
    """crowd: of these rows, as the scene asks it; at least one row."""
    first, last = crowd["arrival_min_unix_ns"].min(), crowd["finished_max_unix_ns"].max()
    assert isinstance(first, int) and isinstance(last, int)
    fine = Grid.over(first, last, MOMENTS)
    instances = max(crowd["instance"].n_unique(), 1)
    coarse = Grid.over(first, last, min(MOMENTS, MOST_CELLS // instances))
    need = 'coalesce("input_tokens", 0) + coalesce("output_tokens", 0)'
    needs = _changes(store, rows, fine, [("need", "arrival_unix_ns", "finished_unix_ns", need)], by_instance=False)
    levels = _changes(
        store,
        rows,
        coarse,
        [
            ("running", "scheduled_unix_ns", "finished_unix_ns", "1"),
            ("waiting", "queued_unix_ns", "scheduled_unix_ns", "1"),
        ],
    )
    total = needs.sort("place")["need"].cum_sum().max()
    return StoredTraffic(
        load=_load(store, rows),
        need_tokens=max(float(total), 0.0) if isinstance(total, int | float) else 0.0,
        crowd=crowd,
        levels=levels,
        grid=coarse,
    )


def _changes(
    store: Reader,
    rows: Condition,
    grid: Grid,
    levels: Sequence[tuple[str, str, str, str]],
    *,
    by_instance: bool = True,
) -> pl.DataFrame:
    """By how much each level (name, start, end, weight of a request) changes at the moments of a grid."""
    instance = '"instance"' if by_instance else "''"
    parts: list[str] = []
    parameters: list[object] = []
    for name, start, end, weight in levels:
        others = "".join(f', 0 AS "{other}"' for other, *_ in levels if other != name)
        for column, sign in ((start, ""), (end, "-")):
            place = grid.place(column)
            parameters += [*place.parameters, *rows.parameters]
            parts.append(
                f'SELECT {instance} AS "instance", {place.sql} AS "place", {sign}({weight}) AS "{name}"{others}'
                f' FROM "requests" WHERE {rows.sql} AND "{end}" > "{start}"'
            )
    summed = ", ".join(f'sum("{name}")::BIGINT AS "{name}"' for name, *_ in levels)
    return store.query(
        f'SELECT "instance", "place", {summed} FROM ({" UNION ALL BY NAME ".join(parts)}) GROUP BY ALL',
        parameters,
    )


def _load(store: Reader, rows: Condition) -> dict[str, float | None]:
    """Of at least two requests."""
    told = store.query(
        'SELECT count(*) AS n, min("arrival_unix_ns") AS first, max("arrival_unix_ns") AS latest, max("finished_unix_ns") AS last,'
        ' sum("finished_unix_ns" - "arrival_unix_ns") AS lasting, count(DISTINCT "request_class") AS classes,'
        ' count("request_class") AS classed, count(*) FILTER ("request_class" = \'offline\') AS offline,'
        f' count("tenant") AS tenants FROM "requests" WHERE {rows.sql}',
        rows.parameters,
    ).row(0, named=True)
    n, came_s, span_s = told["n"], (told["latest"] - told["first"]) / 1e9, (told["last"] - told["first"]) / 1e9
    found: dict[str, float | None] = {
        "concurrency_mean": told["lasting"] / 1e9 / span_s if span_s > 0 else None,
        "arrival_rate_per_s": (n - 1) / came_s if came_s > 0 else None,
        "arrival_cv2": None,
        "classes_count": float(told["classes"]) if told["classed"] else None,
        "offline_ratio": told["offline"] / told["classed"] if told["classed"] else None,
    }
    if came_s > 0:
        squared = store.query(
            # Whole nanoseconds: a sum of floats would depend on threads.
            'SELECT sum(gap * gap)::DOUBLE / 1e18 AS s2 FROM (SELECT ("arrival_unix_ns" - lag("arrival_unix_ns")'
            f' OVER (ORDER BY "arrival_unix_ns"))::HUGEINT AS gap FROM "requests" WHERE {rows.sql})',
            rows.parameters,
        )["s2"][0]
        mean_s = came_s / (n - 1)
        found["arrival_cv2"] = max(squared / (n - 1) - mean_s**2, 0.0) / mean_s**2
    if told["tenants"]:
        by = store.query(
            'SELECT count("tenant") AS n, max(tokens) AS top, sum(tokens) AS total FROM (SELECT "tenant", sum("input_tokens") AS tokens'
            f' FROM "requests" WHERE {rows.sql} GROUP BY "tenant")',
            rows.parameters,
        ).row(0, named=True)
        found["tenants_count"] = float(by["n"])
        found["top_tenant_ratio"] = float(by["top"]) / float(by["total"]) if by["total"] and by["top"] else None
    return found
