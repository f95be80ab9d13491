"""Sealing: hours that nothing changes any more move from the hot tables to the cold tier, each row visible once at any moment.

First the hour's rows are written as one generation of each cold table, then what was written is compared with the hot rows, by
count and by a digest of every value, and only in the transaction that finds them equal the hot rows go and the files come into
the view. Ended at any point, the hot rows are still the ones that count, and the next run writes the generation that is missing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from phasewise.collector.cold import enter_files, make_views, names, placed_file, thaw
from phasewise.collector.lake import HOUR_NS, KINDS, Lake, label
from phasewise.collector.late_times import late_hours
from phasewise.collector.records import arrow_schema
from phasewise.collector.rollups import dirty_hours
from phasewise.collector.store import Store
from phasewise.collector.tables import RECORDS, ColdFile
from phasewise.collector.transaction import Transaction

LOG = logging.getLogger(__name__)
SEAL_AFTER_S = 3600.0
# What is attributed now looks at the hour before its own, and at what finished up to an hour before it began.
SLACK_NS = 900 * 10**9
UNSETTLED_NS = 24 * HOUR_NS  # rows that are not final after a day will not become so
_SLICE_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Due:
    """An hour to seal: its rows in each hot table, the last receipt, the generation to write."""

    hour: int
    rows: int
    received_unix_ns: int | None
    generation: int


def due_hours(store: Store, now_unix_ns: int, seal_after_s: float = SEAL_AFTER_S) -> list[Due]:
    """Hours that ended `seal_after_s` and a quarter of an hour ago, of which nothing was received or brought back since, whose rows are final,
    and those of the next hour too, which are judged by what stands here, whose rows nothing late is still to be said of, and whose rollups
    say what they say."""
    quiet = now_unix_ns - int(seal_after_s * 1e9) - SLACK_NS
    parts = [
        f'SELECT "{column}" // {HOUR_NS} AS hour, NULL AS open, NULL AS received FROM main."{kind}"'
        for kind, column in KINDS.items()
        if kind != "requests"
    ]
    found = store.query(
        f"""
        WITH present AS (
          SELECT finished_unix_ns // {HOUR_NS} AS hour, NOT coalesce(final, FALSE) AS open, received_unix_ns AS received
          FROM main.requests UNION ALL {" UNION ALL ".join(parts)}
        ), hours AS (
          SELECT hour, count(*) AS n, count(*) FILTER (open) AS open, max(received) AS received FROM present GROUP BY hour
        )
        SELECT h.hour, h.n, greatest(h.received, s.received_unix_ns) AS received, coalesce(s.generation, 0) + 1 AS generation
        FROM hours h LEFT JOIN main.sealed_hours s USING (hour) LEFT JOIN hours n ON n.hour = h.hour + 1
        WHERE (h.hour + 1) * {HOUR_NS} <= ? AND coalesce(h.received, 0) <= ? AND coalesce(s.thawed_unix_ns, 0) <= ?
          AND (h.open + coalesce(n.open, 0) = 0 OR (h.hour + 1) * {HOUR_NS} <= ?)
        ORDER BY h.hour
        """,
        [quiet, quiet, quiet, now_unix_ns - UNSETTLED_NS],
    )
    waiting = dirty_hours(store) | {
        hour for hour in late_hours(store) if (hour + 1) * HOUR_NS > now_unix_ns - UNSETTLED_NS
    }
    return [due for due in (Due(*row) for row in found.iter_rows()) if due.hour not in waiting]


class Sealer:
    """Moves hours of one store into one lake. One at a time; the writer may work beside it."""

    def __init__(self, store: Store, clock: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock
        self.lake = Lake(store.cold_directory)

    def seal(self, due: Due) -> bool:
        """Seal an hour; False where a row came while it was written: then it stays hot, and is tried again.

        Raises MachineError where the disk refuses.
        """
        with self._store.write() as transaction:  # rows that came past the writer join those that are sealed
            thaw(transaction, self._store.cold_files, [due.hour], self._clock())
        generation = due.generation
        for _ in range(2):
            placed = self._written(due.hour, generation)
            cold = {kind: self._digest_of_files([one for one in placed if one.kind == kind]) for kind in KINDS}
            if {kind: _digest(self._store, kind, due.hour) for kind in KINDS} == cold:
                break
            # A run that ended before its rows were moved has left this generation, and something came since.
            generation = 1 + max(self.lake.generation(kind, due.hour) for kind in KINDS)
        with self._store.write() as transaction:
            if due.hour in dirty_hours(transaction):
                return False  # its rollups are made of hot rows, soon
            if {kind: _digest(transaction, kind, due.hour) for kind in KINDS} != cold:
                LOG.info("hour %s changed while it was sealed; it is tried again", label(due.hour))
                return False
            self._move(transaction, due, generation, placed)
        return True

    def _written(self, hour: int, generation: int) -> list[ColdFile]:
        """The files of an hour, once this generation of it is written."""
        for kind in KINDS:
            if self._count(kind, hour) or self.lake.generation(kind, hour):
                rows = self._batches(kind, hour)
                self.lake.write_hour(kind, hour, generation, arrow_schema(RECORDS[kind]), rows)
        directory = self.lake.directory
        return [
            placed_file(directory, kind, hour, path) for kind in KINDS for path in self.lake.files(kind).get(hour, [])
        ]

    def _move(self, transaction: Transaction, due: Due, generation: int, placed: list[ColdFile]) -> None:
        for kind, column in KINDS.items():
            transaction.execute(
                f'DELETE FROM main."{kind}" WHERE "{column}" >= ? AND "{column}" < ?',
                [due.hour * HOUR_NS, (due.hour + 1) * HOUR_NS],
            )
        transaction.execute("DELETE FROM main.cold_files WHERE hour = ?", [due.hour])
        enter_files(transaction, placed)
        before = transaction.query("SELECT expired_unix_ns FROM main.sealed_hours WHERE hour = ?", [due.hour])
        expired = before["expired_unix_ns"].item() if before.height else None
        transaction.execute("DELETE FROM main.sealed_hours WHERE hour = ?", [due.hour])
        transaction.execute(
            "INSERT INTO main.sealed_hours BY NAME SELECT ? AS hour, ? AS generation, 'sealed' AS state, ? AS sealed_unix_ns, "
            "? AS received_unix_ns, ? AS rows, ? AS expired_unix_ns",
            [due.hour, generation, self._clock(), due.received_unix_ns, sum(one.rows for one in placed), expired],
        )
        make_views(transaction, self._store.cold_files)

    def _count(self, kind: str, hour: int) -> int:
        column = KINDS[kind]
        found = self._store.query(
            f'SELECT count(*) AS n FROM main."{kind}" WHERE "{column}" >= ? AND "{column}" < ?',
            [hour * HOUR_NS, (hour + 1) * HOUR_NS],
        )
        return int(found["n"].item())

    def _batches(self, kind: str, hour: int) -> Iterator[pa.RecordBatch]:
        """The hot rows of an hour in the order of time, a slice of it at once: an hour may hold a million."""
        column, schema = KINDS[kind], arrow_schema(RECORDS[kind])
        slices = 1 + self._count(kind, hour) // _SLICE_ROWS
        edges = [hour * HOUR_NS + HOUR_NS * i // slices for i in range(slices + 1)]
        for low, high in itertools.pairwise(edges):
            rows = self._store.query(
                f'SELECT {names(kind)} FROM main."{kind}" WHERE "{column}" >= ? AND "{column}" < ? ORDER BY ALL',
                [low, high],
            )
            yield from rows.to_arrow().cast(schema).to_batches()

    def _digest_of_files(self, placed: list[ColdFile]) -> tuple[int, str]:
        if not placed:
            return 0, "0"
        listed = ", ".join("'" + str(self.lake.directory / one.path).replace("'", "''") + "'" for one in placed)
        source = f"read_parquet([{listed}], hive_partitioning = false)"
        return _read(self._store.query(f"SELECT {_DIGEST.format(names(placed[0].kind))} FROM {source}"))


# Sums of 64-bit hashes of whole rows: the order of rows does not matter, one value less or changed does.
_DIGEST = "count(*) AS n, coalesce(sum(CAST(hash({}) AS HUGEINT)), 0)::VARCHAR AS digest"


def _digest(source: Store | Transaction, kind: str, hour: int) -> tuple[int, str]:
    column = KINDS[kind]
    return _read(
        source.query(
            f'SELECT {_DIGEST.format(names(kind))} FROM main."{kind}" WHERE "{column}" >= ? AND "{column}" < ?',
            [hour * HOUR_NS, (hour + 1) * HOUR_NS],
        )
    )


def _read(found: pl.DataFrame) -> tuple[int, str]:
    return int(found["n"].item()), str(found["digest"].item())
