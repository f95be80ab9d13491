"""What was brought in already: closed intervals of each source, in one small JSON file beside the data they went to.

It only saves work: what is brought in twice is stored once. A file that cannot be read counts as empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

COVERAGE = "backfill.json"  # in the data folder
Interval = tuple[int, int]  # milliseconds, the end not included


class Coverage:
    """Intervals by source; `add` writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    def missing(self, source: str, from_ms: int, to_ms: int) -> Iterator[Interval]:
        """The parts of a window that were not brought in yet, in order."""
        at_ms = from_ms
        for start_ms, end_ms in self._known.get(source, []):
            if end_ms <= at_ms:
                continue
            if start_ms >= to_ms:
                break
            if start_ms > at_ms:
                yield at_ms, start_ms
            at_ms = end_ms
        if at_ms < to_ms:
            yield at_ms, to_ms

    def add(self, source: str, from_ms: int, to_ms: int) -> None:
        """Note that an interval is stored; neighbours become one."""
        if from_ms >= to_ms:
            return
        merged: list[Interval] = []
        for start_ms, end_ms in sorted([*self._known.get(source, []), (from_ms, to_ms)]):
            if merged and start_ms <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end_ms))
            else:
                merged.append((start_ms, end_ms))
        self._known[source] = merged
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        draft.write_text(json.dumps(self._known), encoding="utf-8")
        draft.replace(self._path)


def _read(path: Path) -> dict[str, list[Interval]]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): sorted((int(a), int(b)) for a, b in found) for name, found in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
