"""The one owner of the DuckDB file: opening, schema, reads from many threads, one writer.

DuckDB lets no second process open the file, not even to read; whoever fails to open it is told which process has it. After a
fatal error of the disk every handle is dead until the file is closed and opened again: the store does that by itself and
answers MachineError until it works.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import duckdb
import polars as pl

from phasewise.collector.cold import SCHEMA, choose_files, make_views
from phasewise.collector.cold_files import ColdFiles
from phasewise.collector.durable import sync_path
from phasewise.collector.migration import drop_copies, keep_copy, prepare, version_of
from phasewise.collector.opening import Opening, attach_statement, copy_tables
from phasewise.collector.ordered_rows import ordered
from phasewise.collector.patience import Patience
from phasewise.collector.reach import reach
from phasewise.collector.readers import Readers
from phasewise.collector.store_errors import cannot_open, is_for_memory, is_given_up
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.collector.transaction import Transaction, plain_integers
from phasewise.rules.errors import MachineError, TooHeavy

THREADS = 1  # of one statement, which runs in its caller's: most are small, and to hand parts of them around costs more than it saves
# What was written lately stays in it until its place is needed, so a busy store fills it whatever is asked. A question that needs more uses
# temporary files: all of a million requests is told with it.
MEMORY_LIMIT = "512MB"
_CLOSING_S, _CLOSING_STEP_S = 10.0, 0.05
_LOOK_EVERY_S = 30.0
_REOPEN_EVERY_S = 2.0  # on a disk that fails for good; a fault that passes costs one opening, at once


class Store:
    """The DuckDB file at `path`, created where missing. Raises MachineError when it cannot be opened.

    query() may be called from any thread; write() is one at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int = THREADS,
        memory_limit: str = MEMORY_LIMIT,
        spill_bytes: int | None = None,
        as_it_is: bool = False,
        verified: bool = False,
    ) -> None:
        """spill_bytes: what temporary files may take; None takes the smaller of 4 GiB and 10 % of what is free. as_it_is: the tables of a
        damaged file, without the cold tier and not brought up to date; not a byte is written. verified: every row is read first; raises
        DamagedStore, and leaves the file as it is, where one cannot be."""
        self.path = path
        self._as_it_is = as_it_is
        self._to_be_verified = verified
        self._write_lock = threading.RLock()
        self._state_lock = threading.Lock()
        self._dead_because = ""
        self._reopened_at = float("-inf")
        self.checkpoint_error = ""  # why the log could not be moved into the file the last time; it grows meanwhile
        self._closed = False
        self._readers = Readers()
        self.requests_stand = 0  # grows with each commit that may have brought or changed a row of `requests`
        self.tending = threading.RLock()  # held by whoever moves or rewrites sealed hours: upkeep, a purge
        self.cold_directory = path.parent.resolve() / "cold"
        self.cold_files = ColdFiles(self.cold_directory)
        self._looked_at = float("-inf")  # into cold files, in vain
        self._opening = Opening(path, threads, memory_limit, spill_bytes, self.cold_directory)
        self._connection = self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        connection, version = self._attached()
        if self._as_it_is:
            return connection
        try:
            statements = Transaction(connection)
            if version is not None and version != SCHEMA_VERSION:
                connection.execute("CHECKPOINT")
                connection.close()
                keep_copy(self.path, version)
                connection, _ = self._attached()
                statements = Transaction(connection)
            try:
                self._prepare(statements, version)
            except duckdb.Error:
                if not self._finds_damaged_files(connection):
                    raise
                self._prepare(statements, version)
        except duckdb.Error as error:
            connection.close()
            raise cannot_open(self.path, str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, statements: Transaction, version: int | None) -> None:
        statements.execute("BEGIN TRANSACTION")
        prepare(statements, version)
        make_views(statements, self.cold_files)
        statements.execute("COMMIT")

    def _finds_damaged_files(self, cursor: duckdb.DuckDBPyConnection) -> bool:
        """Whether it may be for cold files that a statement failed; these are left out from now on. Ends its transaction."""
        with contextlib.suppress(duckdb.Error):
            cursor.execute("ROLLBACK")
        try:
            named = cursor.execute("SELECT path FROM main.cold_files").fetchall()
        except duckdb.Error:
            return False
        return self.cold_files.find_damaged(path for (path,) in named)

    def _look_into_cold_files(self, error: duckdb.Error, cursor: duckdb.DuckDBPyConnection) -> None:
        """What needed a file whose end is damaged fails once. Of such a file DuckDB says the name, or words of the reader of its columns,
        which are of no kind; after a look in vain it can wait, for every file is looked into."""
        is_of_a_file = type(error) is duckdb.Error or str(self.cold_directory) in str(error)
        if is_of_a_file and time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            found = self._finds_damaged_files(cursor)
            self._looked_at = float("-inf") if found else time.monotonic()

    def _attached(self) -> tuple[duckdb.DuckDBPyConnection, int | None]:
        """The open file, and the version of its schema (None: a new one), which is none of a newer release."""
        try:
            connection = duckdb.connect(":memory:", config=self._opening.settings())
            self._opening.attach(connection)
        except OSError as error:
            raise MachineError(f"{self.path}: {error.strerror or error} (check owner and free space)") from error
        except duckdb.Error as error:
            raise cannot_open(self.path, str(error)) from error
        try:
            connection.execute("USE phasewise")
            version = version_of(Transaction(connection), self.path)
            if self._to_be_verified:
                self._verify(connection)
                self._to_be_verified = False  # where it is opened again, questions wait for it
            if not self._as_it_is:
                connection.execute("PRAGMA enable_checkpoint_on_shutdown")
        except duckdb.Error as error:
            connection.close()
            raise cannot_open(self.path, str(error)) from error
        except BaseException:
            connection.close()
            raise
        self._opening.close_off(connection)
        return connection, version

    def copy_to(self, path: Path) -> pl.DataFrame:
        """Copy the hot tables into a new file below the cold directory, as they are after one commit; its `positions`.

        The writer goes on meanwhile. Deleted rows leave no byte in the copy.
        """
        cursor, connection = self._cursor()
        try:
            cursor.execute(attach_statement(path, "copied"))
            try:
                cursor.execute("BEGIN TRANSACTION")
                copy_tables(cursor)
                positions: pl.DataFrame = cursor.sql("SELECT name, position FROM copied.main.positions").pl()
                cursor.execute("COMMIT")
                return positions
            finally:
                with contextlib.suppress(duckdb.Error):
                    cursor.execute("ROLLBACK")
                cursor.execute("USE phasewise")
                cursor.execute("DETACH copied")
        except duckdb.Error as error:
            self._raise_if_given_up(error, connection)
            raise MachineError(f"{path}: the store cannot be copied: {str(error).splitlines()[0]}") from error
        finally:
            cursor.close()

    def rewrite(self) -> None:
        """Make the file anew, so that no byte of a deleted row is left in it. Who reads meanwhile is told to try again."""
        fresh = self.cold_directory / f".rewritten-{self.path.name}"
        self.cold_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._write_lock:
            for left in self.cold_directory.glob(f"{fresh.name}*"):  # of a process that ended here: with its log
                left.unlink()
            self.copy_to(fresh)
            sync_path(fresh)
            with self._state_lock:
                self._dead_because = "its file is being written anew"
                try:
                    self._readers.stop()
                    self._close_connection()
                    self.path.with_name(f"{self.path.name}.wal").unlink(missing_ok=True)
                    fresh.replace(self.path)
                    self._connection = self._open()
                finally:  # where a question did not end, the old file goes on as it is
                    self._dead_because = ""
            sync_path(self.path.parent)

    def _close_connection(self) -> None:
        """DuckDB closes nothing while a cursor is busy: questions were told to stop, and those of other threads are short. Raises
        MachineError where one goes on."""
        until = time.monotonic() + _CLOSING_S
        while True:
            try:
                return self._connection.close()
            except duckdb.Error as error:
                if time.monotonic() > until:
                    raise MachineError(f"{self.path}: a question does not end: {error} (try again)") from error
            time.sleep(_CLOSING_STEP_S)

    def _verify(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Read every value of every row: DuckDB compares the checksum of each block that it reads. What it does not read is a block that is
        free, or that deleted rows alone stand in: nothing is lost with those."""
        found = connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE database_name = 'phasewise' AND schema_name = 'main'"
        ).fetchall()
        for (table,) in sorted(found):
            try:
                connection.execute(f'SELECT bit_xor(hash(t)) FROM main."{table}" t').fetchall()
            except duckdb.Error as error:
                raise cannot_open(self.path, f"table {table}: {error}") from error

    def try_query(self, sql: str, parameters: Sequence[object] = ()) -> tuple[pl.DataFrame | None, str]:
        """The rows of a SELECT, or None and why they cannot be read: of a file that is known to be damaged."""
        try:
            return self._query(sql, parameters), ""
        except (duckdb.Error, MachineError) as error:
            return None, str(error).splitlines()[0]

    def query(
        self,
        sql: str,
        parameters: Sequence[object] = (),
        *,
        patience: Patience | None = None,
        waits: bool = True,
        order_by: Sequence[str] = (),
    ) -> pl.DataFrame:
        """The rows of a SELECT. Sums of whole numbers come as Int64. Raises MachineError while the store is broken.

        patience: the query is stopped when it is over (TooSlow, Cancelled), and waits for one of few places before (TooBusy);
        without one, as the writer asks, it runs at once and to its end. waits: False takes no place, for probes that must
        answer while readers are busy. order_by: columns of the rows, the last of which tells each from all others; the rows are put in
        that order without a second copy of them, however many they are.
        """
        if patience is None:
            return self._query(sql, parameters, None, order_by)
        with self._readers.turn(patience) if waits else contextlib.nullcontext():
            return self._query(sql, parameters, patience, order_by)

    def _query(
        self, sql: str, parameters: Sequence[object], patience: Patience | None = None, order_by: Sequence[str] = ()
    ) -> pl.DataFrame:
        try:
            cursor, connection = self._cursor()
        except duckdb.OutOfMemoryException as error:
            raise TooHeavy from error
        try:
            with self._readers.watched(_Running(cursor), patience) if patience else contextlib.nullcontext():
                cursor.execute("BEGIN TRANSACTION")  # cold files and hot rows of one moment
                if self._reaches_cold(cursor, sql, parameters):
                    cursor.execute(f"USE phasewise.{SCHEMA}")

                def read(asked: str) -> pl.DataFrame:
                    relation = cursor.sql(asked, params=list(parameters) or None)
                    return plain_integers(relation.pl()) if relation is not None else pl.DataFrame()

                return ordered(read, sql, order_by) if order_by else read(sql)
        except duckdb.InterruptException as error:
            if self._dead_because or connection is not self._connection:
                raise self._broken() from error
            if patience:
                patience.check()
            raise
        except duckdb.OutOfMemoryException as error:  # of memory, or of the room that temporary files may take
            raise TooHeavy from error
        except duckdb.ConnectionException as error:
            if self._dead_because or connection is not self._connection:  # closed, or opened again, while this one ran
                raise self._broken() from error
            raise
        except duckdb.Error as error:
            self._raise_if_given_up(error, connection)
            self._look_into_cold_files(error, cursor)
            raise
        finally:
            cursor.close()

    def _reaches_cold(self, cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[object]) -> bool:
        if cursor.execute("SELECT count(*) FROM main.cold_files").fetchall() == [(0,)]:
            return False
        return choose_files(Transaction(cursor), self.cold_files, reach(sql, parameters))

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """One transaction; committed at the end, rolled back on any exception. Nested use joins the outer one."""
        with self._write_lock:
            outer = getattr(self, "_open_transaction", None)
            if outer is not None:
                yield outer
                return
            cursor, connection = self._cursor()
            transaction = Transaction(cursor, self.cold_files)
            is_begun = False  # of its commit, which may be done all the same where it fails
            try:
                cursor.execute("BEGIN TRANSACTION")
                self._open_transaction: Transaction | None = transaction
                yield transaction
                is_begun = True
                cursor.execute("COMMIT")
            except BaseException as error:
                if isinstance(error, duckdb.Error):
                    self._raise_if_given_up(error, connection)
                with contextlib.suppress(duckdb.Error):
                    cursor.execute("ROLLBACK")
                if isinstance(error, duckdb.Error):
                    self._look_into_cold_files(error, cursor)
                raise
            finally:
                self.requests_stand += is_begun and transaction.names_requests
                self._open_transaction = None
                cursor.close()

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the file; for idle moments. False where a reader, memory or the disk did not let it."""
        with self._write_lock:
            try:
                cursor, connection = self._cursor()
            except duckdb.OutOfMemoryException:
                return False
            try:
                cursor.execute("CHECKPOINT")
                self.checkpoint_error = ""
                return True
            except duckdb.TransactionException:
                return False  # a reader is open: the next idle moment will do
            except duckdb.Error as error:
                if is_fatal(error):
                    self._die(error, connection)
                if not is_for_memory(
                    str(error)
                ):  # which a question holds, and gives back: the next idle moment will do
                    self.checkpoint_error = (
                        f"{self.path}: its log cannot be moved into it: {str(error).splitlines()[0]}"
                    )
                return False
            finally:
                cursor.close()

    @property
    def log_bytes(self) -> int:
        """Size of the write-ahead log: what a start would have to do once more."""
        try:
            return self.path.with_name(f"{self.path.name}.wal").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def broken(self) -> str:
        """Why the store does not answer now; empty when it does."""
        return self._dead_because

    def close(self) -> None:
        with self._state_lock:
            broken = bool(self._dead_because)
            self._closed = True
            self._dead_because = "it was closed"
            self._reopened_at = float("inf")  # never opened again
        self._readers.close()
        with self._write_lock, contextlib.suppress(duckdb.Error):
            self._connection.close()
        if not broken:
            drop_copies(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cursor(self) -> tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyConnection]:
        """A cursor, and the connection it is of. Raises OutOfMemoryException while a question has the last of the memory."""
        if self._dead_because:
            self._revive()
        connection = self._connection
        try:
            cursor = connection.cursor()
            cursor.execute("USE phasewise")
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            self._die(error, connection)
            raise self._broken() from error
        return cursor, connection

    def _raise_if_given_up(self, error: duckdb.Error, connection: duckdb.DuckDBPyConnection) -> None:
        if is_fatal(error):
            self._die(error, connection)
            raise self._broken() from error

    def _die(self, error: duckdb.Error, connection: duckdb.DuckDBPyConnection) -> None:
        """connection: where it came from; what one that was given up still has to say is no news."""
        with self._state_lock:
            if self._closed or connection is not self._connection:
                return
            self._dead_because = str(error).splitlines()[0]

    def _revive(self) -> None:
        """Close and open again: at once, or two seconds after the last time."""
        with self._state_lock:
            if not self._dead_because:
                return
            if time.monotonic() - self._reopened_at < _REOPEN_EVERY_S:
                raise self._broken()
            self._readers.stop()  # what still runs keeps the file open, and could not be answered any more
            with contextlib.suppress(duckdb.Error):
                self._connection.close()
            try:
                self._connection = self._open()
            finally:
                self._reopened_at = time.monotonic()
            self.requests_stand += 1  # what was being committed may stand there or not
            self._dead_because = ""

    def _broken(self) -> MachineError:
        return MachineError(
            f"{self.path}: the store does not answer: {self._dead_because or 'it was opened anew'} (it is opened again by itself)"
        )


def is_fatal(error: duckdb.Error) -> bool:
    return isinstance(error, duckdb.FatalException) or is_given_up(str(error))


class _Running:
    """A cursor whose query runs. Closing a connection closes its cursors too, whoever uses them."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def interrupt(self) -> None:
        with contextlib.suppress(duckdb.ConnectionException):
            self._cursor.interrupt()
