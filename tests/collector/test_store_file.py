"""The DuckDB file: one owner, clear refusals, growth of the schema, transactions, and life after a fatal error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import duckdb
import polars as pl
import pytest
from waiting import until

from phasewise.collector.patience import Patience
from phasewise.collector.records import Request, columns
from phasewise.collector.store import Store
from phasewise.collector.tables import TABLES
from phasewise.rules.errors import MachineError


def counters(value: int) -> pl.DataFrame:
    return pl.DataFrame({"name": ["a"], "label": [""], "value": [value]})


def test_every_table_of_the_data_model_is_there(tmp_path: Path) -> None:
    with Store(tmp_path / "deep" / "phasewise.duckdb") as store:
        present = set(store.query("SELECT table_name FROM duckdb_tables()")["table_name"])
        assert set(TABLES) <= present
        assert store.query("SELECT * FROM requests").columns == list(columns(Request))
        version = store.query("SELECT tags FROM duckdb_databases() WHERE database_name = 'phasewise'")
        assert "v1.5.0" in str(version["tags"].item())


def test_a_second_process_is_told_who_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    script = f"from pathlib import Path\nfrom phasewise.collector.store import Store\nStore(Path({str(path)!r}))"
    with Store(path):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"PID {os.getpid()}" in done.stderr
    assert "MachineError" in done.stderr


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(MachineError, match="cannot be opened") as raised:
        Store(path)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file"):
        Store(tmp_path / "file" / "phasewise.duckdb")


def test_a_file_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store, store.write() as transaction:
        transaction.execute("INSERT INTO schema_version VALUES (99, 0)")
    with pytest.raises(MachineError, match=r"newer release.*upgrade"):
        Store(path)


def test_a_file_of_an_older_release_gets_the_columns_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store, store.write() as transaction:
        transaction.execute("ALTER TABLE requests DROP COLUMN cause_kv_wait_s")
        transaction.execute("ALTER TABLE turns DROP COLUMN tenant")
    with Store(path) as store:
        assert store.query("SELECT cause_kv_wait_s FROM requests").columns == ["cause_kv_wait_s"]
        assert store.query("SELECT tenant FROM turns").columns == ["tenant"]


def test_rows_survive_closing(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store, store.write() as transaction:
        transaction.insert("counters", counters(3))
    with Store(path) as store:
        assert store.query("SELECT sum(value) AS v FROM counters WHERE name = ?", ["a"])["v"].to_list() == [3]


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "s.duckdb") as store:
        with pytest.raises(ValueError, match="stop"), store.write() as transaction:
            transaction.insert("counters", counters(1))
            with store.write() as inner:
                inner.insert("counters", counters(2))
            raise ValueError("stop")
        assert store.query("SELECT * FROM counters").is_empty()


def test_readers_see_what_is_committed_while_a_writer_writes(tmp_path: Path) -> None:
    with Store(tmp_path / "s.duckdb") as store:
        seen: list[int] = []
        with store.write() as transaction:
            transaction.insert("counters", counters(1))
            reader = threading.Thread(target=lambda: seen.append(store.query("SELECT * FROM counters").height))
            reader.start()
            reader.join(10)
        assert seen == [0]
        assert store.query("SELECT * FROM counters").height == 1


PROBES = [
    "SELECT * FROM read_csv('{outside}/secret.csv')",
    "SELECT * FROM '{outside}/secret.csv'",
    "SELECT * FROM read_text('{outside}/secret.csv')",
    "SELECT * FROM read_blob('{cold}/../secret.csv')",
    "SELECT * FROM sniff_csv('{outside}/secret.csv')",
    "SELECT * FROM glob('{outside}/*')",
    "SELECT * FROM read_parquet('{outside}/*.parquet')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_csv('https://127.0.0.1:1/x.csv')",
    "COPY (SELECT 1) TO '{outside}/out.csv'",
    "ATTACH '{outside}/other.duckdb'",
    "EXPORT DATABASE '{outside}/export'",
    "IMPORT DATABASE '{outside}/export'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET allowed_directories = ['/']",
    "RESET allowed_directories",
    "SET lock_configuration = false",
    "SET temp_directory = '{outside}'",
    "CREATE SECRET s (TYPE s3)",
]


@pytest.mark.parametrize("probe", PROBES)
def test_sql_reaches_nothing_outside_the_cold_tier(tmp_path: Path, probe: str) -> None:
    outside, cold = tmp_path / "outside", tmp_path / "data" / "cold"
    for folder in (outside, cold):
        folder.mkdir(parents=True)
    for folder in (outside, cold.parent):
        (folder / "secret.csv").write_text("a\n1\n")
    with Store(tmp_path / "data" / "phasewise.duckdb") as store:
        with pytest.raises((duckdb.Error, MachineError)):
            store.query(probe.format(outside=outside, cold=cold))
        assert sorted(path.name for path in outside.iterdir()) == ["secret.csv"]


def test_after_a_fatal_error_the_file_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once after an error that passes; where they go on, no more than once in two seconds."""
    openings: list[float] = []
    now_s = 1000.0
    opened = Store._open

    def counted(store: Store) -> duckdb.DuckDBPyConnection:
        openings.append(now_s)
        return opened(store)

    monkeypatch.setattr(Store, "_open", counted)
    monkeypatch.setattr("phasewise.collector.store.time", SimpleNamespace(monotonic=lambda: now_s))
    with Store(tmp_path / "s.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("counters", counters(1))
        dead = store._connection
        store._die(duckdb.FatalException("the disk went away"), dead)
        assert store.broken == "the disk went away"
        assert store.query("SELECT value FROM counters")["value"].to_list() == [1]
        assert store.broken == ""
        store._die(duckdb.FatalException("news of the one before"), dead)
        assert store.broken == ""
        for step in range(100):  # ten seconds of a disk that lets the file be opened, and nothing be written
            now_s = 1000.0 + step / 10
            with contextlib.suppress(MachineError):
                store.query("SELECT 1")
                store._die(duckdb.FatalException("the disk went away"), store._connection)
        assert openings[1:] == [1000.0, 1002.0, 1004.0, 1006.0, 1008.0]
        with pytest.raises(MachineError, match="opened again by itself"):
            store.query("SELECT 1")
        now_s = 1010.0
        assert store.query("SELECT value FROM counters")["value"].to_list() == [1]


def test_a_question_that_still_runs_does_not_keep_a_broken_file(tmp_path: Path) -> None:
    ended: list[Exception] = []

    def ask() -> None:
        try:
            store.query("SELECT count(*) FROM range(1000000) a, range(1000000) b", patience=Patience(60.0))
        except Exception as error:
            ended.append(error)

    with Store(tmp_path / "s.duckdb") as store:
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: store._readers._running)
        store._die(duckdb.FatalException("the disk went away"), store._connection)
        assert store.query("SELECT 1").height == 1
        asking.join(20.0)
    assert [type(error) for error in ended] == [MachineError]


def test_a_closed_store_stays_closed(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    store.close()
    with pytest.raises(MachineError, match="closed"):
        store.query("SELECT 1")


def test_rows_take_the_place_of_those_with_the_same_key(tmp_path: Path) -> None:
    columns_of_it = ("name", "label", "value")
    many = [("a", str(n), n) for n in range(250)]  # more than one statement takes
    with Store(tmp_path / "phasewise.duckdb") as store, store.write() as transaction:
        transaction.replace("counters", ("name", "label"), columns_of_it, many)
        transaction.replace("counters", ("name", "label"), columns_of_it, [("a", "7", 1_000), ("b", "7", 1)])
        transaction.replace("counters", ("name", "label"), columns_of_it, [])
        found = transaction.query("SELECT name, label, value FROM counters")
    assert sorted(found.iter_rows()) == sorted(
        [*(row for row in many if row[1] != "7"), ("a", "7", 1_000), ("b", "7", 1)]
    )
