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


def drawn_of(rows: Condition, count: int) -> Condition:
    """Of the rows that a condition keeps (`count`) about MOST_ROWS, all of them where they are no more."""
    if count <= MOST_ROWS:
        return rows
    below = f"{int(MOST_ROWS / count * 2**64):016x}"
    # Keys of ours are hashes, but others may have chosen theirs, and both lie in one window.
    return Condition(f'{rows.sql} AND md5("request_key") < ?', (*rows.parameters, below))


def count_rows(store: Reader, rows: Condition) -> int:
    return int(store.query(f'SELECT count(*) AS n FROM "requests" WHERE {rows.sql}', rows.parameters)["n"][0])
