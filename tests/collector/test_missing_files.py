"""Cold files that are not there: their rows are missing, said, and there again with them; nothing else is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import aged_days
import pytest
from builders import START_UNIX_NS

from phasewise.collector.integrity import check
from phasewise.collector.lake import Lake
from phasewise.collector.recovery import FILE, open_store
from phasewise.collector.retention import DAY_NS
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore

NOW = START_UNIX_NS + 6 * DAY_NS
EACH = aged_days.EACH


def clock() -> int:
    return NOW


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sealed days, a finding and a mark."""
    folder = tmp_path / "data"
    aged_days.fill(folder, 2)
    with Store(folder / FILE) as store:
        for due in due_hours(store, NOW):
            assert Sealer(store, clock).seal(due)
        with store.write() as transaction:
            transaction.execute(
                "INSERT INTO annotations BY NAME SELECT 5 AS unix_ns, 'note' AS kind, 'hello' AS text, 'us' AS source"
            )
    return folder


def counted(store: Store) -> tuple[int, int, int]:
    """Requests, findings, marks of ours."""
    sql = (
        "SELECT (SELECT count(*) FROM requests), (SELECT count(*) FROM findings), "
        "(SELECT count(*) FROM annotations WHERE text = 'hello')"
    )
    (row,) = store.query(sql).rows()
    return row[0], row[1], row[2]


@pytest.mark.parametrize("all_of_them", [False, True])
def test_only_their_rows_are_missing_and_come_back_with_them(data: Path, tmp_path: Path, all_of_them: bool) -> None:
    files = [path for paths in Lake(data / "cold").files("requests").values() for path in paths]
    assert len(files) == 2
    gone = files if all_of_them else files[:1]
    aside = tmp_path / "aside"
    for path in gone:
        (aside / path).parent.mkdir(parents=True)
        shutil.move(data / "cold" / path, aside / path)
    offline = check(data)
    assert not offline["ok"]
    assert all(path in str(offline["faults"]) for path in gone)
    assert "moved aside" not in str(offline["faults"])
    with pytest.raises(DamagedStore, match=r"cold/requests"):
        open_store(data, clock, "fail")
    store, told = open_store(data, clock)
    with store:
        assert f"{len(gone)} cold files of the hours" in told and f"({EACH * len(gone)} of requests)" in told
        assert counted(store) == (EACH * (2 - len(gone)), 1, 1)
    assert not (data / "quarantine").exists()
    store, told = open_store(data, clock)  # said once
    store.close()
    assert told == ""
    for path in gone:
        shutil.move(aside / path, data / "cold" / path)
    store, told = open_store(data, clock)
    with store:
        assert (told, counted(store)) == ("", (2 * EACH, 1, 1))
    assert check(data)["ok"]
