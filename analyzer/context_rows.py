"""The requests of contexts as arrays in order of time: all of a context for what they did to each other, the targets for the answer.

Many small contexts are read together: what Polars is asked costs as much for one of them as for all, arrays are cheap to cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.analyzer.intervals import Bools, Floats, Index

_NUMBERS = (
    "arrival_unix_ns finished_unix_ns queued_unix_ns scheduled_unix_ns first_token_unix_ns e2e_s queue_s context_s prefill_s "
    "first_token_s decode_s external_s combined_s entry_e2e_s input_tokens cached_tokens output_tokens "
    "queue_slot_s queue_kv_s queue_budget_s queue_window_s queue_policy_s queue_upstream_s kv_load_s preemptions"
).split()


class Stack:
    """Requests of several contexts, one context below the other, each ordered by end (then by key, so that no sum depends on the order
    they came in). Columns are arrays by name, moments in seconds since the context's `origin_unix_ns`, NaN unknown.

    frame: as given, in no order; order: where each row stands in it; starts: where each context begins, and the end of the last.
    """

    def __init__(self, frames: Sequence[pl.DataFrame]) -> None:
        """frames: at least one row of `requests` each."""
        self.frame = pl.concat(frames, rechunk=True) if len(frames) > 1 else frames[0]
        self.starts = np.cumsum([0, *(len(frame) for frame in frames)])
        arrival = self.frame["arrival_unix_ns"]
        known = (arrival.fill_null(2**63 - 1) if arrival.null_count() else arrival).to_numpy()
        self.origins_unix_ns: list[int] = np.minimum.reduceat(known, self.starts[:-1]).tolist()
        self.order = self._ordered()
        self._gathered: dict[str, Floats] = {}
        self._found: dict[tuple[str, tuple[str, ...]], Bools] = {}

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, name: str) -> Floats:
        """A column in order."""
        found = self._gathered.get(name)
        if found is None:
            found = self._numbers[name].to_numpy()
            found = found if self.order is None else found[self.order]
            self._gathered[name] = found
        return found

    def rows(self, targets: Sequence[Collection[str]]) -> list[Rows]:
        """The contexts one by one. targets: of each, the keys of the requests that are asked about."""
        asked = self._asked(targets)
        cuts = [slice(low, high) for low, high in itertools.pairwise(self.starts.tolist())]
        return [
            Rows(self, cut, origin, None if asked is None or asked[cut].all() else np.flatnonzero(asked[cut]))
            for cut, origin in zip(cuts, self.origins_unix_ns, strict=True)
        ]

    def series(self, name: str, places: Index | slice) -> pl.Series:
        """A column at some places of the order."""
        column = self.frame[name]
        if self.order is not None:
            return column.gather(self.order[places])
        return column[places] if isinstance(places, slice) else column.gather(places)

    def is_one_of(self, name: str, values: tuple[str, ...]) -> Bools:
        """Which rows hold one of some texts, in order; not those that hold nothing."""
        found = self._found.get((name, values))
        if found is None:
            found = self.frame[name].is_in(pl.Series(values).implode()).fill_null(False).to_numpy()
            found = found if self.order is None else found[self.order]
            self._found[name, values] = found
        return found

    @cached_property
    def models(self) -> list[str | None]:
        """Of each context the model that most of its rows name, the first of equal ones; None where none does."""
        named = self.frame.select(context=self._context, model="model").drop_nulls()
        counted = (
            named.group_by("context", "model").len().sort("context", "len", "model", descending=[False, True, False])
        )
        found = dict(counted.unique("context", keep="first").select("context", "model").iter_rows())
        return [found.get(context) for context in range(len(self.starts) - 1)]

    @cached_property
    def call_hashes(self) -> tuple[npt.NDArray[np.uint64], Bools]:
        """Hash of the call key of each row of the frame, and which rows have one."""
        keys = self.frame["call_key"]
        return keys.hash().to_numpy(), keys.is_not_null().to_numpy()

    @property
    def _context(self) -> pl.Series:
        return pl.Series(np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts)))

    @cached_property
    def _numbers(self) -> pl.DataFrame:
        origin = pl.lit(pl.Series(np.repeat(np.array(self.origins_unix_ns), np.diff(self.starts))))
        if len(self.origins_unix_ns) == 1:
            origin = pl.lit(self.origins_unix_ns[0])
        moments = {name for name in _NUMBERS if name.endswith("_unix_ns")}
        values = {name: (pl.col(name) - origin) * 1e-9 if name in moments else pl.col(name) for name in _NUMBERS}
        return self.frame.select(
            value.cast(pl.Float64).fill_null(float("nan")).alias(name) for name, value in values.items()
        )

    def _ordered(self) -> Index | None:
        """Indices of the rows by context and end, of equal ones by key; None where they stand so."""
        finished, starts = self.frame["finished_unix_ns"].to_numpy(), self.starts
        rises = finished[1:] > finished[:-1]
        rises[starts[1:-1] - 1] = True
        if rises.all():
            return None
        # Rows come nearly in order: a stable sort makes use of that.
        parts = [
            np.argsort(finished[low:high], kind="stable") + low for low, high in itertools.pairwise(starts.tolist())
        ]
        order = np.concatenate(parts)
        same = finished[order[1:]] == finished[order[:-1]]
        same[starts[1:-1] - 1] = False
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        if len(tied):
            those = self.frame.select("finished_unix_ns", "request_key")[order[tied]].with_columns(
                self._context.gather(tied).alias("context")
            )
            sorted_ = those.select(pl.arg_sort_by("context", "finished_unix_ns", "request_key")).to_series().to_numpy()
            order[tied] = order[tied][sorted_]
        return order

    def _asked(self, targets: Sequence[Collection[str]]) -> Bools | None:
        """Which rows are targets, in order; None where all are."""
        wanted = [
            one.alias("request_key")
            if isinstance(one, pl.Series)
            else pl.Series("request_key", list(one), dtype=pl.String)
            for one in targets
        ]
        keys = pl.concat(wanted) if len(wanted) > 1 else wanted[0]
        own = self.frame["request_key"]
        if len(keys) == len(own) and (keys == own).all():
            return None
        if len(wanted) == 1:
            asked = own.is_in(keys.implode()).to_numpy()
        else:  # replicas that are one see the same rows, and ask about different ones
            pairs = pl.DataFrame({"context": self._context, "request_key": own}).with_row_index("place")
            of = pl.Series(np.repeat(np.arange(len(wanted)), [len(one) for one in wanted]))
            hit = pairs.join(
                pl.DataFrame({"context": of, "request_key": keys}), on=["context", "request_key"], how="semi"
            )
            asked = np.zeros(len(own), dtype=np.bool_)
            asked[hit["place"].to_numpy()] = True
        return asked if self.order is None else asked[self.order]


class Rows:
    """n requests of one context, ordered by their end: `rows[name]` of all n, `rows.own(name)` of the targets.

    target: their indices, None where all rows are.
    """

    def __init__(self, stack: Stack, cut: slice, origin_unix_ns: int, target: Index | None) -> None:
        self._stack = stack
        self._cut = cut
        self.origin_unix_ns = origin_unix_ns
        self.target = target

    def __len__(self) -> int:
        return int(self._cut.stop - self._cut.start)

    @property
    def targets(self) -> int:
        """How many rows are asked about."""
        return len(self) if self.target is None else len(self.target)

    @property
    def places(self) -> Index:
        """Where the targets stand in the stack's order."""
        if self.target is None:
            return np.arange(self._cut.start, self._cut.stop)
        return np.asarray(self.target + self._cut.start)

    def __getitem__(self, name: str) -> Floats:
        return self._stack[name][self._cut]

    def own(self, name: str) -> Floats:
        """A column of the targets."""
        return self.chosen(self[name])

    def tells(self, name: str) -> bool:
        """Whether any row knows this number."""
        return not np.isnan(self[name]).all()

    def chosen(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of one value a row, those of the targets."""
        return values if self.target is None else values[self.target]

    def series(self, name: str) -> pl.Series:
        return self._stack.series(name, self._cut)

    def own_is_one_of(self, name: str, values: tuple[str, ...]) -> Bools:
        """Which targets hold one of some texts in a column; not those that hold nothing."""
        return self.chosen(self._stack.is_one_of(name, values)[self._cut])

    @property
    def frame(self) -> pl.DataFrame:
        """All columns, in no order."""
        return self._stack.frame[self._cut]

    @property
    def shares_calls(self) -> bool:
        """Whether any of them may be sequences of one call: much cheaper than telling which."""
        hashes, known = self._stack.call_hashes
        own = np.sort(hashes[self._cut][known[self._cut]])
        return bool((own[1:] == own[:-1]).any())
