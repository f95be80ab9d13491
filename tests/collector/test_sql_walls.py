"""What SQL could do if a statement of a stranger ever reached the store: nothing outside its own file. Run at every new DuckDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from phasewise.collector.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("walls")
    (folder / "secret.csv").write_text("a\n1\n")
    (folder / "secret.json").write_text('{"a": 1}\n')
    (folder / "secret.txt").write_text("secret\n")
    duckdb.connect(str(folder / "other.duckdb")).close()
    with Store(folder / "s.duckdb") as opened:
        yield opened


DENIED = [
    "SELECT * FROM read_csv('{0}/secret.csv')",
    "SELECT * FROM read_csv_auto('{0}/secret.csv')",
    "SELECT * FROM '{0}/secret.csv'",
    "SELECT * FROM sniff_csv('{0}/secret.csv')",
    "SELECT * FROM read_json('{0}/secret.json')",
    "SELECT * FROM read_json_auto('{0}/secret.json')",
    "SELECT * FROM read_text('{0}/secret.txt')",
    "SELECT * FROM read_blob('{0}/secret.txt')",
    "SELECT * FROM read_parquet('{0}/secret.csv')",
    "SELECT * FROM parquet_metadata('{0}/secret.csv')",
    "SELECT * FROM glob('{0}/*')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_text('http://127.0.0.1:1/x')",
    "COPY (SELECT 1) TO '{0}/out.csv'",
    "COPY (SELECT 1) TO '{0}/out.parquet' (FORMAT parquet)",
    "CREATE TABLE t AS SELECT * FROM '{0}/secret.csv'",
    "EXPORT DATABASE '{0}/export'",
    "IMPORT DATABASE '{0}/export'",
    "ATTACH '{0}/other.duckdb' AS other",
    "ATTACH '{0}/new.duckdb' AS new",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{0}/x.duckdb_extension'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET memory_limit = '100GB'",
    "SET temp_directory = '/tmp'",
    "SET allowed_directories = ['/']",
    "RESET enable_external_access",
    "PRAGMA profiling_output = '{0}/profile'",
    "CREATE SECRET s (TYPE s3, KEY_ID 'x', SECRET 'y')",
]


@pytest.mark.parametrize("statement", DENIED)
def test_nothing_outside_the_file_is_reached(store: Store, statement: str) -> None:
    before = sorted(path.name for path in store.path.parent.iterdir())
    with pytest.raises(duckdb.Error):
        store.query(statement.format(store.path.parent))
    assert sorted(path.name for path in store.path.parent.iterdir()) == before
    assert store.query("SELECT 1 AS one")["one"].to_list() == [1]


def test_temporary_files_lie_in_the_data_directory(store: Store) -> None:
    told = store.query("SELECT value FROM duckdb_settings() WHERE name = 'temp_directory'")["value"][0]
    assert Path(told).parent == store.path.parent
