"""F07: a question that needs more room than it may have ends alone: what others committed stays, the writer goes on, and nothing is left of it on the disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from phasewise.collector.patience import Patience
from phasewise.collector.store import Store
from phasewise.rules.errors import TooHeavy

SORT = (
    "SELECT max(t) AS t FROM (SELECT hash(i) AS h, repeat('x', 100) || i AS t FROM range(2000000) r(i) "
    "ORDER BY h LIMIT 1900000)"
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "s.duckdb", memory_limit="64MB", spill_bytes=16 << 20) as opened:
        yield opened


def files(store: Store) -> list[str]:
    """Those with anything in them: DuckDB leaves an empty one behind now and then."""
    folder = store.path.parent / "temporary"
    return [path.name for path in folder.glob("*.tmp") if path.stat().st_size]


def write(store: Store, number: int) -> None:
    with store.write() as transaction:
        transaction.execute("INSERT INTO counters BY NAME SELECT 'a' AS name, '' AS label, ? AS value", [number])


@pytest.mark.parametrize("is_reader", [True, False], ids=["reader", "writer"])
def test_a_sort_beyond_the_limit_fails_clearly_while_rows_are_written(store: Store, is_reader: bool) -> None:
    raised: list[BaseException] = []
    patience = Patience(600) if is_reader else None  # which counts from here

    def sort() -> None:
        try:
            store.query(SORT, patience=patience)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=sort)
    thread.start()
    written, failed = [0], list[int]()
    write(store, 0)
    while thread.is_alive():
        # Memory is one for all: in the moment when the sort has the last of it a transaction may fail, and the writer tries again. Where
        # that is its commit, it may be done or not: the writer reads what is committed, and so do we.
        number = len(written) + len(failed)
        try:
            write(store, number)
            written.append(number)
        except duckdb.OutOfMemoryException:
            failed.append(number)
        thread.join(0.02)
    written.append(len(written) + len(failed))
    write(store, written[-1])
    assert [type(one) for one in raised] == [TooHeavy]
    assert "narrow the range" in str(raised[0])
    assert "max_temp_directory_size" in str(raised[0].__cause__), "it was the memory and not the room"
    assert store.broken == ""
    stored = store.query("SELECT value FROM counters ORDER BY value")["value"].to_list()
    assert [number for number in stored if number not in failed] == written
    assert len(set(stored)) == len(stored)
    assert files(store) == []


class Crowded:
    """A connection for whose cursors no memory is left."""

    def __init__(self, real: duckdb.DuckDBPyConnection) -> None:
        self._real = real

    def cursor(self) -> Crowded:
        return self

    def execute(self, sql: str) -> None:
        raise duckdb.OutOfMemoryException(f"could not allocate what {sql} needs")

    def close(self) -> None:
        self._real.close()


def test_a_store_whose_memory_a_question_holds_is_not_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be closed and opened anew, and all who ask it stopped."""
    write(store, 1)
    with monkeypatch.context() as now:
        now.setattr(store, "_connection", Crowded(store._connection))
        with pytest.raises(TooHeavy):
            store.query("SELECT 1 AS one")
        with pytest.raises(duckdb.OutOfMemoryException):
            write(store, 2)
        assert store.checkpoint() is False
        assert store.broken == store.checkpoint_error == ""
    write(store, 3)
    assert store.query("SELECT value FROM counters ORDER BY value")["value"].to_list() == [1, 3]


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "temporary" / "duckdb_temp_storage_DEFAULT-0.tmp"
    left.parent.mkdir()
    left.write_bytes(bytes(1 << 20))
    with Store(tmp_path / "s.duckdb"):
        assert not left.exists()


def test_the_limit_follows_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("phasewise.collector.spill.shutil.disk_usage", lambda _: usage._replace(free=500_000_000))
    with Store(tmp_path / "s.duckdb") as store:
        told = store.query("SELECT value FROM duckdb_settings() WHERE name = 'max_temp_directory_size'")["value"][0]
        assert told == "47.6 MiB"  # a tenth
