"""Retention: whole hours by their receipt, disk given back, what was judged stays, a clock that jumps deletes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import START_UNIX_NS, attributed, make_request, request_table
from ended import Killed, ending
from rolled import roll_up
from span_tables import span_table
from writing import engine_span

from phasewise.collector.archive import SpanArchive
from phasewise.collector.cold import thaw
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.retention import DAY_NS, MONTH_NS, Keep, Retention
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.upkeep import READERS_GONE_S, Upkeep

FIRST = START_UNIX_NS // HOUR_NS
DAYS = 5


class Time:
    """A wall clock and the seconds that passed, which agree unless a test lets them not."""

    def __init__(self) -> None:
        self.now = START_UNIX_NS + DAYS * DAY_NS
        self.passed = 1000.0

    def clock(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return self.passed

    def forward(self, ns: float) -> None:
        self.now += int(ns)
        self.passed += ns / 1e9


def fill(data: Path, hours: int = DAYS) -> Store:
    """One sealed hour a day, received a little later; raw spans beside; findings and marks."""
    store = Store(data / "phasewise.duckdb")
    rows = []
    for day in range(hours):
        for i in range(4):
            request = make_request(at_s=day * 86_400 + i * 60, decode_s=1.0)
            rows.append(
                attributed(request) | {"final": True, "revision": 1, "received_unix_ns": request.finished_unix_ns}
            )
        received = START_UNIX_NS + day * DAY_NS
        SpanArchive(data).write(
            span_table([engine_span(trace=f"{day + 1:032x}")], received_unix_ns=received), f"s{day}"
        )
    with store.write() as transaction:
        transaction.insert("requests", request_table(rows))
        transaction.execute(
            "INSERT INTO findings BY NAME SELECT 'f' AS finding, 0 AS created_unix_ns, 0 AS from_unix_ns, 0 AS to_unix_ns, '{}' AS verdict"
        )
        roll_up(transaction)
    now = START_UNIX_NS + (hours + 1) * DAY_NS
    for due in due_hours(store, now):
        assert Sealer(store, lambda: now).seal(due)
    return store


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with fill(tmp_path) as opened:
        yield opened


def retention(store: Store, time: Time, keep: Keep | None = None, usage: Any = lambda _: (0, 10**12)) -> Retention:
    return Retention(store, store.path.parent, keep or Keep(), time.clock, time.monotonic, usage)


def days_left(store: Store) -> list[int]:
    found = store.query(f"SELECT DISTINCT finished_unix_ns // {HOUR_NS} AS hour FROM requests ORDER BY 1")
    return [(hour - FIRST) // 24 for hour in found["hour"]]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def test_hours_go_when_their_receipt_is_old_enough(store: Store, time: Time) -> None:
    own, data = retention(store, time), store.path.parent
    before = size_of(data)
    assert own.run() == 0
    time.forward(9 * DAY_NS + 2 * HOUR_NS)  # day 14: the first is just past its 14 days
    assert own.run() == 1
    own.vacuum()
    assert days_left(store) == [1, 2, 3, 4]
    assert Lake(store.cold_directory).files("requests").keys() == {FIRST + 24 * day for day in (1, 2, 3, 4)}
    assert size_of(data) < before * 0.9
    assert sorted(path.name for path in (data / "spans").glob("date=*")) == [
        f"date=2025-{d}" for d in ("11-30", "12-01", "12-02", "12-03")
    ]
    assert store.query("SELECT count(*) AS n FROM findings")["n"].item() == 1
    widths = store.query(f"SELECT DISTINCT width_s FROM rollups WHERE bucket_unix_ns // {HOUR_NS} = {FIRST}")[
        "width_s"
    ].to_list()
    assert widths == [3600]  # hours stay, what is finer goes with the raw rows
    time.forward(13.1 * MONTH_NS)
    own.run()
    assert (
        store.query(f"SELECT count(*) AS n FROM rollups WHERE bucket_unix_ns // {HOUR_NS} = {FIRST}")["n"].item() == 0
    )


def test_a_late_row_of_an_expired_hour_takes_nothing_from_its_rollup(store: Store, time: Time) -> None:
    def counted(width_s: int) -> int:
        sql = f"SELECT sum(requests)::BIGINT AS n FROM rollups WHERE width_s = ? AND bucket_unix_ns // {HOUR_NS} = {FIRST}"
        return int(store.query(sql, [width_s])["n"].item() or 0)

    own = retention(store, time)
    assert own.run() == 0
    time.forward(9 * DAY_NS + 2 * HOUR_NS)
    assert own.run() == 1
    before = counted(3600)
    assert (before, counted(60)) == (4, 0)
    for number in range(2):  # twice: the first is sealed in between, and no longer says that the hour expired
        late = make_request(at_s=600 + number, decode_s=1.0)
        with store.write() as transaction:
            row = attributed(late) | {"final": True, "revision": 1, "received_unix_ns": late.finished_unix_ns}
            transaction.insert("requests", request_table([row]))
            roll_up(transaction)
        assert (counted(3600), counted(60)) == (before, number + 1)
        for due in due_hours(store, time.now):
            assert Sealer(store, time.clock).seal(due)
            with store.write() as transaction:
                thaw(transaction, store.cold_files, [FIRST], time.now)


def test_a_jump_of_the_clock_deletes_nothing(store: Store, time: Time) -> None:
    own = retention(store, time)
    own.run()
    time.now += 365 * DAY_NS  # no second passed
    assert own.run() == 0
    assert days_left(store) == [0, 1, 2, 3, 4]
    assert "did the clock jump" in own.done.stopped
    time.forward(HOUR_NS)
    assert own.run() == 0  # a clock that stays wrong deletes nothing either
    assert "phasewise db purge" in own.done.stopped
    time.now -= 365 * DAY_NS
    assert own.run() == 0
    assert own.done.stopped == ""
    assert list((store.path.parent / "spans").glob("date=*/hour=*/*"))


@pytest.mark.slow
def test_after_a_long_rest_nothing_goes_at_once(store: Store, time: Time) -> None:
    time.now += 100 * DAY_NS
    assert retention(store, time).run() == 0


@pytest.mark.slow
def test_a_small_share_goes_whatever_the_clock_did(tmp_path: Path, time: Time) -> None:
    with fill(tmp_path, 12) as store:
        time.now = START_UNIX_NS + 14 * DAY_NS + 2 * HOUR_NS
        assert retention(store, time).run() == 1


@pytest.mark.slow
def test_old_times_in_spans_are_not_old_data(tmp_path: Path, time: Time) -> None:
    with Store(tmp_path / "phasewise.duckdb") as store:
        row = attributed(make_request(at_s=-400 * 86_400)) | {
            "final": True,
            "revision": 1,
            "received_unix_ns": time.now,
        }
        with store.write() as transaction:
            transaction.insert("requests", request_table([row]))
        own = retention(store, time)
        own.run()
        time.forward(3 * HOUR_NS)
        (due,) = due_hours(store, time.now)
        assert Sealer(store, time.clock).seal(due)
        own.run()
        time.forward(13.8 * DAY_NS)
        assert own.run() == 0
        time.forward(HOUR_NS * 4)
        assert own.run() == 1


@pytest.mark.slow
def test_a_full_volume_takes_the_oldest(store: Store, time: Time) -> None:
    sizes = store.query('SELECT hour, sum("bytes")::BIGINT AS bytes FROM main.cold_files GROUP BY 1 ORDER BY 1')[
        "bytes"
    ].to_list()
    own, free = 8_000 + sizes[0] + 1, 2_000
    over = retention(store, time, Keep(max_volume_ratio=(own - sizes[0] - 1) / (own + free)), lambda _: (own, free))
    assert over.run() == 2  # the first alone is one byte too little
    assert days_left(store) == [2, 3, 4]


@pytest.mark.slow
def test_a_full_volume_takes_no_more_where_what_is_old_frees_enough(store: Store, time: Time) -> None:
    own = retention(store, time, Keep(), lambda _: (10_000, 1))  # 2,000 bytes too much, and no file is that small
    own.run()
    assert days_left(store) == [1, 2, 3, 4]
    time.forward(HOUR_NS)
    assert own.run() == 0  # its file is still there, for who may be reading it
    own.vacuum()
    time.forward(10 * DAY_NS)
    assert own.run() == 1
    assert days_left(store) == [2, 3, 4]


STEPS = [
    "phasewise.collector.retention.make_views",
    "phasewise.collector.retention.Retention._take_out",
    "phasewise.collector.retention.Retention._finish",
    "phasewise.collector.retention.Retention._drop_rollups",
    "phasewise.collector.retention.Retention._drop_spans",
    "phasewise.collector.lake.Lake.remove_hours",
    "phasewise.collector.lake.Lake.files",
    "phasewise.collector.lake.sync_path",
    "phasewise.collector.lake.Path.unlink",
    "phasewise.collector.lake.Path.rmdir",
]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_ended_at_any_point_only_whole_expired_hours_are_gone(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, step: str, after: int
) -> None:
    """Twenty points of a run that deletes two of five hours."""
    store = fill(tmp_path)
    whole = store.query("SELECT * FROM requests ORDER BY request_key")
    own = retention(store, time)
    own.run()
    time.forward(10 * DAY_NS + 2 * HOUR_NS)
    with monkeypatch.context() as patched:
        ending(patched, step, after)
        try:
            own.run()
            own.vacuum()
        except Killed:
            pass
    store.close()
    with Store(tmp_path / "phasewise.duckdb") as again:
        assert days_left(again) in ([0, 1, 2, 3, 4], [2, 3, 4])
        kept = again.query(
            f"SELECT * FROM requests WHERE finished_unix_ns >= {START_UNIX_NS + DAY_NS * 2} ORDER BY request_key"
        )
        assert kept.equals(whole.tail(12))
        time.forward(HOUR_NS)
        own = retention(again, time, Keep(raw_days=14))
        own._seen = (time.now, time.monotonic())
        own.run()
        own.vacuum()
        assert days_left(again) == [2, 3, 4]
        lake = Lake(again.cold_directory)
        assert set(lake.files("requests")) == {FIRST + 24 * day for day in (2, 3, 4)}
        left = {str(p.relative_to(lake.directory)) for p in lake.directory.glob("*/date=*/hour=*/*.parquet")}
        assert left == {path for kind in KINDS for paths in lake.files(kind).values() for path in paths}
        assert again.query("SELECT count(*) AS n FROM findings")["n"].item() == 1


@pytest.mark.slow
def test_upkeep_seals_and_deletes_in_its_rounds(tmp_path: Path, time: Time) -> None:
    with Store(tmp_path / "phasewise.duckdb") as store:
        rows = [
            attributed(make_request(at_s=i * 60)) | {"final": True, "revision": 1, "received_unix_ns": time.now}
            for i in range(3)
        ]
        with store.write() as transaction:
            transaction.insert("requests", request_table(rows))
        upkeep = Upkeep(store, tmp_path, Keep(), time.clock, time.monotonic)
        upkeep.run()
        assert upkeep.status()["hours"] == {}
        time.forward(2 * HOUR_NS)
        upkeep.run()
        assert upkeep.status()["hours"] == {"sealed": 1}
        for _ in range(16):
            time.forward(DAY_NS)
            upkeep.run()
        assert upkeep.status()["hours"] == {"expired": 1}
        time.forward(READERS_GONE_S * 1e9 + 1e9)
        upkeep.run()
        assert list((tmp_path / "cold" / "requests").glob("date=*")) == []
