"""When the log of the store is moved into its file: not while it grows, but once nothing is written, and before it is long.

And what becomes of a store where that fails for want of memory: DuckDB then gives its file up, and so may the commit that began it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from writing import bench, engine_span

from phasewise.collector import upkeep, writer
from phasewise.collector.retention import Keep
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.collector.upkeep import Upkeep
from phasewise.rules.errors import MachineError


def write(store: Store, rows: int) -> None:
    with store.write() as transaction:
        marks = pl.DataFrame({"unix_ns": range(rows), "kind": "deploy", "text": "v2", "source": "user"})
        transaction.insert("annotations", marks)


def test_a_round_moves_the_log_when_nothing_was_written_since_the_one_before(tmp_path: Path) -> None:
    with Store(tmp_path / "phasewise.duckdb", threads=1) as store:
        keeper = Upkeep(store, tmp_path, Keep())
        write(store, 10)
        keeper.run()
        log_bytes = store.log_bytes
        assert log_bytes > 0
        write(store, 10)
        keeper.run()
        assert store.log_bytes > log_bytes
        keeper.run()
        assert store.log_bytes == 0
        keeper.run()
        assert store.query("SELECT count(*) AS n FROM annotations")["n"].item() == 20


def test_a_long_log_that_hardly_grows_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LONG_LOG_BYTES", 50_000)
    monkeypatch.setattr(upkeep, "LULL_BYTES", 10_000)
    with Store(tmp_path / "phasewise.duckdb", threads=1) as store:
        keeper = Upkeep(store, tmp_path, Keep())
        write(store, 2_000)
        keeper.run()
        assert store.log_bytes > 50_000
        write(store, 10)
        keeper.run()
        assert store.log_bytes == 0


def test_a_log_that_became_shorter_between_two_rounds_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LONG_LOG_BYTES", 10_000)
    monkeypatch.setattr(upkeep, "LULL_BYTES", 1_000)
    with Store(tmp_path / "phasewise.duckdb", threads=1) as store:
        keeper = Upkeep(store, tmp_path, Keep())
        write(store, 2_000)
        keeper.run()
        before = store.log_bytes
        assert store.checkpoint()
        write(store, 1_000)
        after = store.log_bytes
        assert 10_000 < after < before
        keeper.run()
        assert store.log_bytes == after


def test_the_writer_moves_a_long_log_between_two_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span(span_id="a1")])
        assert b.run() == 1
        assert not b.writer.shorten_log()
        monkeypatch.setattr(writer, "LOG_BYTES", b.store.log_bytes)
        assert b.writer.shorten_log()
        assert b.store.log_bytes == 0
        assert not b.writer.shorten_log()
        assert len(b.rows()) == 1


def test_a_log_that_the_writer_cannot_move_is_left_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question may hold the memory for some seconds, and a pass comes twice a second."""
    monkeypatch.setattr(writer, "LOG_BYTES", 1)
    with bench(tmp_path) as b:
        b.receive([engine_span(span_id="a1")])
        b.run()
        asked = []

        def refused() -> bool:
            asked.append(b.clock.now)
            return False

        with monkeypatch.context() as patch:
            patch.setattr(b.store, "checkpoint", refused)
            assert not b.writer.shorten_log()
            assert not b.writer.shorten_log()
        b.clock.forward(writer.HOUSEKEEPING_NS / 1e9 - 0.1)
        assert not b.writer.shorten_log()
        b.clock.forward(0.1)
        assert b.writer.shorten_log()
        assert len(asked) == 1


def test_a_log_that_could_not_be_moved_is_moved_in_the_next_round_also_under_load(tmp_path: Path) -> None:
    with Store(tmp_path / "phasewise.duckdb", threads=1) as store:
        keeper = Upkeep(store, tmp_path, Keep())
        write(store, 10)
        keeper.run()
        write(store, 10)
        store.checkpoint_error = "the disk was full"
        keeper.run()
        assert (store.log_bytes, store.checkpoint_error) == (0, "")


def fill_memory(store: Store) -> None:
    """As a question does that needs much, where temporary files have no room."""
    cursor = store._connection.cursor()
    cursor.execute("CREATE TABLE memory.main.held (number UBIGINT, text VARCHAR)")
    for rows in (500, 20):  # the last pieces of it too; what fails for them is the statement, or its commit
        with pytest.raises((duckdb.OutOfMemoryException, duckdb.TransactionException)):
            while True:
                cursor.execute(
                    "INSERT INTO memory.main.held SELECT hash(i), repeat('z', 1000) || i FROM range(?) r(i)", [rows]
                )
    cursor.close()


def test_a_log_that_memory_is_too_little_for_is_no_fault(tmp_path: Path) -> None:
    with Store(tmp_path / "phasewise.duckdb", memory_limit="32MB", spill_bytes=1) as store:
        with store.write() as transaction:
            transaction.execute(
                "INSERT INTO annotations BY NAME SELECT i AS unix_ns, 'deploy' AS kind, repeat('x', 40) || hash(i) AS text FROM range(100000) r(i)"
            )
        assert store.checkpoint()
        with store.write() as transaction:
            transaction.execute("DELETE FROM annotations WHERE unix_ns % 3 = 1")
        fill_memory(store)
        assert store.checkpoint() is False
        assert store.checkpoint_error == ""
        # The question that held the memory has ended with the file; whoever asks next opens it again, and is answered.
        assert store.query("SELECT count(*) AS n FROM annotations")["n"].item() == 66_667
        assert store.broken == ""
        assert store.checkpoint()
        assert store.log_bytes == 0


class Failing:
    """A connection on which a statement is done and then said to have failed."""

    def __init__(self, real: duckdb.DuckDBPyConnection, statement: str, error: duckdb.Error) -> None:
        self._real, self._statement, self._error = real, statement, error

    def cursor(self) -> Failing:
        return Failing(self._real.cursor(), self._statement, self._error)

    def execute(self, sql: str, parameters: Any = None) -> object:
        done = self._real.execute(sql, parameters)
        if sql == self._statement:
            raise self._error
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


CHECKPOINT_FAILED = 'Checkpoint failed for database "phasewise". The database has been invalidated. Original error: {}'
NO_MEMORY = "failed to offload data block of size 32.0 KiB (0 bytes/1 byte used)."


@pytest.mark.parametrize(
    ("error", "given_up", "told"),
    [
        (duckdb.TransactionException("Cannot CHECKPOINT: there are other transactions"), False, False),
        (duckdb.OutOfMemoryException(f"Out of Memory Error: {NO_MEMORY}"), False, False),
        (duckdb.IOException(CHECKPOINT_FAILED.format(NO_MEMORY)), True, False),
        (duckdb.IOException(CHECKPOINT_FAILED.format("Could not write file: No space left on device")), True, True),
        (duckdb.FatalException("Could not sync file: Input/output error"), True, True),
    ],
    ids=["reader", "memory", "memory, and given up", "disk", "fatal"],
)
def test_what_a_checkpoint_fails_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: duckdb.Error, given_up: bool, told: bool
) -> None:
    """Told is what the operator can do something about."""
    with Store(tmp_path / "phasewise.duckdb") as store:
        write(store, 10)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_connection", Failing(store._connection, "CHECKPOINT", error))
            assert store.checkpoint() is False
        assert (bool(store.broken), bool(store.checkpoint_error)) == (given_up, told)
        assert store.query("SELECT count(*) AS n FROM annotations")["n"].item() == 10
        assert store.checkpoint()
        assert store.broken == store.checkpoint_error == ""


def test_a_commit_whose_checkpoint_fails_opens_the_file_anew_and_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = duckdb.IOException(
        "Transaction COMMIT succeeded and is durable, but the autocheckpoint failed. Detach and reattach the database to recover. "
        + CHECKPOINT_FAILED.format(NO_MEMORY)
    )
    with Store(tmp_path / "phasewise.duckdb") as store:
        write(store, 10)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_connection", Failing(store._connection, "COMMIT", error))
            with pytest.raises(MachineError, match="opened again by itself"):
                write(store, 10)
            assert store.broken
        assert store.query("SELECT count(*) AS n FROM annotations")["n"].item() == 20
        assert store.broken == ""


def test_a_log_too_large_for_memory_is_no_damage(tmp_path: Path) -> None:
    """It would be put aside, and made anew from the journal."""
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store:
        for _ in range(20):  # less than a group of rows each: whole ones are not in the log, but in the file
            write(store, 5_000)
        log, file = (one.read_bytes() for one in (path.with_name("phasewise.duckdb.wal"), path))
    path.write_bytes(file)
    path.with_name("phasewise.duckdb.wal").write_bytes(log)
    with pytest.raises(MachineError, match="cannot be opened") as raised:
        Store(path, memory_limit="6MB", spill_bytes=1)
    assert not isinstance(raised.value, DamagedStore), raised.value
    with Store(path) as store:
        assert store.query("SELECT count(*) AS n FROM annotations")["n"].item() == 100_000
