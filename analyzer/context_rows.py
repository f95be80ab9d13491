"""The requests of a context as arrays in order of time: all of them for what they did to each other, the targets for the answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.analyzer.intervals import Bools, Floats, Index

_NUMBERS = (
    "arrival_unix_ns finished_unix_ns queued_unix_ns scheduled_unix_ns first_token_unix_ns e2e_s queue_s context_s prefill_s "
    "first_token_s decode_s external_s combined_s input_tokens cached_tokens output_tokens "
    "queue_slot_s queue_kv_s queue_budget_s queue_window_s queue_policy_s queue_upstream_s preemptions"
).split()


class Rows:
    """n requests of one context, ordered by their end (then by key, so that no sum depends on the order they came in).

    Columns are arrays by name, moments in seconds since `origin_unix_ns`, NaN unknown: `rows[name]` of all n,
    `rows.own(name)` of the targets. target: their indices, None where all rows are; order: where each row stands in the frame,
    None where it is in order itself.
    """

    def __init__(self, frame: pl.DataFrame, origin_unix_ns: int, order: Index | None, target: Index | None) -> None:
        self.frame = frame
        self.origin_unix_ns = origin_unix_ns
        self.order = order
        self.target = target
        self._place = order if target is None else target if order is None else order[target]
        moments = {name for name in _NUMBERS if name.endswith("_unix_ns")}
        values = {
            name: (pl.col(name) - origin_unix_ns) * 1e-9 if name in moments else pl.col(name) for name in _NUMBERS
        }
        self._numbers = frame.select(
            value.cast(pl.Float64).fill_null(float("nan")).alias(name) for name, value in values.items()
        )
        self._ordered: dict[str, Floats] = {}

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def targets(self) -> int:
        """How many rows are asked about."""
        return len(self) if self.target is None else len(self.target)

    def __getitem__(self, name: str) -> Floats:
        found = self._ordered.get(name)
        if found is None:
            found = self._numbers[name].to_numpy()
            found = found if self.order is None else found[self.order]
            self._ordered[name] = found
        return found

    def own(self, name: str) -> Floats:
        """A column of the targets."""
        return self[name] if self.target is None else self._numbers[name].to_numpy()[self._place]

    def tells(self, name: str) -> bool:
        """Whether any row knows this column."""
        return self.frame[name].null_count() < len(self)

    def chosen(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of one value a row, those of the targets."""
        return values if self.target is None else values[self.target]

    def series(self, name: str) -> pl.Series:
        column = self.frame[name]
        return column if self.order is None else column.gather(self.order)

    def own_series(self, name: str) -> pl.Series:
        column = self.frame[name]
        return column if self._place is None else column.gather(self._place)


def read_rows(frame: pl.DataFrame, targets: Collection[str]) -> Rows:
    """frame: at least one row of `requests`; targets: keys of those that are asked about."""
    first = frame["arrival_unix_ns"].min()
    assert isinstance(first, int)
    order = _order(frame)
    asked = _asked(frame["request_key"], targets)
    if asked is not None and order is not None:
        asked = asked[order]
    return Rows(frame, first, order, None if asked is None else np.flatnonzero(asked))


def _order(frame: pl.DataFrame) -> Index | None:
    """Indices of the rows by their end, of equal ones by key; None where they stand so."""
    finished = frame["finished_unix_ns"].to_numpy()
    if (finished[1:] > finished[:-1]).all():
        return None
    order = np.argsort(finished, kind="stable")  # rows come nearly in order: a stable sort makes use of that
    same = finished[order[1:]] == finished[order[:-1]]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if len(tied):
        those = frame.select("finished_unix_ns", "request_key")[order[tied]]
        order[tied] = order[tied][
            those.select(pl.arg_sort_by("finished_unix_ns", "request_key")).to_series().to_numpy()
        ]
    return order


def _asked(keys: pl.Series, targets: Collection[str]) -> Bools | None:
    """Which keys are those of targets; None where all are."""
    wanted = targets if isinstance(targets, pl.Series) else pl.Series(list(targets), dtype=pl.String)
    if len(wanted) == len(keys) and (wanted == keys).all():
        return None
    asked = keys.is_in(wanted.implode())
    return None if asked.all() else asked.to_numpy()
