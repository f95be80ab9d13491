"""How the requests of a window came, ran side by side and ended."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from phasewise.analyzer.intervals import Floats, Steps, level
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.statistics import floats

_MOMENTS = ("arrival_unix_ns", "queued_unix_ns", "scheduled_unix_ns", "finished_unix_ns")


class Traffic(Protocol):
    """Requests in time, of all replicas or of one. Signals by their names, absent where they are not known."""

    @property
    def load(self) -> Mapping[str, float | None]:
        """concurrency_mean, arrival_rate_per_s, arrival_cv2, and the tenants and classes that the requests are of."""

    @property
    def need_tokens(self) -> float:
        """The most prompt and output tokens of requests that were there at once."""

    def span_unix_ns(self, replica: Replica) -> tuple[int, int] | None:
        """First arrival and last end; None without requests."""

    def running(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        """How many were scheduled and had not ended, in seconds since the origin; None without requests."""

    def waiting(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        """How many were queued and not scheduled."""


class RowTraffic:
    """Of requests that were read."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self._rows = rows

    @cached_property
    def load(self) -> Mapping[str, float | None]:
        rows = self._rows
        found: dict[str, float | None] = {}
        if len(rows) < 2:
            return found
        arrival = np.sort(rows["arrival_unix_ns"].to_numpy() / 1e9)
        end = rows["finished_unix_ns"].to_numpy() / 1e9
        span = float(end.max() - arrival[0])
        gaps = np.diff(arrival)
        found["concurrency_mean"] = float((end - arrival).sum()) / span if span else None
        found["arrival_rate_per_s"] = (len(rows) - 1) / float(gaps.sum()) if gaps.sum() > 0 else None
        found["arrival_cv2"] = float(gaps.var() / gaps.mean() ** 2) if gaps.mean() > 0 else None
        tenants = rows["tenant"].drop_nulls()
        if len(tenants):
            found["tenants_count"] = float(tenants.n_unique())
            by = rows.group_by("tenant").agg(pl.col("input_tokens").sum())["input_tokens"]
            total = by.sum()
            top = by.max()
            found["top_tenant_ratio"] = float(top) / float(total) if total and isinstance(top, int | float) else None
        classes = rows["request_class"].drop_nulls()
        found["classes_count"] = float(classes.n_unique()) if len(classes) else None
        found["offline_ratio"] = int((classes == "offline").sum()) / len(classes) if len(classes) else None
        return found

    @cached_property
    def need_tokens(self) -> float:
        rows = self._rows
        arrival, end = rows["arrival_unix_ns"].to_numpy() / 1e9, rows["finished_unix_ns"].to_numpy() / 1e9
        need = np.nan_to_num(floats(rows, "input_tokens")) + np.nan_to_num(floats(rows, "output_tokens"))
        return float(level(arrival, end, need).value.max(initial=0.0))

    def span_unix_ns(self, replica: Replica) -> tuple[int, int] | None:
        own = self._own(replica)
        first, last = own["arrival_unix_ns"].min(), own["finished_unix_ns"].max()
        return (first, last) if isinstance(first, int) and isinstance(last, int) else None

    def running(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        return self._level(replica, "scheduled_unix_ns", "finished_unix_ns", origin_unix_ns)

    def waiting(self, replica: Replica, origin_unix_ns: int) -> Steps | None:
        return self._level(replica, "queued_unix_ns", "scheduled_unix_ns", origin_unix_ns)

    def _level(self, replica: Replica, start: str, end: str, origin_unix_ns: int) -> Steps | None:
        own = self._own(replica)
        return level(*(_since(own[name], origin_unix_ns) for name in (start, end))) if len(own) else None

    @cached_property
    def _by_instance(self) -> Mapping[object, pl.DataFrame]:
        # Once for all replicas: each of them would look through all columns of all rows several times.
        parts = self._rows.select("instance", *_MOMENTS).partition_by("instance", maintain_order=True, as_dict=True)
        return {name: part for (name,), part in parts.items()}

    def _own(self, replica: Replica) -> pl.DataFrame:
        names = (replica.instance, *replica.members)
        found = [part for name in names if (part := self._by_instance.get(name)) is not None]
        return pl.concat(found) if found else self._rows.select("instance", *_MOMENTS).clear()


def _since(moments: pl.Series, origin_unix_ns: int) -> Floats:
    return ((moments - origin_unix_ns) / 1e9).cast(pl.Float64).fill_null(float("nan")).to_numpy()
