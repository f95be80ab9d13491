"""Deleting for good: rows, raw spans and journal entries of some requests, until no byte of them is left in the data folder.

Whole traces go: with a request every other request, turn and span of its trace. Sealed hours that hold such rows become hot again
and are sealed anew without them; the store's file is written anew, because deleted rows stay in its free blocks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phasewise.collector import rollups
from phasewise.collector.archive import check_path, put_file
from phasewise.collector.audit import audit
from phasewise.collector.backup import drop_snapshots
from phasewise.collector.cold import make_views, thaw
from phasewise.collector.durable import put_in_place
from phasewise.collector.import_marks import forget_marks
from phasewise.collector.journal_writer import serialized
from phasewise.collector.keys import trace_hashes
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.migration import drop_copies
from phasewise.collector.segment import KINDS as ENTRY_KINDS
from phasewise.collector.segment import Frame, frames, reframed, segment_numbers, segment_path
from phasewise.collector.store import Store, Transaction

_ROW_GROUP = 4096
_UNFINISHED = "purge"  # among the positions: what is left to do


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to delete. sql, parameters: a condition over `requests`; before_unix_ns: and only what finished earlier.

    columns: those of text that the condition speaks of: values that only deleted rows had go from everything else as well, and
    with an instance its samples and steps. everything: no condition but the time, so that these of that time go too.
    """

    sql: str
    parameters: Sequence[object]
    before_unix_ns: int | None = None
    columns: tuple[str, ...] = ()
    everything: bool = False


@dataclass(slots=True)
class Purged:
    """How much went."""

    requests: int = 0
    spans: int = 0
    hours: int = 0
    journal_rows: int = 0
    folders: list[str] = field(default_factory=list)  # of copies, removed whole


def purge(store: Store, data: Path, chosen: Chosen, now_unix_ns: int) -> Purged:
    """Delete; the writer must be paused, and read its memory anew after. Raises MachineError where the disk refuses."""
    done = Purged()
    unfinished = unfinished_of(store)
    condition, parameters = chosen.sql, list(chosen.parameters)
    if chosen.before_unix_ns is not None:
        condition, parameters = f"({condition}) AND finished_unix_ns < ?", [*parameters, chosen.before_unix_ns]
    with store.write() as transaction:
        gone = _rows(transaction, condition, parameters)
        hours = set((gone["finished_unix_ns"] // HOUR_NS).to_list()) | _turn_hours(transaction, gone)
        alone = {name: _alone(transaction, name, gone) for name in chosen.columns}
        if chosen.everything or alone.get("instance"):
            hours |= _hours_before(transaction, chosen.before_unix_ns)
        thaw(transaction, store.cold_directory, hours, now_unix_ns)
        _delete(transaction, gone, chosen)
        for name, values in alone.items():
            _forget(transaction, name, values)
        make_views(transaction, store.cold_directory)
        rollups.rebuild_of(transaction, gone)
        done.requests, done.hours = gone.height, len(hours)
        traces = sorted(set(gone["trace_id"].drop_nulls().to_list()))
        if traces:  # else the same file, or the same spans, would count as stored already
            known = trace_hashes(pl.Series("trace_id", traces, dtype=pl.String)).alias("trace").to_frame()
            transaction.run("DELETE FROM main.span_ledger WHERE trace IN (SELECT trace FROM known)", known=known)
            forget_marks(transaction)
        # With the rows goes the note of what is left to do: a purge that was broken off is finished by the next one.
        left = _Left(traces, sorted(hours), chosen.before_unix_ns if chosen.everything else None)
        _note(transaction, [*unfinished, left])
        is_nothing = not (unfinished or traces or hours or left.before_unix_ns or any(alone.values()))
    if is_nothing:
        with store.write() as transaction:
            _note(transaction, [])
        _audit(data, chosen, done, now_unix_ns)
        return done
    for one in [*unfinished, left]:
        _finish(store, data, one, done)
    with store.write() as transaction:
        _note(transaction, [_Left([], [], None)])  # names nobody, but the file still holds what was deleted in it
    store.rewrite()
    drop_copies(store.path)
    with store.write() as transaction:
        _note(transaction, [])
    _audit(data, chosen, done, now_unix_ns)
    return done


@dataclass(frozen=True, slots=True)
class _Left:
    """What a purge still has to take out of files, once its rows are deleted."""

    traces: list[str]
    hours: list[int]
    before_unix_ns: int | None


def _note(transaction: Transaction, left: Sequence[_Left]) -> None:
    transaction.execute("DELETE FROM main.positions WHERE name = ?", [_UNFINISHED])
    if left:
        text = json.dumps([asdict(one) for one in left])
        transaction.execute("INSERT INTO main.positions VALUES (?, ?)", [_UNFINISHED, text])


def unfinished_of(store: Store) -> list[_Left]:
    """What a purge that was broken off has left in files; the next purge takes it out."""
    found = store.query("SELECT position FROM positions WHERE name = ?", [_UNFINISHED])
    return [_Left(**told) for told in json.loads(found["position"].item())] if found.height else []


def _finish(store: Store, data: Path, left: _Left, done: Purged) -> None:
    """Take it out of cold tables, span files, journal and copies; may be done again."""
    lake = Lake(store.cold_directory)
    sealed = store.query("SELECT DISTINCT hour FROM main.cold_files")[
        "hour"
    ].to_list()  # anew since, without these rows
    for kind in KINDS:
        lake.remove_hours(kind, set(left.hours) - set(sealed))
        lake.vacuum(kind, 0, keep=_kept(store))
    for stray in [*(data / "journal").glob("*.purged"), *(data / "spans").glob("date=*/hour=*/.*.purged")]:
        stray.unlink()
    traces, before = pa.array(left.traces, pa.string()), left.before_unix_ns
    done.spans += sum(
        _purge_file(path, traces, before) for path in sorted((data / "spans").glob("date=*/hour=*/*.parquet"))
    )
    numbers = segment_numbers(data / "journal")
    for number in numbers:
        path = segment_path(data / "journal", number)
        done.journal_rows += _purge_segment(path, traces, before, being_written=number == numbers[-1])
    for folder in (data / "quarantine", data / "temporary"):
        if folder.exists():
            shutil.rmtree(folder)
            done.folders.append(folder.name)
    drop_snapshots(store, now_unix_s=2**40)


def _rows(transaction: Transaction, condition: str, parameters: Sequence[object]) -> pl.DataFrame:
    """Key, trace and end of every request of the traces that a matching request belongs to."""
    transaction.look_back("requests")
    return transaction.query(
        "WITH matching AS (SELECT request_key, trace_id FROM whole.requests WHERE " + condition + ") "
        "SELECT request_key, trace_id, finished_unix_ns FROM whole.requests "
        "WHERE request_key IN (SELECT request_key FROM matching) OR trace_id IN (SELECT trace_id FROM matching)",
        parameters,
    )


def _alone(transaction: Transaction, column: str, gone: pl.DataFrame) -> list[str]:
    """Values of a column that only rows to be deleted have."""
    found = transaction.query(
        f'SELECT DISTINCT "{column}" AS value FROM whole.requests r SEMI JOIN gone g USING (request_key) '
        f'WHERE value IS NOT NULL EXCEPT SELECT DISTINCT "{column}" FROM whole.requests r ANTI JOIN gone g USING (request_key)',
        gone=gone,
    )
    return [str(value) for value in found["value"]]


def _turn_hours(transaction: Transaction, gone: pl.DataFrame) -> set[int]:
    transaction.look_back("turns")
    found = transaction.query(
        f"SELECT DISTINCT finished_unix_ns // {HOUR_NS} AS hour FROM whole.turns t SEMI JOIN gone g USING (trace_id)",
        gone=gone.select("trace_id"),
    )
    return set(found["hour"].to_list())


def _hours_before(transaction: Transaction, before_unix_ns: int | None) -> set[int]:
    limit = 2**62 if before_unix_ns is None else before_unix_ns
    found = transaction.query(
        "SELECT hour FROM main.sealed_hours WHERE state = 'sealed' AND hour <= ?", [limit // HOUR_NS]
    )
    return set(found["hour"].to_list())


def _delete(transaction: Transaction, gone: pl.DataFrame, chosen: Chosen) -> None:
    for table in ("requests", "supplements"):
        transaction.run(
            f"DELETE FROM main.{table} WHERE request_key IN (SELECT request_key FROM gone) "
            "OR trace_id IN (SELECT trace_id FROM gone)",
            gone=gone,
        )
    transaction.run("DELETE FROM main.turns WHERE trace_id IN (SELECT trace_id FROM gone)", gone=gone)
    if chosen.everything and chosen.before_unix_ns is not None:
        for table, column in {**KINDS, "annotations": "unix_ns"}.items():
            transaction.execute(f'DELETE FROM main."{table}" WHERE "{column}" < ?', [chosen.before_unix_ns])
        transaction.execute(
            "DELETE FROM main.rollups WHERE bucket_unix_ns + width_s * 1000000000 <= ?", [chosen.before_unix_ns]
        )


def _forget(transaction: Transaction, column: str, values: Sequence[str]) -> None:
    """What else may hold a value that no request has any more."""
    for value in values:
        transaction.execute(
            "DELETE FROM main.findings WHERE contains(verdict, ?) OR contains(coalesce(inputs, ''), ?)", [value, value]
        )
        transaction.execute("DELETE FROM main.annotations WHERE contains(text, ?)", [value])
        if column in ("model", "instance"):
            transaction.execute(f"DELETE FROM main.rollups WHERE {column} = ?", [value])
        if column in ("model", "service", "engine_version"):
            transaction.execute(f"UPDATE main.instances SET {column} = NULL WHERE {column} = ?", [value])
        if column == "instance":
            for table in ("engine_steps", "engine_samples", "gpu_samples", "places", "instances"):
                transaction.execute(f"DELETE FROM main.{table} WHERE instance = ?", [value])


def _kept(store: Store) -> set[str]:
    return set(store.query("SELECT path FROM main.cold_files")["path"].to_list())


def _left(rows: pa.Table, traces: pa.Array, before_unix_ns: int | None) -> pa.Table:
    """Rows of spans that stay."""
    going = pc.is_in(rows["trace_id"], traces)
    if before_unix_ns is not None:
        going = pc.or_(going, pc.less(rows["end_unix_ns"], before_unix_ns))
    return rows.filter(pc.invert(going))


def _purge_file(path: Path, traces: pa.Array, before_unix_ns: int | None) -> int:
    rows = pq.read_table(path, partitioning=None)
    left = _left(rows, traces, before_unix_ns)
    if left.num_rows == rows.num_rows:
        return 0
    if left.num_rows:
        temporary = path.with_name(f".{path.name}.purged")
        pq.write_table(left, temporary, compression="zstd", row_group_size=_ROW_GROUP)
        put_file(temporary, path)
    else:
        path.unlink()
        check_path(path).unlink(missing_ok=True)
    return int(rows.num_rows - left.num_rows)


def _purge_segment(path: Path, traces: pa.Array, before_unix_ns: int | None, being_written: bool) -> int:
    """Entries keep their places, so that positions hold: what is left of one is written over it, the rest is zeros. In a copy,
    but for the segment that the receiver has open."""
    place = path if being_written else path.with_suffix(".purged")
    if not being_written:
        shutil.copyfile(path, place)
    gone = _purge_entries(place, traces, before_unix_ns)
    if not being_written:
        put_in_place(place, path)
    return gone


def _purge_entries(path: Path, traces: pa.Array, before_unix_ns: int | None) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    gone = 0
    try:
        for piece in list(frames(descriptor, 0)):
            if not isinstance(piece, Frame):
                continue
            rows = pa.ipc.open_stream(piece.payload).read_all()
            if ENTRY_KINDS.get(piece.kind) == "spans":
                left = _left(rows, traces, before_unix_ns)
            elif before_unix_ns is not None:
                left = rows.filter(pc.greater_equal(rows["unix_ns"], before_unix_ns))
            else:
                continue
            if left.num_rows == rows.num_rows:
                continue
            payload = serialized(left).to_pybytes()
            if len(payload) > len(piece.payload):  # compression fell worse by the loss of rows: then all of it goes
                payload = serialized(left.slice(0, 0)).to_pybytes()
            os.pwrite(descriptor, reframed(piece, left.num_rows, payload), piece.start)
            gone += rows.num_rows - left.num_rows
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return gone


def _audit(data: Path, chosen: Chosen, done: Purged, now_unix_ns: int) -> None:
    """One line, which must not hold what was deleted: of values only a hash."""
    told = {
        "condition": chosen.sql,
        "values_sha256": [sha256(str(value).encode()).hexdigest() for value in chosen.parameters],
        "before_unix_ns": chosen.before_unix_ns,
        "requests": done.requests,
        "spans": done.spans,
        "journal_rows": done.journal_rows,
    }
    audit(data, "purge", now_unix_ns, facts=told)
