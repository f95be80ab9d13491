"""The folder of an export: one Parquet file a table, and a manifest written last, with rows and digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from phasewise.collector.durable import put_in_place
from phasewise.collector.exchange import SPANS, TABLES, Selection, marked
from phasewise.collector.keys import span_hashes, trace_hashes
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.rules.errors import InputError

MANIFEST = "manifest.json"
FORMAT = "phasewise-export/1"
_BLOCK_BYTES = 1 << 20
_REMEDY = "export it again, or copy the whole folder again"


class Traces:
    """Which spans belong to an export: those of the traces of its requests and turns, and without a condition on requests also
    whatever ended in the window. Each span once."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._traces = np.empty(0, dtype=np.uint64)
        self._spans = np.empty(0, dtype=np.uint64)

    def selected(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows to write; of requests and turns the traces are noted."""
        if not rows.num_rows:
            return rows
        if table == SPANS:
            return self._new_spans(rows)
        if table in ("requests", "turns") and not self._selection.is_everything:
            ids = pl.Series("trace_id", rows["trace_id"].drop_null().to_pylist(), dtype=pl.String)
            self._traces = np.union1d(self._traces, trace_hashes(ids).to_numpy())
        return rows

    def _new_spans(self, rows: pa.Table) -> pa.Table:
        ids = pl.Series("trace_id", rows["trace_id"].to_pylist(), dtype=pl.String)
        keep = np.ones(rows.num_rows, dtype=bool)
        if not self._selection.is_everything:
            keep = np.isin(trace_hashes(ids).to_numpy(), self._traces)
            if not self._selection.condition:
                ends = rows["end_unix_ns"].to_numpy()
                keep |= (ends >= self._selection.from_unix_ns) & (ends < self._selection.to_unix_ns)
        spans = span_hashes(ids, pl.Series("span_id", rows["span_id"].to_pylist(), dtype=pl.String)).to_numpy()
        keep &= ~_known(self._spans, spans)
        self._spans = np.sort(np.concatenate([self._spans, spans[keep]]))
        return rows.filter(pa.array(keep))


def _known(ordered: np.ndarray[Any, np.dtype[np.uint64]], values: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
    """Whether each value is among ordered ones."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[at] == values


class FolderWriter:
    """Writes the files of an export under temporary names; `finish` gives them theirs, and writes the manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._rows: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """What was not finished is taken away."""
        for name, writer in self._writers.items():
            writer.close()
            self._part(name).unlink(missing_ok=True)

    def add(self, name: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        schema = marked(rows.schema, name)
        if name not in self._writers:
            self._writers[name] = pq.ParquetWriter(self._part(name), schema, compression="zstd")
        self._writers[name].write_table(rows.replace_schema_metadata(schema.metadata))
        self._rows[name] = self._rows.get(name, 0) + rows.num_rows

    def finish(self) -> dict[str, Any]:
        """The manifest, as it is written."""
        files = []
        for name, writer in self._writers.items():
            writer.close()
            path = self._folder / f"{name}.parquet"
            put_in_place(self._part(name), path)
            size = path.stat().st_size
            files.append(
                {"file": path.name, "table": name, "rows": self._rows[name], "bytes": size, "sha256": digest_of(path)}
            )
        self._writers.clear()
        manifest = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "files": files}
        part = self._folder / f".{MANIFEST}.part"
        part.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        put_in_place(part, self._folder / MANIFEST)
        return manifest

    def _part(self, name: str) -> Path:
        return self._folder / f".{name}.parquet.part"


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def is_export(folder: Path) -> bool:
    """Whether a folder is one: by its manifest, or by files of ours without one, which `files_of_export` refuses."""
    return (folder / MANIFEST).is_file() or any((folder / f"{name}.parquet").is_file() for name in (*TABLES, SPANS))


def files_of_export(folder: Path) -> list[Path]:
    """The files of an export in their order. Raises InputError where one is missing, was changed, or is of a newer release."""
    path = folder / MANIFEST
    if not path.exists():
        raise InputError(path, "", "is missing: the export was cut off", f"{_REMEDY}, or name its files one by one")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, entries = manifest["schema_version"], manifest["files"]
        known = [(folder / Path(entry["file"]).name, entry["bytes"], entry["sha256"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(path, "", f"is no manifest of {FORMAT}", _REMEDY) from None
    if manifest.get("format") != FORMAT or not isinstance(version, int) or version > SCHEMA_VERSION:
        told = f"is {manifest.get('format')!r:.40} of schema {version!r:.20}"
        raise InputError(
            path, "format", told, f"upgrade phasewise: this release knows {FORMAT}, schema {SCHEMA_VERSION}"
        )
    for file, size, digest in known:
        if not file.is_file():
            raise InputError(file, "", "is missing, although the manifest names it", _REMEDY)
        if file.stat().st_size != size or digest_of(file) != digest:
            raise InputError(file, "", "is not what the manifest says: cut off, or changed", _REMEDY)
    return [file for file, _, _ in known]
