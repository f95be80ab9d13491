"""Counts of what happened to what came in; they commit with the rows."""

from __future__ import annotations

import polars as pl

from phasewise.collector.transaction import Transaction

LABELS = 200  # distinct labels of one counter; more are counted under one


class Counters:
    """Counters by (name, label)."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self._values = {
            (str(n), str(label or "")): int(v) for n, label, v in rows.select("name", "label", "value").iter_rows()
        }
        self._changed: set[tuple[str, str]] = set()
        self._committed = dict(self._values)

    def add(self, name: str, count: int, label: str = "") -> None:
        if not count:
            return
        key = (name, label)
        if label and key not in self._values and len(self.labels(name)) >= LABELS:
            key = (name, "(other)")
        self._values[key] = self._values.get(key, 0) + count
        self._changed.add(key)

    def value(self, name: str) -> int:
        return self._values.get((name, ""), 0)

    def named(self) -> dict[str, int]:
        """Totals by name."""
        found: dict[str, int] = {}
        for (name, _), value in self._values.items():
            found[name] = found.get(name, 0) + value
        return found

    def labels(self, name: str) -> dict[str, int]:
        return {label: value for (own, label), value in self._values.items() if own == name and label}

    def store(self, transaction: Transaction) -> None:
        """Write what changed."""
        if not self._changed:
            return
        rows = [(*key, self._values[key]) for key in sorted(self._changed)]
        transaction.replace("counters", ("name", "label"), ("name", "label", "value"), rows)
        self._changed.clear()

    def commit(self) -> None:
        """What was stored is committed."""
        self._committed = dict(self._values)

    def roll_back(self) -> None:
        """What was counted since the last commit was undone with its rows."""
        self._values = dict(self._committed)
        self._changed.clear()
