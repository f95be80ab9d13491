"""How many requests ended with an answer: of a replica or an engine, in a time, and up to edges of their latency or their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import polars as pl

from phasewise.analyzer.filters import NOT_FINISHED, SERVED, Condition
from phasewise.analyzer.frames import where
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.statistics import floats

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader


@dataclass(frozen=True, slots=True)
class Whose:
    """Requests by a column (instance or engine) and its values."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whose requests (None: all), ended after `from_unix_ns` and up to `to_unix_ns`."""

    whose: Whose | None
    from_unix_ns: int
    to_unix_ns: int


class Ended(Protocol):
    """The requests of a window that ended with an answer."""

    def engines(self) -> list[str]: ...

    def newest_unix_ns(self, whose: Whose | None) -> int | None: ...

    def count(self, stretches: Sequence[Stretch]) -> int: ...

    def up_to(self, column: str, stretches: Sequence[Stretch], edges: Floats, above: float | None = None) -> list[int]:
        """How many values of a column (e2e_s or finished_unix_ns) of these stretches lie at or below each edge and above the one
        before; those at or below `above` count nowhere."""


def counts_up_to(values: Floats, edges: Floats) -> list[int]:
    """How many values lie at or below each edge and above the one before."""
    known = values[np.isfinite(values)]
    place = np.searchsorted(edges, known, side="left")
    found: list[int] = np.bincount(place[place < len(edges)], minlength=len(edges)).tolist()
    return found


class EndedRows:
    """Of rows that were read."""

    def __init__(self, rows: pl.DataFrame) -> None:
        """rows: requests, also those that were aborted or refused."""
        told = rows.select("instance", "engine", "outcome", "finished_unix_ns", "e2e_s")
        self._rows = where(told, ~pl.col("outcome").fill_null("ok").is_in(NOT_FINISHED))
        self._kept: dict[Whose, pl.DataFrame] = {}

    def engines(self) -> list[str]:
        found: list[str] = self._rows["engine"].drop_nulls().unique().sort().to_list()
        return found

    def oldest_unix_ns(self) -> int | None:
        oldest = self._rows["finished_unix_ns"].min()
        return oldest if isinstance(oldest, int) else None

    def newest_unix_ns(self, whose: Whose | None) -> int | None:
        newest = self._of(whose)["finished_unix_ns"].max()
        return newest if isinstance(newest, int) else None

    def count(self, stretches: Sequence[Stretch]) -> int:
        return sum(len(self._in(one)) for one in stretches)

    def up_to(self, column: str, stretches: Sequence[Stretch], edges: Floats, above: float | None = None) -> list[int]:
        values = np.concatenate([np.empty(0), *(floats(self._in(one), column) for one in stretches)])
        return counts_up_to(values if above is None else values[values > above], edges)

    def _of(self, whose: Whose | None) -> pl.DataFrame:
        if whose is None:
            return self._rows
        if whose not in self._kept:
            self._kept[whose] = where(self._rows, pl.col(whose.column).is_in(whose.values))
        return self._kept[whose]

    def _in(self, stretch: Stretch) -> pl.DataFrame:
        ended = pl.col("finished_unix_ns").is_between(stretch.from_unix_ns, stretch.to_unix_ns, closed="right")
        return self._of(stretch.whose).filter(ended)


class EndedStored:
    """Of rows that stay in the store: counted there."""

    def __init__(self, store: Reader, rows: Condition, crowd: pl.DataFrame) -> None:
        """rows: which requests; crowd: of them, one row for each instance, engine and outcome with its newest end."""
        self._store = store
        self._chosen = rows
        self._crowd = crowd.filter(~pl.col("outcome").fill_null("ok").is_in(NOT_FINISHED))

    def engines(self) -> list[str]:
        found: list[str] = self._crowd["engine"].drop_nulls().unique().sort().to_list()
        return found

    def newest_unix_ns(self, whose: Whose | None) -> int | None:
        own = self._crowd if whose is None else self._crowd.filter(pl.col(whose.column).is_in(whose.values))
        newest = own["finished_max_unix_ns"].max()
        return newest if isinstance(newest, int) else None

    def count(self, stretches: Sequence[Stretch]) -> int:
        return int(self._asked("count(*) AS n", (), stretches)["n"][0])

    def up_to(self, column: str, stretches: Sequence[Stretch], edges: Floats, above: float | None = None) -> list[int]:
        distinct = np.unique(edges)
        value = f'CASE WHEN r."{column}"::DOUBLE > ? THEN r."{column}"::DOUBLE END'
        found = self._asked(
            f"map_keys(h) AS upper, map_values(h) AS n FROM (SELECT histogram({value}, ?::DOUBLE[]) AS h",
            (-np.inf if above is None else above, distinct.tolist()),
            stretches,
            end=")",
        )
        uppers, counts = found["upper"][0], found["n"][0]
        # What lies beyond the last edge has a place of its own, under no edge of ours.
        told = {} if uppers is None else dict(zip(uppers, counts, strict=True))
        first = np.searchsorted(edges, distinct, side="left")
        answer = [0] * len(edges)
        for place, upper in zip(first.tolist(), distinct.tolist(), strict=True):
            answer[place] = int(told.get(upper, 0))
        return answer

    def _asked(
        self, what: str, parameters: Sequence[object], stretches: Sequence[Stretch], *, end: str = ""
    ) -> pl.DataFrame:
        whose = [one.whose for one in stretches if one.whose is not None]
        assert len(whose) == len(stretches)  # counters are of a replica, or of an engine
        named = [
            (name, s.from_unix_ns, s.to_unix_ns) for s, who in zip(stretches, whose, strict=True) for name in who.values
        ]
        column = whose[0].column if whose else "instance"
        names, lows, highs = ([row[place] for row in named] for place in range(3))
        return self._store.query(
            f'SELECT {what} FROM (SELECT "{column}" AS "name", "finished_unix_ns", "e2e_s" FROM "requests"'
            f" WHERE {self._chosen.sql} AND {SERVED}) r"
            " JOIN (SELECT unnest(?::VARCHAR[]) AS name, unnest(?::BIGINT[]) AS low, unnest(?::BIGINT[]) AS high) s"
            f' ON r."name" = s.name AND r."finished_unix_ns" > s.low AND r."finished_unix_ns" <= s.high{end}',
            (*parameters, *self._chosen.parameters, names, lows, highs),
        )
