"""Counts and sums over a set of requests: what a verdict has to know of every one of them, however many there are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from phasewise.analyzer.frames import where
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.outside import outside_s
from phasewise.analyzer.statistics import floats, known
from phasewise.rules.vocabulary import CAUSES, CLASSES, cause_column

PHASES = ("queue", "context", "prefill", "first_token", "decode", "external")
WAITS = tuple(cause for cause in CAUSES if cause.startswith("queue.") or cause == "kv.wait")
# Columns of which the verdict asks whether any request knows them.
TOLD = ("model", "cached_tokens", "entry_e2e_s", "itl_p95_s")
DROPPED_MARK = '"attributes_dropped"'  # of `quality`: the sender says that it left attributes out
UNKNOWN_WAIT_MARK = "wait_reason"  # of `missing_signals`
STALL_MARK = "tool_spans"  # of the same


class Sums(Protocol):
    """Of some requests. Seconds are booked ones by cause, summed as integer nanoseconds so that no order of rows changes them."""

    @property
    def count(self) -> int: ...

    @property
    def unattributed(self) -> int:
        """Rows that are stored and wait for their attribution: a second or two, longer where the machine is busy."""

    @property
    def provisional(self) -> int: ...

    @property
    def clamped(self) -> int: ...

    @property
    def dropped(self) -> int:
        """Requests whose sender says that it dropped attributes of their spans."""

    @property
    def unknown_waits(self) -> int:
        """Requests of which part of the waiting could not be told apart."""

    @property
    def stalled(self) -> int:
        """Requests that stood still for a matter of their own which nothing tells."""

    @property
    def with_phases(self) -> int:
        """Requests that are attributed and carry phase data."""

    @property
    def by_class(self) -> Mapping[str, int]: ...

    @property
    def told(self) -> Mapping[str, int]:
        """How many know the columns of TOLD."""

    @property
    def e2e_s(self) -> float: ...

    @property
    def measured_s(self) -> float: ...

    @property
    def phases_s(self) -> Mapping[str, float | None]:
        """Seconds of each of PHASES; None where no request knows it."""

    @property
    def seconds(self) -> Mapping[str, float]: ...

    @property
    def stepped(self) -> int:
        """Requests of which steps tell what passed before their first token."""

    @property
    def stepped_s(self) -> Mapping[str, float]:
        """All seconds of those."""

    @property
    def first_s(self) -> Mapping[str, float]:
        """Their seconds before the first token."""

    @property
    def coarse_s(self) -> Mapping[str, float]:
        """All seconds of the other ones."""

    @property
    def unexplained_wait_s(self) -> float:
        """Seconds of queue that no cause explains: waiting is contention, also where nothing tells what was waited for."""

    @property
    def preemptions(self) -> int | None: ...

    @property
    def cached_tokens(self) -> int | None: ...

    @property
    def prompts_with_cache_tokens(self) -> int:
        """Prompt tokens of the requests that tell how many of them were cached."""

    def outside_s(self, metric: str = "e2e") -> Mapping[str, float]:
        """See `phasewise.analyzer.outside.outside_s`."""


class RowSums:
    """Of requests that were read, each sum made when it is first asked for."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self._rows = rows

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def unattributed(self) -> int:
        return int(self._rows["revision"].null_count())

    @property
    def provisional(self) -> int:
        return int((~self._rows["final"].fill_null(False)).sum())

    @property
    def clamped(self) -> int:
        return int(self._rows["clamped"].fill_null(False).sum())

    @property
    def dropped(self) -> int:
        return self._marked("quality", DROPPED_MARK)

    @property
    def unknown_waits(self) -> int:
        return self._marked("missing_signals", UNKNOWN_WAIT_MARK)

    @property
    def stalled(self) -> int:
        return self._marked("missing_signals", STALL_MARK)

    @cached_property
    def with_phases(self) -> int:
        attributed = self._rows.select(
            pl.col("revision").is_not_null() & pl.any_horizontal(pl.col("queue_s", "prefill_s").is_not_null())
        )
        return int(attributed.to_series().sum())

    @cached_property
    def by_class(self) -> Mapping[str, int]:
        found = self._rows["primary_class"]
        return {name: int((found == name).sum()) for name in CLASSES}

    @cached_property
    def told(self) -> Mapping[str, int]:
        return {name: len(self._rows) - self._rows[name].null_count() for name in TOLD}

    @cached_property
    def e2e_s(self) -> float:
        return float(known(floats(self._rows, "e2e_s")).sum())

    @cached_property
    def measured_s(self) -> float:
        return float(known(floats(self._rows, "measured_s")).sum())

    @cached_property
    def phases_s(self) -> Mapping[str, float | None]:
        found = {name: floats(self._rows, f"{name}_s") for name in PHASES}
        return {name: float(known(one).sum()) if np.isfinite(one).any() else None for name, one in found.items()}

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        return seconds_by_cause(self._rows)

    @cached_property
    def stepped(self) -> int:
        return len(self._rows) - self._rows["first_causes"].null_count()

    @cached_property
    def stepped_s(self) -> Mapping[str, float]:
        return seconds_by_cause(self._stepped)

    @cached_property
    def first_s(self) -> Mapping[str, float]:
        read = self._stepped["first_causes"].str.json_decode(pl.Struct(dict.fromkeys(CAUSES, pl.Float64)))
        whole = read.struct.unnest().select(
            (pl.col(cause).fill_null(0.0) * 1e9).round().cast(pl.Int64).sum() for cause in CAUSES
        )
        return {cause: int(whole[cause][0]) / 1e9 for cause in CAUSES}

    @cached_property
    def coarse_s(self) -> Mapping[str, float]:
        return seconds_by_cause(self._rows.filter(pl.col("first_causes").is_null()))

    @cached_property
    def unexplained_wait_s(self) -> float:
        booked = sum(
            (known(floats(self._rows, cause_column(cause))) for cause in WAITS),
            start=np.zeros(len(self._rows)),
        )
        waited = known(floats(self._rows, "queue_s")) - booked
        unexplained = known(floats(self._rows, cause_column("unexplained")))
        return float(np.clip(waited, 0.0, unexplained).sum())

    @cached_property
    def preemptions(self) -> int | None:
        return _sum(self._rows["preemptions"])

    @cached_property
    def cached_tokens(self) -> int | None:
        return _sum(self._rows["cached_tokens"])

    @cached_property
    def prompts_with_cache_tokens(self) -> int:
        return int(where(self._rows, pl.col("cached_tokens").is_not_null())["input_tokens"].sum())

    def outside_s(self, metric: str = "e2e") -> Mapping[str, float]:
        return outside_s(self._rows, metric)

    @cached_property
    def _stepped(self) -> pl.DataFrame:
        return self._rows.filter(pl.col("first_causes").is_not_null())

    def _marked(self, column: str, mark: str) -> int:
        return int(self._rows[column].str.contains(mark, literal=True).fill_null(False).sum())


def _sum(values: pl.Series) -> int | None:
    return int(values.sum()) if values.is_not_null().any() else None


def _nanoseconds(seconds: Floats) -> int:
    """Their sum. What is unknown, or does not fit into 64 bits, is left out."""
    whole = np.rint(seconds * 1e9)
    return int(whole[np.abs(whole) < 2**63].astype(np.int64).sum())


def seconds_by_cause(rows: pl.DataFrame, weights: Floats | None = None) -> dict[str, float]:
    """Booked seconds by cause, summed as integer nanoseconds so that the order of rows changes nothing. weights: for how many
    requests each row stands."""
    found = {}
    for cause in CAUSES:
        values = floats(rows, cause_column(cause))
        values = values if weights is None else values * weights
        found[cause] = _nanoseconds(values) / 1e9
    return found
