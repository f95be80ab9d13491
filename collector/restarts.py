"""Engines that began anew, told by their own metrics: another start time, or counters that fell. A mark on the time axis each.

Rates are differences of neighbouring samples of one process, so none is ever negative; the mark says why one is missing.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from phasewise.collector.lake import HOUR_NS
from phasewise.collector.records import Annotation
from phasewise.collector.transaction import Transaction

# They only rise in one process, and every engine counts some of them.
COUNTERS = ("prompt_tokens", "output_tokens", "finished", "ttft_count", "e2e_count", "steps")
_COLUMNS = ("instance", "unix_ns", "process_start_unix_s", *COUNTERS)
_FELL_TO = (
    0.5  # of their value: two processes that answer at one address in turn differ by less, after their first minutes
)
_SLACK_S = 1.0  # start times are rounded, and clocks of two machines differ
Sample = dict[str, Any]


class Restarts:
    """The last sample of each instance, read from the store once."""

    def __init__(self) -> None:
        self._last: dict[str, Sample | None] = {}

    def marks(self, transaction: Transaction, new: pl.DataFrame) -> list[Annotation]:
        """Restarts among samples just stored. Samples older than what was seen before tell none."""
        if new.is_empty():
            return []
        found = []
        for sample in new.select(_COLUMNS).sort("unix_ns").iter_rows(named=True):
            name = sample["instance"]
            if name not in self._last:
                self._last[name] = self._stored(transaction, name, sample["unix_ns"])
            before = self._last[name]
            if before is not None and sample["unix_ns"] <= before["unix_ns"]:
                continue
            if before is not None and (why := _restarted(before, sample)):
                at = _began(before, sample)
                found.append(
                    Annotation(unix_ns=at, kind="restart", text=f"{name} began anew: {why}", source=f"scrape:{name}")
                )
            self._last[name] = sample
        return found

    @staticmethod
    def _stored(transaction: Transaction, name: str, before_unix_ns: int) -> Sample | None:
        seen = transaction.query(
            "SELECT max(least(last_seen_unix_ns, ?)) AS last FROM instances WHERE instance = ? AND kind = 'scrape' "
            "AND first_seen_unix_ns < ?",
            [before_unix_ns - 1, name, before_unix_ns],
        )["last"].item()
        low = before_unix_ns if seen is None else int(seen) - HOUR_NS
        transaction.look_back("engine_samples", within=(low, before_unix_ns))  # it may be sealed since
        rows = transaction.query(
            f"SELECT {', '.join(_COLUMNS)} FROM whole.engine_samples WHERE instance = ? AND unix_ns < ? "
            "ORDER BY unix_ns DESC LIMIT 1",
            [name, before_unix_ns],
        )
        return rows.row(0, named=True) if rows.height else None


def _restarted(before: Sample, after: Sample) -> str:
    """How it is known that another process answers; "" where it is the same, or where it cannot be told."""
    old, new = before["process_start_unix_s"], after["process_start_unix_s"]
    if old is not None and new is not None:
        # A process that ran already while the other one answered is its neighbour behind one address, not its successor.
        began_since = new > old + _SLACK_S and new * 1e9 >= before["unix_ns"] - _SLACK_S * 1e9
        return "another process" if began_since else ""
    known = [(before[name], after[name]) for name in COUNTERS if before[name] and after[name] is not None]
    if known and all(now < _FELL_TO * then for then, now in known):
        return "its counters fell"
    return ""


def _began(before: Sample, after: Sample) -> int:
    """The start that the process tells, where it lies between the two samples; else the first sample after it."""
    started = after["process_start_unix_s"]
    at = started * 1e9 if started is not None else after["unix_ns"]
    return round(at) if before["unix_ns"] <= at <= after["unix_ns"] else int(after["unix_ns"])
