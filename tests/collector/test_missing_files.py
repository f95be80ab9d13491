"""Cold files that are not there: their rows are missing, said, and there again with them; nothing else is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aged_days
import duckdb
import pytest
from builders import START_UNIX_NS
from writing import bench, engine_span

from phasewise.collector.cold import thaw
from phasewise.collector.integrity import check
from phasewise.collector.lake import Lake
from phasewise.collector.recovery import FILE, open_store
from phasewise.collector.retention import DAY_NS, Keep
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.collector.upkeep import SEEK_S, Upkeep

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


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
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


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def first_file(data: Path) -> Path:
    """Of two, of requests."""
    return sorted((data / "cold" / "requests").glob("date=*/hour=*/*.parquet"))[0]


def garbled(whole: bytes) -> bytes:
    """The first bytes of what stands at its end: of its columns."""
    starts = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return whole[:starts] + bytes(32) + whole[starts + 32 :]


@pytest.mark.parametrize("damage", [cut, garbled])
def test_a_file_whose_end_is_damaged_is_as_good_as_gone(data: Path, damage: Callable[[bytes], bytes]) -> None:
    """Without its columns no view can be made: the store was taken for damaged, and what it alone held was moved aside."""
    hurt = first_file(data)
    whole = hurt.read_bytes()
    hurt.write_bytes(damage(whole))
    offline = check(data)
    assert "moved aside" not in str(offline["faults"])
    assert "rows of requests of hour" in str(offline["faults"])
    for told_of in (1, 0):
        store, told = open_store(data, clock)
        with store:
            assert told.count("1 cold files of the hours") == told_of, told
            assert counted(store) == (EACH, 1, 1)
            Upkeep(store, data, Keep(raw_days=3650), clock).run()
            assert counted(store) == (EACH, 1, 1)
    assert not (data / "quarantine").exists()
    hurt.write_bytes(whole)
    store, told = open_store(data, clock)
    with store:
        assert (told, counted(store)) == ("", (2 * EACH, 1, 1))
    assert check(data)["ok"]


@pytest.mark.parametrize("damage", [cut, garbled])
def test_a_file_that_breaks_while_it_runs_fails_what_needs_it_once(
    data: Path, damage: Callable[[bytes], bytes]
) -> None:
    hurt = first_file(data)
    whole = hurt.read_bytes()
    said: list[str] = []
    now_s = 0.0
    with Store(data / FILE) as store:
        keeper = Upkeep(store, data, Keep(raw_days=3650), clock, monotonic=lambda: now_s, tell=said.append)
        assert counted(store) == (2 * EACH, 1, 1)
        hurt.write_bytes(damage(whole))
        with pytest.raises(duckdb.Error):
            counted(store)
        assert counted(store) == (EACH, 1, 1)
        for _ in range(2):
            keeper.run()
        assert len(said) == 1 and "1 cold files of the hours" in said[0], said
        assert counted(store) == (EACH, 1, 1)
        hurt.write_bytes(whole)
        now_s += SEEK_S
        keeper.run()
        assert (counted(store), len(said)) == ((2 * EACH, 1, 1), 1)
    assert check(data)["ok"]


def test_a_write_that_needs_a_file_that_broke_fails_once(data: Path) -> None:
    hour = next(iter(Lake(data / "cold").files("requests")))
    with Store(data / FILE) as store:
        first_file(data).write_bytes(b"")

        def bring_back() -> None:
            with store.write() as transaction:
                thaw(transaction, store.cold_files, [hour], NOW)

        with pytest.raises(duckdb.Error):
            bring_back()
        bring_back()
        assert counted(store) == (EACH, 1, 1)


def test_what_one_store_knows_of_a_file_no_other_store_of_the_process_takes_for_true(data: Path) -> None:
    hurt = first_file(data)
    whole = hurt.read_bytes()
    hurt.write_bytes(cut(whole))
    with Store(data / FILE) as store:
        assert counted(store) == (EACH, 1, 1)
    hurt.write_bytes(whole)
    with Store(data / FILE) as store:
        assert counted(store) == (2 * EACH, 1, 1)


def test_a_statement_that_is_wrong_looks_into_no_file(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    with Store(data / FILE) as store:
        monkeypatch.setattr(store.cold_files, "can_be_read", looked.append)
        for wrong in ("SELECT nothing FROM requests", "SELECT CAST(engine AS INTEGER) FROM requests", "SELECT"):
            with pytest.raises(duckdb.Error):
                store.query(wrong)
        assert looked == []


@pytest.mark.parametrize("all_of_them", [False, True])
def test_files_that_vanish_while_it_runs_take_no_question_with_them(
    data: Path, tmp_path: Path, all_of_them: bool
) -> None:
    aside = tmp_path / "aside"
    gone = sorted((data / "cold").glob("*/date=*/hour=*/*.parquet"))[:: 1 if all_of_them else 2]
    said: list[str] = []
    now_s = 0.0
    with Store(data / FILE) as store:
        whole = counted(store)
        assert whole == (2 * EACH, 1, 1)
        for path in gone:
            (aside / path.relative_to(data)).parent.mkdir(parents=True)
            shutil.move(path, aside / path.relative_to(data))
        at_once = counted(store)
        assert at_once == (0 if all_of_them else EACH, 1, 1)
        keeper = Upkeep(store, data, Keep(raw_days=3650), clock, monotonic=lambda: now_s, tell=said.append)
        for _ in range(2):
            keeper.run()
        assert len(said) == 1 and f"{len(gone)} cold files of the hours" in said[0], said
        assert counted(store) == at_once
        for path in gone:
            path.parent.mkdir(parents=True, exist_ok=True)  # upkeep removes empty folders
            shutil.move(aside / path.relative_to(data), path)
        for passed_s in (SEEK_S - 30, SEEK_S):  # to look for them takes a list of everything: not each half minute
            now_s = passed_s
            assert counted(store) == at_once
            keeper.run()
        assert (counted(store), len(said)) == (whole, 1)
    assert check(data)["ok"]


def test_a_question_about_two_kinds_of_which_one_is_gone_has_the_other(data: Path) -> None:
    for path in (data / "cold" / "requests").glob("date=*/hour=*/*.parquet"):
        path.unlink()
    both = "SELECT (SELECT count(*) FROM requests) AS requests, (SELECT count(*) FROM engine_samples) AS samples"
    with Store(data / FILE) as store:
        for _ in range(2):
            assert store.query(both).rows() == [(0, 2 * EACH)]
            with store.write() as transaction:
                transaction.look_back("requests", "engine_samples")
                assert transaction.query(both.replace("FROM ", "FROM whole.")).rows() == [(0, 2 * EACH)]
            Upkeep(store, data, Keep(raw_days=3650), clock).run()


def test_what_comes_late_for_an_hour_whose_file_vanished_is_stored(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([span(number) for number in range(20)])
        b.run(1.5)
        b.clock.forward(3 * 3600)
        b.run()
        b.run(10)
        assert [Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now)] == [True]
        for path in b.store.cold_directory.glob("*/date=*/hour=*/*.parquet"):
            path.unlink()
        b.receive([span(20)])
        b.run(1.5)
        assert b.writer.health()["write_error"] == ""
        assert b.rows("SELECT count(*) AS n FROM requests") == [{"n": 1}]
        said: list[str] = []
        keeper = Upkeep(b.store, tmp_path, Keep(), b.clock, tell=said.append)
        keeper.run()
        assert len(said) == 1 and "(20 of requests" in said[0]
        b.run(300)
        b.clock.forward(5 * 3600)
        b.run()
        assert [Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now)] == [True]
        assert b.rows("SELECT count(*) AS n FROM requests") == [{"n": 1}]


def span(number: int) -> dict[str, Any]:
    return engine_span(start_s=number * 60.0, trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


def test_a_cold_table_whose_log_is_gone_too_stops_no_start(data: Path) -> None:
    (first, *_), *_ = Lake(data / "cold").files("requests").values()
    (data / "cold" / first).unlink()
    for path in (data / "cold" / "requests" / "_delta_log").glob("*.json"):
        path.write_text("no log")
    for _ in range(2):
        store, told = open_store(data, clock)
        with store:
            assert counted(store) == (EACH, 1, 1)
    assert told == ""
