"""Tables that `phasewise export` wrote, as Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from phasewise.collector import exchange
from phasewise.rules.errors import InputError

MAGIC = b"PAR1"
_REMEDY = "export it again"


def read(body: bytes, name: str) -> tuple[str, pa.Table]:
    """The table's name and its rows. Raises InputError for other Parquet and for what is damaged."""
    try:
        rows = pq.read_table(io.BytesIO(body), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise InputError(name, "", f"is damaged Parquet: {error}", _REMEDY) from None
    table = exchange.table_of(rows.schema, name)
    return table, exchange.aligned(rows, table, name)


def count(path: Path) -> int:
    """How many row groups a file has."""
    try:
        return int(pq.read_metadata(path).num_row_groups)
    except (pa.ArrowException, OSError) as error:
        raise InputError(path, "", f"is damaged Parquet: {error}", _REMEDY) from None


def groups(path: Path, start: int = 0) -> Iterator[bytes]:
    """The row groups of a file from one on, each as Parquet of its own."""
    try:
        with pq.ParquetFile(path) as file:
            exchange.table_of(file.schema_arrow, str(path))
            for number in range(start, file.num_row_groups):
                body = io.BytesIO()
                rows = file.read_row_group(number, use_threads=False)
                pq.write_table(rows.replace_schema_metadata(file.schema_arrow.metadata), body, compression="zstd")
                yield body.getvalue()
    except (pa.ArrowException, OSError) as error:
        raise InputError(path, "", f"is damaged Parquet: {error}", _REMEDY) from None
