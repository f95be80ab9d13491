"""Writing one sealed hour of a kind anew without bringing it back: its samples renamed, or some of its rows gone.

The new rows are written as a generation of their own, and shown by the transaction that finds the hour as it was read. Ended before
that, the old files are the ones that count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from phasewise.collector.cold import enter_files, make_views, names, placed_file
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.records import arrow_schema
from phasewise.collector.store import Store
from phasewise.collector.tables import RECORDS, ColdFile
from phasewise.collector.transaction import Transaction

_SLICE_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An hour of a kind that is written anew, and not yet shown. before: paths of the files it was read from."""

    kind: str
    hour: int
    generation: int
    before: list[str]
    placed: list[ColdFile]

    def show(self, transaction: Transaction) -> bool:
        """Make it what readers see; False where the hour is not what it was when it was read."""
        if _files(transaction, self.kind, self.hour) != self.before:
            return False
        transaction.execute("DELETE FROM main.cold_files WHERE kind = ? AND hour = ?", [self.kind, self.hour])
        enter_files(transaction, self.placed)
        transaction.execute(
            "UPDATE main.sealed_hours SET generation = greatest(generation, ?) WHERE hour = ?",
            [self.generation, self.hour],
        )
        make_views(transaction, transaction.cold_files)
        return True


def rewrite(
    store: Store, lake: Lake, kind: str, hour: int, columns: str, condition: str, parameters: Sequence[object]
) -> Rewritten | None:
    """Write the rows of a sealed hour for which the condition holds, as `columns` says; None where it has none of this kind.

    columns: what stands after SELECT; parameters: the values of its question marks, then those of the condition. A slice of the hour is in
    memory at once. Raises MachineError where the disk refuses.
    """
    before = _files(store, kind, hour)
    if not before:
        return None
    listed = ", ".join("'" + str(lake.directory / path).replace("'", "''") + "'" for path in before)
    source = f"read_parquet([{listed}], hive_partitioning = false, union_by_name = true)"
    # Files of an older release lack columns of today.
    whole = f'SELECT {names(kind)} FROM (FROM main."{kind}" WHERE FALSE UNION ALL BY NAME FROM {source})'
    slices = 1 + int(store.query(f"SELECT count(*) AS n FROM {source}")["n"].item()) // _SLICE_ROWS
    edges = [hour * HOUR_NS + HOUR_NS * i // slices for i in range(slices + 1)]
    schema, time = arrow_schema(RECORDS[kind]), KINDS[kind]

    def batches() -> Iterator[pa.RecordBatch]:
        for low, high in itertools.pairwise(edges):
            rows = store.query(
                f'SELECT {columns} FROM ({whole}) WHERE ({condition}) AND "{time}" >= ? AND "{time}" < ? ORDER BY ALL',
                [*parameters, low, high],
            )
            yield from rows.to_arrow().cast(schema).to_batches()

    generation = 1 + lake.generation(kind, hour)
    lake.write_hour(kind, hour, generation, schema, batches())
    written = [placed_file(lake.directory, kind, hour, path) for path in lake.files(kind).get(hour, [])]
    return Rewritten(kind, hour, generation, before, [one for one in written if one.rows])


def _files(source: Store | Transaction, kind: str, hour: int) -> list[str]:
    found = source.query("SELECT path FROM main.cold_files WHERE kind = ? AND hour = ? ORDER BY path", [kind, hour])
    return [str(path) for path in found["path"]]
