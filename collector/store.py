"""The one owner of the DuckDB file: opening, schema, reads from many threads, one writer.

DuckDB lets no second process open the file, not even to read; whoever fails to open it is told which process has it. After a
fatal error of the disk every handle is dead until the file is closed and opened again: the store does that by itself and
answers MachineError until it works.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import duckdb
import polars as pl
import pyarrow as pa

from phasewise.collector.patience import Patience
from phasewise.collector.readers import Readers
from phasewise.collector.records import columns, duckdb_columns
from phasewise.collector.tables import RECORDS, SCHEMA_VERSION, TABLES
from phasewise.rules.errors import MachineError

STORAGE_VERSION = "v1.5.0"  # so that one release back can still read a file made by this one
CHECKPOINT_THRESHOLD = "256MB"
THREADS = 2
MEMORY_LIMIT = "2GB"
_REOPEN_AFTER_S = 1.0
_HOLDER = re.compile(r"held in (.+?) \(PID (\d+)\)")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*$")


class Store:
    """The DuckDB file at `path`, created where missing. Raises MachineError when it cannot be opened.

    query() may be called from any thread; write() is one at a time.
    """

    def __init__(self, path: Path, *, threads: int = THREADS, memory_limit: str = MEMORY_LIMIT) -> None:
        self.path = path
        self._threads = threads
        self._memory_limit = memory_limit
        self._write_lock = threading.RLock()
        self._state_lock = threading.Lock()
        self._dead_because = ""
        self._tried_at = 0.0
        self._closed = False
        self._readers = Readers()
        self._connection = self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = duckdb.connect(
                ":memory:",
                config={
                    "threads": self._threads,
                    "memory_limit": self._memory_limit,
                    "temp_directory": str(self.path.parent / "temporary"),
                    "autoinstall_known_extensions": "false",
                    "autoload_known_extensions": "false",
                },
            )
            escaped = str(self.path).replace("'", "''")
            connection.execute(f"ATTACH '{escaped}' AS phasewise (STORAGE_VERSION '{STORAGE_VERSION}')")
        except OSError as error:
            raise MachineError(f"{self.path}: {error.strerror or error} (check owner and free space)") from error
        except duckdb.Error as error:
            raise _cannot_open(self.path, error) from error
        # The file is open: nothing else on this machine is needed, so nothing else can be reached from SQL.
        connection.execute("SET enable_external_access = false")
        connection.execute(f"SET checkpoint_threshold = '{CHECKPOINT_THRESHOLD}'")
        connection.execute("SET lock_configuration = true")
        connection.execute("USE phasewise")
        try:
            _prepare(connection, self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def query(
        self, sql: str, parameters: Sequence[object] = (), *, patience: Patience | None = None, waits: bool = True
    ) -> pl.DataFrame:
        """The rows of a SELECT. Sums of whole numbers come as Int64. Raises MachineError while the store is broken.

        patience: the query is stopped when it is over (TooSlow, Cancelled), and waits for one of few places before (TooBusy);
        without one, as the writer asks, it runs at once and to its end. waits: False takes no place, for probes that must
        answer while readers are busy.
        """
        if patience is None:
            return self._query(sql, parameters)
        with self._readers.turn(patience) if waits else contextlib.nullcontext():
            return self._query(sql, parameters, patience)

    def _query(self, sql: str, parameters: Sequence[object], patience: Patience | None = None) -> pl.DataFrame:
        cursor = self._cursor()
        try:
            with self._readers.watched(_Running(cursor), patience) if patience else contextlib.nullcontext():
                relation = cursor.sql(sql, params=list(parameters) or None)
                return _plain_integers(relation.pl()) if relation is not None else pl.DataFrame()
        except duckdb.InterruptException:
            if patience:
                patience.check()
            raise
        except duckdb.FatalException as error:
            self._die(error)
            raise self._broken() from error
        except duckdb.ConnectionException as error:
            if self._dead_because:  # closed, or opened again, while this one ran
                raise self._broken() from error
            raise
        finally:
            cursor.close()

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """One transaction; committed at the end, rolled back on any exception. Nested use joins the outer one."""
        with self._write_lock:
            outer = getattr(self, "_open_transaction", None)
            if outer is not None:
                yield outer
                return
            cursor = self._cursor()
            transaction = Transaction(cursor)
            try:
                cursor.execute("BEGIN TRANSACTION")
                self._open_transaction: Transaction | None = transaction
                yield transaction
                cursor.execute("COMMIT")
            except duckdb.FatalException as error:
                self._die(error)
                raise self._broken() from error
            except BaseException:
                with contextlib.suppress(duckdb.Error):
                    cursor.execute("ROLLBACK")
                raise
            finally:
                self._open_transaction = None
                cursor.close()

    def checkpoint(self) -> None:
        """Move the write-ahead log into the file; for idle moments."""
        with self._write_lock:
            cursor = self._cursor()
            try:
                cursor.execute("CHECKPOINT")
            except duckdb.TransactionException:
                pass  # a reader is open: the next idle moment will do
            except duckdb.FatalException as error:
                self._die(error)
            finally:
                cursor.close()

    @property
    def broken(self) -> str:
        """Why the store does not answer now; empty when it does."""
        return self._dead_because

    def close(self) -> None:
        with self._state_lock:
            self._closed = True
            self._dead_because = "it was closed"
            self._tried_at = float("inf")  # never opened again
        self._readers.close()
        with self._write_lock, contextlib.suppress(duckdb.Error):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        if self._dead_because:
            self._revive()
        try:
            cursor = self._connection.cursor()
            cursor.execute("USE phasewise")
        except duckdb.Error as error:
            self._die(error)
            raise self._broken() from error
        return cursor

    def _die(self, error: duckdb.Error) -> None:
        with self._state_lock:
            if self._closed:
                return
            self._dead_because = str(error).splitlines()[0]
            self._tried_at = time.monotonic()

    def _revive(self) -> None:
        """Close and open again, at most once a second."""
        with self._state_lock:
            if not self._dead_because:
                return
            if time.monotonic() - self._tried_at < _REOPEN_AFTER_S:
                raise self._broken()
            self._tried_at = time.monotonic()
            with contextlib.suppress(duckdb.Error):
                self._connection.close()
            self._connection = self._open()
            self._dead_because = ""

    def _broken(self) -> MachineError:
        return MachineError(
            f"{self.path}: the store does not answer: {self._dead_because} (it is opened again by itself)"
        )


class _Running:
    """A cursor whose query runs. Closing a connection closes its cursors too, whoever uses them."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def interrupt(self) -> None:
        with contextlib.suppress(duckdb.ConnectionException):
            self._cursor.interrupt()


class Transaction:
    """Statements of one transaction of the writer."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        self._cursor.execute(sql, list(parameters) or None)

    def query(self, sql: str, parameters: Sequence[object] = (), **frames: pl.DataFrame | pa.Table) -> pl.DataFrame:
        """Rows of a SELECT inside the transaction; `frames` are tables by that name in it."""
        with self._registered(frames):
            relation = self._cursor.sql(sql, params=list(parameters) or None)
            return _plain_integers(relation.pl()) if relation is not None else pl.DataFrame()

    def run(self, sql: str, parameters: Sequence[object] = (), **frames: pl.DataFrame | pa.Table) -> None:
        """A statement that reads `frames`."""
        with self._registered(frames):
            self._cursor.execute(sql, list(parameters) or None)

    def insert(self, table: str, rows: pl.DataFrame | pa.Table) -> None:
        """Append rows; columns are matched by name, absent ones are NULL."""
        _check_identifier(table)
        if len(rows):
            self.run(f"INSERT INTO {table} BY NAME SELECT * FROM new_rows", new_rows=rows)

    @contextlib.contextmanager
    def _registered(self, frames: dict[str, pl.DataFrame | pa.Table]) -> Iterator[None]:
        for name, frame in frames.items():
            self._cursor.register(name, frame)
        try:
            yield
        finally:
            for name in frames:
                self._cursor.unregister(name)


def _prepare(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Create what is missing; refuse a file of a newer release."""
    connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, written_unix_s BIGINT)")
    found = connection.execute("SELECT max(version) FROM schema_version").fetchone()
    version = found[0] if found else None
    if version is not None and version > SCHEMA_VERSION:
        raise MachineError(
            f"{path}: written by a newer release (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade phasewise, or start with another --data folder"
        )
    for table, definition in TABLES.items():
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({definition})")
    for table, record in RECORDS.items():
        _add_missing_columns(connection, table, record)
    if version != SCHEMA_VERSION:
        connection.execute("INSERT INTO schema_version VALUES (?, ?)", [SCHEMA_VERSION, int(time.time())])


def _add_missing_columns(connection: duckdb.DuckDBPyConnection, table: str, record: type) -> None:
    present = {row[0] for row in connection.execute(f"SELECT column_name FROM (DESCRIBE {table})").fetchall()}
    missing = [name for name in columns(record) if name not in present]
    definitions = dict(zip(columns(record), duckdb_columns(record).split(", "), strict=True))
    for name in missing:
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {definitions[name]}")


def _cannot_open(path: Path, error: duckdb.Error) -> MachineError:
    text = str(error)
    if holder := _HOLDER.search(text):
        return MachineError(
            f"{path}: another process has the store open: PID {holder[2]} ({holder[1]}); "
            "ask it through its address in serve.json, or stop it"
        )
    if "Permission denied" in text or "Read-only" in text:
        return MachineError(
            f"{path}: no permission to write the store (check the folder's owner, or choose another --data)"
        )
    return MachineError(f"{path}: the store cannot be opened: {text.splitlines()[0]}")


def _plain_integers(frame: pl.DataFrame) -> pl.DataFrame:
    """DuckDB sums whole numbers as 128 bits, which arrive as decimals without fraction."""
    wide = [name for name, kind in frame.schema.items() if isinstance(kind, pl.Decimal) and kind.scale == 0]
    return frame.with_columns(pl.col(name).cast(pl.Int64) for name in wide) if wide else frame


def _check_identifier(name: str) -> None:
    assert _IDENTIFIER.match(name), name
