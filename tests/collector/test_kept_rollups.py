"""Hourly rollups of expired hours outlive the store's file: kept beside the cold tier, whole, under kill at any point."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import START_UNIX_NS, attributed, make_request, request_table
from ended import Killed, ending
from rolled import roll_up

from phasewise.collector import rollups
from phasewise.collector.backup import restore, take_snapshot, write_backup
from phasewise.collector.integrity import check
from phasewise.collector.kept_rollups import KeptRollups, read_kept
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.purge import Chosen, purge
from phasewise.collector.recovery import FILE, open_store
from phasewise.collector.retention import DAY_NS, MONTH_NS, Keep, Retention
from phasewise.collector.rollup_table import HOURLY_S, SELECTED
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store

FIRST = START_UNIX_NS // HOUR_NS
LATER = START_UNIX_NS + 16 * DAY_NS
HOURLY = f"SELECT {SELECTED} FROM rollups WHERE width_s = {HOURLY_S} ORDER BY ALL"
SLOW = pytest.mark.slow


def retention(store: Store, now: int = LATER) -> Retention:
    made = Retention(store, store.path.parent, Keep(), lambda: now, lambda: now / 1e9, lambda _: (0, 10**12))
    made._seen = (now, now / 1e9)  # it watched the clock
    return made


def fill(data: Path, hours: tuple[int, ...] = (0, 1, 30)) -> Store:
    """Sealed hours of two instances, two of one day and one of the next; and one that is not old."""
    store = Store(data / FILE)
    with store.write() as transaction:
        for hour in (*hours, 15 * 24):
            rows = [make_request(at_s=hour * 3600 + i * 60, decode_s=1.0 + i, instance=f"e-{i % 2}") for i in range(4)]
            told = [
                attributed(row) | {"final": True, "revision": 1, "received_unix_ns": row.finished_unix_ns}
                for row in rows
            ]
            transaction.insert("requests", request_table(told))
        roll_up(transaction)
    for due in due_hours(store, LATER):
        assert Sealer(store, lambda: LATER).seal(due)
    return store


def marks(store: Store) -> list[Any]:
    sql = "SELECT hour, state, generation, received_unix_ns, rows, expired_unix_ns IS NOT NULL FROM sealed_hours ORDER BY hour"
    return store.query(sql).rows()


def broken(store: Store) -> Store:
    """The same folder once the store's file could not be read."""
    path = store.path
    store.close()
    path.write_bytes(b"\0" * 8192)
    again, damage = open_store(path.parent, lambda: LATER)
    assert "quarantine" in damage
    return again


def test_a_broken_store_takes_no_rollup_of_an_expired_hour_along(tmp_path: Path) -> None:
    store = fill(tmp_path)
    assert retention(store).run() == 3
    before, told = store.query(HOURLY), marks(store)
    assert before.height == 8
    assert [row[1] for row in told] == ["expired"] * 3 + ["sealed"]
    with broken(store) as again:
        assert again.query(HOURLY).equals(before)
        assert [row[:2] for row in marks(again)] == [row[:2] for row in told]
        assert marks(again)[:3] == told[:3]
        with again.write() as transaction:  # what comes late for them changes nothing
            rollups.rebuild(transaction, [], [FIRST * HOUR_NS])
        assert again.query(HOURLY).equals(before)
        assert retention(again).run() == 0
        assert broken(again).query(HOURLY).equals(before)


@SLOW
def test_a_late_row_of_an_expired_hour_that_was_sealed_again_is_no_rollup_of_it(tmp_path: Path) -> None:
    store = fill(tmp_path)
    retention(store).run()
    before = store.query(HOURLY)
    late = make_request(at_s=1800, decode_s=9.0)
    with store.write() as transaction:
        row = attributed(late) | {"final": True, "revision": 1, "received_unix_ns": LATER}
        transaction.insert("requests", request_table([row]))
    (due,) = due_hours(store, LATER + 3 * HOUR_NS)
    assert Sealer(store, lambda: LATER).seal(due)
    with broken(store) as again:
        assert again.query("SELECT count(*) AS n FROM requests")["n"].item() == 5
        assert again.query(HOURLY).equals(before)


@pytest.mark.parametrize(
    ("point", "after"),
    [
        pytest.param("phasewise.collector.kept_rollups.put_in_place", 0, marks=SLOW),
        pytest.param("phasewise.collector.kept_rollups.put_in_place", 1, marks=SLOW),
        ("phasewise.collector.retention.Retention._take_out", 0),
        pytest.param("phasewise.collector.retention.make_views", 0, marks=SLOW),
        pytest.param("phasewise.collector.retention.Retention._finish", 0, marks=SLOW),
    ],
)
def test_ended_at_any_point_every_hour_has_its_rollups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, after: int
) -> None:
    store = fill(tmp_path)
    before = store.query(HOURLY)
    with monkeypatch.context() as patched:
        ending(patched, point, after)
        with pytest.raises(Killed):
            retention(store).run()
    with broken(store) as again:
        assert again.query(HOURLY).equals(before)
        retention(again).run()
        assert again.query(HOURLY).equals(before)


@SLOW
def test_hours_that_expired_under_an_older_release_are_kept_from_now_on(tmp_path: Path) -> None:
    with fill(tmp_path) as store:
        retention(store).run()
        shutil.rmtree(tmp_path / "cold" / "expired")
        retention(store).run()
        assert read_kept(store.cold_directory).hours.keys() == {FIRST, FIRST + 1, FIRST + 30}


@pytest.mark.slow
def test_a_disk_that_refuses_holds_no_hour_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fill(tmp_path) as store:
        own = retention(store)
        with monkeypatch.context() as patched:
            patched.setattr("phasewise.collector.kept_rollups.put_in_place", _full)
            assert own.run() == 3
        assert "No space left" in own.done.unkept
        own.run()
        assert own.done.unkept == ""
        assert len(read_kept(store.cold_directory).hours) == 3


def _full(*_: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_after_thirteen_months_they_go(tmp_path: Path) -> None:
    with fill(tmp_path) as store:
        retention(store).run()
        retention(store, START_UNIX_NS + int(13 * MONTH_NS) + 6 * HOUR_NS).run()
        assert read_kept(store.cold_directory).hours.keys() == {FIRST + 30, FIRST + 15 * 24}
        assert not read_kept(store.cold_directory).faults


@pytest.mark.parametrize("forgot", [False, pytest.param(True, marks=SLOW)])
def test_ended_while_they_go_none_is_left_in_a_file_that_nobody_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgot: bool
) -> None:
    later = START_UNIX_NS + int(13 * MONTH_NS) + 6 * HOUR_NS
    forget = KeptRollups.forget

    def killed(kept: KeptRollups, hours: list[int]) -> None:
        if forgot:
            forget(kept, hours)
        raise Killed

    with fill(tmp_path) as store:
        retention(store).run()
        with monkeypatch.context() as patched:
            patched.setattr(KeptRollups, "forget", killed)
            with pytest.raises(Killed):
                retention(store, later).run()
        own = retention(store, later)
        own.run()
        left = {FIRST + 30, FIRST + 15 * 24}
        assert read_kept(store.cold_directory).hours.keys() == left
        assert {row[0] for row in marks(store)} == left
        assert set(store.query(HOURLY)["bucket_unix_ns"] // HOUR_NS) == left
        assert own.done.stopped == ""


@pytest.mark.slow
def test_a_disk_that_refuses_to_forget_says_so_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fill(tmp_path) as store:
        retention(store).run()
        before = marks(store)
        own = retention(store, START_UNIX_NS + int(13 * MONTH_NS) + HOUR_NS // 2)  # one of the two hours of a day
        with monkeypatch.context() as patched:
            patched.setattr("phasewise.collector.kept_rollups.put_in_place", _full)
            own.run()
        assert "rollups of 1 hours" in own.done.stopped and "No space left" in own.done.stopped
        assert [row[0] for row in marks(store)] == [row[0] for row in before]
        own.run()
        assert own.done.stopped == ""
        assert FIRST not in read_kept(store.cold_directory).hours
        assert FIRST not in {row[0] for row in marks(store)}


def test_what_is_purged_is_in_no_file(tmp_path: Path) -> None:
    with fill(tmp_path) as store:
        retention(store).run()
        done = purge(store, tmp_path, Chosen("instance = ?", ["e-1"], columns=("instance",)), LATER)
        assert done.requests == 2
        kept = read_kept(store.cold_directory)
        assert set(kept.rollups["instance"].to_pylist()) == {"e-0"}
        assert broken(store).query(HOURLY)["instance"].unique().to_list() == ["e-0"]


@SLOW
def test_a_backup_has_them_and_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with fill(tmp_path / "data") as store:
        retention(store).run()
        before = store.query(HOURLY)
        write_backup(take_snapshot(store, tmp_path / "data").folder, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "again")
    assert check(tmp_path / "again")["faults"] == []
    with broken(Store(tmp_path / "again" / FILE)) as again:
        assert again.query(HOURLY).equals(before)
    (file, _) = sorted((tmp_path / "again" / "cold" / "expired").iterdir())
    file.write_bytes(file.read_bytes()[:-20])
    faults = check(tmp_path / "again")["faults"]
    assert isinstance(faults, list) and len(faults) == 1
    assert file.name in faults[0] and "hourly rollups" in faults[0]
    (tmp_path / "again" / FILE).write_bytes(b"\0" * 8192)
    with open_store(tmp_path / "again", lambda: LATER)[0] as again:
        left = pl.col("bucket_unix_ns") >= (FIRST + 24) * HOUR_NS
        assert again.query(HOURLY).equals(before.filter(left))
        retention(again).run()  # the damaged file is nobody's hours now, and stays
        assert file.exists()
