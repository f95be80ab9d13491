"""When the log of the store is moved into its file: not while it grows, but once nothing is written, and before it is long."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from phasewise.collector import upkeep
from phasewise.collector.retention import Keep
from phasewise.collector.store import Store
from phasewise.collector.upkeep import Upkeep


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


def test_a_log_that_could_not_be_moved_is_moved_in_the_next_round_also_under_load(tmp_path: Path) -> None:
    with Store(tmp_path / "phasewise.duckdb", threads=1) as store:
        keeper = Upkeep(store, tmp_path, Keep())
        write(store, 10)
        keeper.run()
        write(store, 10)
        store.checkpoint_error = "the disk was full"
        keeper.run()
        assert (store.log_bytes, store.checkpoint_error) == (0, "")
