"""`phasewise db check`: is every byte that something stands in what was written? What is not is named with what it costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from phasewise.collector.archive import check_path
from phasewise.collector.kept_rollups import read_kept
from phasewise.collector.lake import KINDS, Lake, crc32c_of, label
from phasewise.collector.recovery import FILE
from phasewise.collector.segment import Gap, frames, segment_numbers, segment_path
from phasewise.collector.sidecar import Committed, Sidecar, lost
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore

_TABLES = (
    "requests",
    "turns",
    "engine_steps",
    "engine_samples",
    "gpu_samples",
    "instances",
    "rollups",
    "annotations",
    "findings",
)


def check(data: Path) -> dict[str, object]:
    """Reads all of a data folder that no server owns. `ok`; counts; `faults`: one line each, with what is lost."""
    faults: list[str] = []
    tables: dict[str, int] = {}
    cold: list[tuple[str, int, str, int, int, int]] = []
    if (data / FILE).exists():
        try:
            with Store(data / FILE, verified=True) as store:
                tables, cold, missing = _told(store, Sidecar(data / "watermark"))
                faults += [f"{data / FILE}: {missing}"] if missing else []
        except DamagedStore as error:
            faults.append(
                f"{error} (it is moved aside at the next start; rows of unsealed hours come back from the journal)"
            )
    segments, torn = _journal(data / "journal", faults)
    faults += _cold(data / "cold", cold)
    faults += read_kept(data / "cold").faults
    spans = _spans(data / "spans", faults)
    return {
        "ok": not faults,
        "data": str(data),
        "tables": tables,
        "journal": {"segments": segments, "torn_bytes": torn},
        "cold_files": len(cold),
        "span_files": spans,
        "faults": faults,
    }


def _told(store: Store, sidecar: Sidecar) -> tuple[dict[str, int], list[tuple[str, int, str, int, int, int]], str]:
    tables = {}
    for name in _TABLES:
        hot = int(store.query(f'SELECT count(*) AS n FROM main."{name}"')["n"].item())
        cold = store.query('SELECT coalesce(sum("rows"), 0)::BIGINT AS n FROM main.cold_files WHERE kind = ?', [name])
        tables[name] = hot + int(cold["n"].item())
    files = store.query(
        'SELECT kind, hour, path, "rows", "bytes", crc32c FROM main.cold_files ORDER BY hour, kind, path'
    )
    told = store.query("SELECT position FROM main.positions WHERE name = 'commit'")["position"]
    committed = Committed.parse(told[0]) if len(told) else Committed()
    return tables, list(files.iter_rows()), lost(sidecar.last, committed)


def _journal(directory: Path, faults: list[str]) -> tuple[int, int]:
    """Number of segments, and bytes at their ends that were never acknowledged."""
    torn = 0
    numbers = segment_numbers(directory)
    for number in numbers:
        path = segment_path(directory, number)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece in frames(descriptor, 0):
                if not isinstance(piece, Gap):
                    continue
                if piece.open_ended:
                    torn += piece.end - piece.start
                else:
                    faults.append(
                        f"{path}: bytes {piece.start} to {piece.end} are damaged: the entries in them are lost"
                    )
        finally:
            os.close(descriptor)
    return len(numbers), torn


def _cold(directory: Path, files: list[tuple[str, int, str, int, int, int]]) -> Iterator[str]:
    lake = Lake(directory)
    for kind in KINDS:
        yield from lake.faults(kind)
    for kind, hour, name, rows, size, check_ in files:
        path = directory / name
        cost = f"{rows} rows of {kind} of hour {label(hour)} are lost"
        if not path.exists():
            yield f"{path}: is missing: {cost}"
        elif path.stat().st_size != size or crc32c_of(path) != check_:
            yield f"{path}: is damaged: {cost}"


def _spans(directory: Path, faults: list[str]) -> int:
    paths = sorted(directory.glob("date=*/hour=*/*.parquet"))
    for path in paths:
        try:
            noted = check_path(path)
            if noted.exists() and int(noted.read_text(encoding="ascii"), 16) != crc32c_of(path):
                raise ValueError("its checksum is not the one it was written with")
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(65_536):
                    batch.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            faults.append(
                f"{path}: cannot be read: {str(error).splitlines()[0]}: its raw spans are lost, requests are not"
            )
    return len(paths)
