"""Which requests of a large window a verdict reads: an even draw, the same for the same requests wherever and in whatever order they lie.

Drawn are requests, not traces: a verdict holds requests against each other and no trace together, and an agent's trace of a hundred
thousand calls would be in the draw with all of them or with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.analyzer.filters import Condition

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

# Requests that are read at most: the slowest hundredth of them are 1,200, and a share is told within 0.3 points (95 %).
MOST_ROWS = 120_000
_OFF_RATIO = 0.5  # of what is expected: so far off, the keys are none of ours


@dataclass(frozen=True, slots=True)
class Drawn:
    """count: how many rows were read; of: how many there are."""

    count: int
    of: int

    def json(self) -> dict[str, object]:
        return {"read": self.count, "of": self.of}


def are_many(store: Reader, rows: Condition) -> bool:
    """Whether the rows that a condition keeps are more than are read."""
    return count_rows(store, rows) > MOST_ROWS


def drawn_of(store: Reader, rows: Condition, count: int) -> Condition:
    """Of the rows that a condition keeps (`count`) about MOST_ROWS, all of them where they are no more."""
    if count <= MOST_ROWS:
        return rows
    share = MOST_ROWS / count
    below = f"{int(share * 2**64):016x}"
    # A key is a hash, in hexadecimal digits. Keys that somebody chose may be anything: those are hashed.
    for key in ('"request_key"', 'md5("request_key")'):
        found = Condition(f"{rows.sql} AND {key} < ?", (*rows.parameters, below))
        drawn = count_rows(store, found)
        if abs(drawn - MOST_ROWS) <= _OFF_RATIO * MOST_ROWS:
            break
    return found


def count_rows(store: Reader, rows: Condition) -> int:
    return int(store.query(f'SELECT count(*) AS n FROM "requests" WHERE {rows.sql}', rows.parameters)["n"][0])
