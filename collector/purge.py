"""Deleting for good: rows, raw spans and journal entries of some requests, until no byte of them is left in the data folder.

Whole traces go: with a request every other request, turn and span of its trace. What is to go is noted in the store first; then hour
by hour its rows go from the hot tables and, in files written anew, from the cold tier; then spans, journal and copies; and last the
store's file is written anew, because deleted rows stay in its free blocks. Broken off anywhere, `go_on` goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import polars as pl
import pyarrow as pa

from phasewise.collector import rollups
from phasewise.collector.audit import audit
from phasewise.collector.backup import drop_snapshots
from phasewise.collector.balanced import note_pending, pending
from phasewise.collector.import_marks import forget_marks
from phasewise.collector.kept_rollups import KeptRollups
from phasewise.collector.keys import trace_hashes
from phasewise.collector.lake import HOUR_NS, KINDS, Lake, label
from phasewise.collector.late_times import forget_late
from phasewise.collector.migration import drop_copies
from phasewise.collector.purge_files import purge_copies, purge_journal, purge_spans
from phasewise.collector.rewriting import rewrite
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.rules.errors import MachineError

_UNFINISHED = "purge"  # among the positions: what is left to do
ROLLED = frozenset({"model", "instance"})  # columns of text that rollups have
_OF_INSTANCES = ("engine_steps", "engine_samples", "gpu_samples")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to delete. sql, parameters: a condition over `requests`; before_unix_ns: and only what finished earlier.

    columns: those of text that the condition speaks of: values that only deleted rows had go from everything else as well, and
    with an instance its samples and steps. is_rolled: it speaks of ROLLED alone, whatever the time. everything: no condition but the time, so that these of that time go too.
    """

    sql: str
    parameters: Sequence[object]
    before_unix_ns: int | None = None
    columns: tuple[str, ...] = ()
    everything: bool = False
    is_rolled: bool = False


@dataclass(slots=True)
class Purged:
    """How much went."""

    requests: int = 0
    spans: int = 0
    hours: int = 0
    journal_rows: int = 0
    folders: list[str] = field(default_factory=list)  # of copies, removed whole
    files: list[str] = field(default_factory=list)  # of raw spans, removed whole: they could not be read


def purge(store: Store, data: Path, chosen: Chosen, now_unix_ns: int) -> Purged:
    """Delete; the writer must be paused, and read its memory anew after. Raises MachineError where the disk refuses."""
    with store.tending:
        done = go_on(store, data, now_unix_ns)
        before = _plan(store, chosen)
        told = go_on(store, data, now_unix_ns) if before.is_something else Purged()
        done.requests += before.requests
        for name in ("spans", "hours", "journal_rows"):
            setattr(done, name, getattr(done, name) + getattr(told, name))
        done.folders = sorted({*done.folders, *told.folders})
        done.files = sorted({*done.files, *told.files})
    _audit(data, chosen, done, now_unix_ns)
    return done


def is_unfinished(store: Store) -> bool:
    """Whether a purge was broken off."""
    return not store.query("SELECT 1 FROM positions WHERE name = ?", [_UNFINISHED]).is_empty()


def go_on(store: Store, data: Path, now_unix_ns: int) -> Purged:
    """Do what a purge has left to do, that was broken off; the writer must be paused. Raises MachineError where the disk refuses."""
    done = Purged()
    left = _noted(store)
    if left is None:
        return done
    lake = Lake(store.cold_directory)
    with store.tending:
        for hour in left.waiting:
            _purge_hour(store, lake, hour, left)
            left = left.without(hour)
            done.hours += 1
        with store.write() as transaction:
            _forget_all(transaction, left)
        KeptRollups(store).write_anew()
        for kind in KINDS:
            shown = _shown(store, kind)
            lake.remove_hours(kind, set(left.hours) - shown.keys())  # hours that came back stand there still
            lake.vacuum(kind, 0, keep=set().union(*shown.values()))

        def going(traces: pa.Array) -> pa.Array:
            with store.write() as transaction:
                found = transaction.query(
                    "SELECT DISTINCT trace_id FROM main.purging SEMI JOIN own USING (trace_id)",
                    own=pa.table({"trace_id": traces}),
                )
            return pa.array(found["trace_id"].to_list(), pa.string())

        spans = purge_spans(data, going, left.before_unix_ns)
        done.spans, done.files = spans.rows, spans.files
        done.journal_rows = purge_journal(data / "journal", going, left.before_unix_ns)
        done.folders = purge_copies(data)
        drop_snapshots(store, now_unix_s=2**40)
        with store.write() as transaction:
            transaction.execute("DELETE FROM main.purging")
            _note(transaction, _Left())  # names nobody, but the file still holds what was deleted in it
        store.rewrite()
        drop_copies(store.path)
        with store.write() as transaction:
            _note(transaction, None)
    return done


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left to do, beside the rows in the table `purging`.

    waiting: hours with rows to delete; hours: these and those that are done; alone: values by column that only deleted requests had;
    before_unix_ns: everything before goes.
    """

    waiting: Sequence[int] = ()
    hours: Sequence[int] = ()
    alone: dict[str, list[str]] = field(default_factory=dict)
    before_unix_ns: int | None = None

    @property
    def instances(self) -> list[str]:
        return self.alone.get("instance", [])

    def without(self, hour: int) -> _Left:
        return replace(self, waiting=[one for one in self.waiting if one != hour])


@dataclass(frozen=True, slots=True)
class _Planned:
    requests: int
    is_something: bool


def _plan(store: Store, chosen: Chosen) -> _Planned:
    """Note what is to go: keys and traces of requests in a table, which may be larger than memory, the rest beside it."""
    condition, parameters = chosen.sql, list(chosen.parameters)
    if chosen.before_unix_ns is not None:
        condition, parameters = f"({condition}) AND finished_unix_ns < ?", [*parameters, chosen.before_unix_ns]
    columns = f"request_key, trace_id, finished_unix_ns // {HOUR_NS} AS hour"
    with store.write() as transaction:
        transaction.look_back(*KINDS)
        transaction.execute(
            f"INSERT INTO main.purging BY NAME SELECT {columns} FROM whole.requests WHERE {condition}", parameters
        )
        transaction.execute(
            f"INSERT INTO main.purging BY NAME SELECT {columns} FROM whole.requests r "
            "SEMI JOIN (SELECT DISTINCT trace_id FROM main.purging WHERE trace_id IS NOT NULL) t USING (trace_id) "
            "ANTI JOIN main.purging p USING (request_key)"
        )
        alone = {name: _alone(transaction, name) for name in chosen.columns}
        if chosen.is_rolled:  # hours that expired have no rows, and speak of it all the same
            for name in chosen.columns:
                alone[name] = sorted({*alone[name], *_rolled_alone(transaction, name, chosen)})
        before = chosen.before_unix_ns if chosen.everything else None
        hours = _hours(transaction, alone.get("instance", []), before)
        requests = int(transaction.query("SELECT count(*) AS n FROM main.purging")["n"].item())
        is_something = bool(requests or hours or before or any(alone.values()))
        if is_something:
            _note(transaction, _Left(hours, hours, alone, before))
    return _Planned(requests, is_something)


def _alone(transaction: Transaction, column: str) -> list[str]:
    """Values of a column that only requests to be deleted have."""
    found = transaction.query(
        f'SELECT DISTINCT "{column}" AS value FROM whole.requests r SEMI JOIN main.purging p USING (request_key) '
        f'WHERE value IS NOT NULL EXCEPT SELECT DISTINCT "{column}" FROM whole.requests r '
        "ANTI JOIN main.purging p USING (request_key)"
    )
    return sorted(str(value) for value in found["value"])


def _rolled_alone(transaction: Transaction, column: str, chosen: Chosen) -> list[str]:
    """Values of a column that rollups have and no request that stays."""
    found = transaction.query(
        f'SELECT DISTINCT "{column}" AS value FROM main.rollups WHERE value IS NOT NULL AND ({chosen.sql}) '
        f'EXCEPT SELECT DISTINCT "{column}" FROM whole.requests r ANTI JOIN main.purging p USING (request_key)',
        list(chosen.parameters),
    )
    return [str(value) for value in found["value"]]


def _hours(transaction: Transaction, instances: list[str], before_unix_ns: int | None) -> list[int]:
    """Hours with rows to delete, hot and sealed ones."""
    parts = [
        "SELECT hour FROM main.purging",
        f"SELECT finished_unix_ns // {HOUR_NS} FROM whole.turns t SEMI JOIN main.purging p USING (trace_id)",
    ]
    parameters: list[object] = []
    if instances:
        for kind in _OF_INSTANCES:
            parts.append(f'SELECT "{KINDS[kind]}" // {HOUR_NS} FROM whole."{kind}" WHERE list_contains(?, instance)')
            parameters.append(instances)
    if before_unix_ns is not None:
        for kind, column in KINDS.items():
            parts.append(f'SELECT "{column}" // {HOUR_NS} FROM whole."{kind}" WHERE "{column}" < ?')
            parameters.append(before_unix_ns)
    union = " UNION ".join(parts)
    return sorted(
        transaction.query(f"SELECT DISTINCT hour FROM ({union}) AS found(hour)", parameters)["hour"].to_list()
    )


def _goes(kind: str, left: _Left) -> tuple[str, list[object]]:
    """Which rows of a kind are to be deleted; "" where none is. Never unknown, so that its opposite says what stays."""
    parts: list[str] = []
    parameters: list[object] = []
    if kind == "requests":
        parts.append("request_key IN (SELECT request_key FROM main.purging)")
    if kind in ("requests", "turns"):
        parts.append("trace_id IN (SELECT trace_id FROM main.purging WHERE trace_id IS NOT NULL)")
    elif left.instances:
        parts.append("list_contains(?, instance)")
        parameters.append(left.instances)
    if left.before_unix_ns is not None:
        parts.append(f'"{KINDS[kind]}" < ?')
        parameters.append(left.before_unix_ns)
    return " OR ".join(f"coalesce({part}, FALSE)" for part in parts), parameters


def _purge_hour(store: Store, lake: Lake, hour: int, left: _Left) -> None:
    """Take the rows of one hour out, sealed ones and hot ones, and make its rollups anew."""
    written = []
    for kind in KINDS:
        condition, parameters = _goes(kind, left)
        if condition and (one := rewrite(store, lake, kind, hour, "*", f"NOT ({condition})", parameters)):
            written.append(one)
    with store.write() as transaction:
        for one in written:
            if not one.show(transaction):
                raise MachineError(f"{store.path}: hour {label(hour)} changed while it was purged (try again)")
        _delete_hot(transaction, hour, left)
        _note_sealed(transaction, hour)
        minutes = range(hour * HOUR_NS, (hour + 1) * HOUR_NS, rollups.MINUTE_NS)
        rollups.rebuild(transaction, minutes, [hour * HOUR_NS], cold=True)
        _note(transaction, left.without(hour))
    for one in written:
        for path in one.before:
            (store.cold_directory / path).unlink(missing_ok=True)


def _delete_hot(transaction: Transaction, hour: int, left: _Left) -> None:
    for kind, column in KINDS.items():
        condition, parameters = _goes(kind, left)
        if condition:
            transaction.execute(
                f'DELETE FROM main."{kind}" WHERE "{column}" >= ? AND "{column}" < ? AND ({condition})',
                [hour * HOUR_NS, (hour + 1) * HOUR_NS, *parameters],
            )
    traces = transaction.query(
        "SELECT DISTINCT trace_id FROM main.purging WHERE hour = ? AND trace_id IS NOT NULL", [hour]
    )["trace_id"]
    if len(traces):  # else the same spans would count as stored already
        known = trace_hashes(traces).alias("trace").to_frame()
        transaction.run("DELETE FROM main.span_ledger WHERE trace IN (SELECT trace FROM known)", known=known)


def _note_sealed(transaction: Transaction, hour: int) -> None:
    """What is left of a sealed hour; where nothing is it is sealed no more."""
    rows = transaction.query(
        'SELECT count(*) AS files, coalesce(sum("rows"), 0)::BIGINT AS n FROM main.cold_files WHERE hour = ?', [hour]
    ).row(0)
    if rows[0]:
        transaction.execute("UPDATE main.sealed_hours SET rows = ? WHERE hour = ?", [rows[1], hour])
        return
    transaction.execute(
        "DELETE FROM main.sealed_hours WHERE hour = ? AND state = 'sealed' AND expired_unix_ns IS NULL", [hour]
    )
    transaction.execute(
        "UPDATE main.sealed_hours SET rows = 0, state = 'expired' WHERE hour = ? AND state = 'sealed'", [hour]
    )


def _forget_all(transaction: Transaction, left: _Left) -> None:
    """What else the store knows of requests that are gone."""
    transaction.execute(
        "DELETE FROM main.supplements WHERE request_key IN (SELECT request_key FROM main.purging) "
        "OR trace_id IN (SELECT trace_id FROM main.purging WHERE trace_id IS NOT NULL)"
    )
    for name, values in left.alone.items():
        for value in values:
            _forget(transaction, name, value)
    if left.instances:
        forget_late(transaction, left.instances)
        note_pending(transaction, [name for name in pending(transaction) if name not in left.instances])
    if left.before_unix_ns is not None:
        transaction.execute("DELETE FROM main.annotations WHERE unix_ns < ?", [left.before_unix_ns])
        transaction.execute(
            "DELETE FROM main.rollups WHERE bucket_unix_ns + width_s * 1000000000 <= ?", [left.before_unix_ns]
        )
    if transaction.query("SELECT 1 FROM main.purging LIMIT 1").height:
        forget_marks(transaction)  # else the same file would count as stored already


def _forget(transaction: Transaction, column: str, value: str) -> None:
    """What else may hold a value that no request has any more."""
    transaction.execute(
        "DELETE FROM main.findings WHERE contains(verdict, ?) OR contains(coalesce(inputs, ''), ?)", [value, value]
    )
    transaction.execute("DELETE FROM main.annotations WHERE contains(text, ?)", [value])
    if column in ROLLED:
        transaction.execute(f"DELETE FROM main.rollups WHERE {column} = ?", [value])
    if column in ("model", "service", "engine_version"):
        transaction.execute(f"UPDATE main.instances SET {column} = NULL WHERE {column} = ?", [value])
    if column == "instance":
        for table in ("places", "instances"):
            transaction.execute(f"DELETE FROM main.{table} WHERE instance = ?", [value])


def _shown(store: Store, kind: str) -> dict[int, set[str]]:
    """Paths of the files that readers see, by hour."""
    found = store.query("SELECT hour, path FROM main.cold_files WHERE kind = ?", [kind])
    shown: dict[int, set[str]] = {}
    for hour, path in found.iter_rows():
        shown.setdefault(hour, set()).add(path)
    return shown


def _note(transaction: Transaction, left: _Left | None) -> None:
    transaction.execute("DELETE FROM main.positions WHERE name = ?", [_UNFINISHED])
    if left is not None:
        transaction.execute("INSERT INTO main.positions VALUES (?, ?)", [_UNFINISHED, json.dumps(asdict(left))])


def _noted(store: Store) -> _Left | None:
    found = store.query("SELECT position FROM positions WHERE name = ?", [_UNFINISHED])["position"]
    if not len(found):
        return None
    told = json.loads(found[0])
    if isinstance(told, list):  # of a release that noted traces here, whose rows it had deleted
        traces = pl.DataFrame(
            {"trace_id": [trace for one in told for trace in one["traces"]]}, schema={"trace_id": pl.String}
        )
        hours = [hour for one in told for hour in one["hours"]]
        before = [one["before_unix_ns"] for one in told if one["before_unix_ns"] is not None]
        left = _Left((), hours, {}, max(before, default=None))
        with store.write() as transaction:
            transaction.run(
                "INSERT INTO main.purging BY NAME SELECT trace_id AS request_key, trace_id, 0 AS hour FROM traces",
                traces=traces,
            )
            _note(transaction, left)
        return left
    return _Left(**told)


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
