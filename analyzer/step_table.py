"""The scheduler iterations of one engine process as arrays in order of their number, and sums over runs of them by look-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.analyzer.intervals import Bools, Floats
from phasewise.collector.records import EngineStep, columns

Ints = npt.NDArray[np.int64]
REASONS = ("slot", "kv", "budget", "window", "policy")
HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class StepTable:
    """n steps in order of `number`; seconds since the origin the requests use. NaN is unknown.

    gap_s: from the end of a step to the start of the next in number, 0 where that one is missing; hour: of the clock.
    waiting: sequences in the queue by REASONS, [5, n]. kv_ratio: blocks in use over all blocks.
    """

    number: Ints
    start: Floats
    duration: Floats
    gap_s: Floats
    prefill_tokens: Floats
    sequences: Floats
    context_tokens: Floats
    running: Floats
    waiting: Floats
    slots_reserved: Floats
    schedule_s: Floats
    kv_ratio: Floats
    preemptions: Floats
    hour: Ints

    def __len__(self) -> int:
        return len(self.number)

    @property
    def end(self) -> Floats:
        return self.start + self.duration

    @property
    def cycle_s(self) -> Floats:
        """From the start of a step to the start of the next."""
        return self.duration + self.gap_s

    def spans(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Index ranges [low, high) of the steps with numbers first..last, inclusive."""
        return (
            np.searchsorted(self.number, first, side="left").astype(np.int64),
            np.searchsorted(self.number, last, side="right").astype(np.int64),
        )

    def at(self, time: Floats) -> Ints:
        """Index of the last step that had started at each time; -1 before the first. NaN gives -1."""
        found = np.searchsorted(self.start, np.nan_to_num(time, nan=-np.inf), side="right") - 1
        return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class RunningSum:
    """Prefix sums of some rows of values over the steps: a run of steps costs two look-ups."""

    total: Floats  # [rows, n + 1]

    @classmethod
    def of(cls, values: Floats) -> RunningSum:
        """values: [rows, n]."""
        total = np.zeros((values.shape[0], values.shape[1] + 1))
        np.cumsum(values, axis=1, out=total[:, 1:])
        return cls(total)

    def between(self, low: Ints, high: Ints) -> Floats:
        """Sums over [low, high), [rows, len(low)]; an empty or reversed run gives 0."""
        high = np.maximum(high, low)
        return np.asarray(np.maximum(self.total[:, high] - self.total[:, low], 0.0))


def read_tables(steps: pl.DataFrame, origin_unix_ns: int) -> dict[str, StepTable]:
    """One table an instance; of a step that was sent twice the first is kept."""
    if steps.is_empty():
        return {}
    key = ["instance", "step"]
    ordered = steps.sort(key)
    again = (
        ordered.select((pl.col(key) == pl.col(key).shift(1)).name.keep()).select(pl.all_horizontal(key).any()).item()
    )
    if again:  # the first in an order of their contents, not of their arrival
        ordered = steps.sort([*key, *(c for c in _COLUMNS if c not in key)]).unique(
            key, keep="first", maintain_order=True
        )
    return {
        str(name): _table(own, origin_unix_ns) for (name,), own in ordered.group_by(["instance"], maintain_order=True)
    }


_COLUMNS = tuple(columns(EngineStep))


def _table(rows: pl.DataFrame, origin_unix_ns: int) -> StepTable:
    def column(name: str) -> Floats:
        return rows[name].cast(pl.Float64).fill_null(float("nan")).to_numpy().copy()

    def known(name: str) -> Floats:
        return np.clip(np.nan_to_num(column(name)), 0.0, None)

    number = rows["step"].to_numpy().astype(np.int64)
    start = (rows["start_unix_ns"].to_numpy() - origin_unix_ns) / 1e9
    # A clock that was set back would make a later step the earlier one: look-ups by time need an order.
    start = np.maximum.accumulate(start)
    duration = known("duration_s")
    follows = np.append(np.diff(number) == 1, False)
    gap = np.append(start[1:], 0.0) - start - duration
    blocks = column("kv_blocks_total")
    used = column("kv_blocks_used")
    ratio = np.divide(used, blocks, out=np.full(len(number), np.nan), where=blocks > 0)
    return StepTable(
        number=number,
        start=start,
        duration=duration,
        gap_s=np.where(follows, np.clip(gap, 0.0, None), 0.0),
        prefill_tokens=known("prefill_tokens"),
        sequences=known("decode_sequences"),
        context_tokens=known("context_tokens"),
        running=column("running"),
        waiting=np.stack([column(f"waiting_{reason}") for reason in REASONS]),
        slots_reserved=column("slots_reserved"),
        schedule_s=known("schedule_s"),
        kv_ratio=ratio,
        preemptions=known("preemptions"),
        hour=(rows["start_unix_ns"].to_numpy() // HOUR_NS).astype(np.int64),
    )


def range_max(values: Floats, low: Ints, high: Ints) -> Floats:
    """Highest of values[low:high] of each range, none of them empty: that of two runs of a power of two that cover it."""
    found = np.empty(len(low))
    power = np.frexp(high - low)[1] - 1  # of the longest run that fits
    highest = values
    for k in range(int(power.max(initial=-1)) + 1):
        if k:
            highest = np.maximum(highest[: -(1 << (k - 1))], highest[1 << (k - 1) :])
        here = power == k
        found[here] = np.maximum(highest[low[here]], highest[high[here] - (1 << k)])
    return found


def means_near(chosen: Bools, values: Floats, reach: int, least: int) -> Floats:
    """For each step the mean of `values` over the `least` chosen steps before and after it that lie within `reach` steps; NaN
    where there are none."""
    index = np.flatnonzero(chosen)
    everyone = np.arange(len(values))
    if not len(index):
        return np.full(len(values), np.nan)
    total = np.concatenate(([0.0], np.cumsum(values[index])))
    here = np.searchsorted(index, everyone)
    low = np.maximum(here - least, np.searchsorted(index, everyone - reach))
    high = np.minimum(here + least, np.searchsorted(index, everyone + reach, side="right"))
    count = high - low
    near = total[np.maximum(high, low)] - total[low]
    return np.asarray(np.divide(near, count, out=np.full(len(values), np.nan), where=count > 0))
