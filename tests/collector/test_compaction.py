"""Compaction: an hour that stands in several small files is brought back and written anew as one, and reads the same all the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import START_UNIX_NS, attributed, make_request, request_table
from deltalake import write_deltalake
from ended import Killed, ending
from rolled import roll_up

from phasewise.collector.cold import enter_files, make_views, placed_file, rewriting_due
from phasewise.collector.lake import HOUR_NS, Lake
from phasewise.collector.retention import Keep
from phasewise.collector.store import Store
from phasewise.collector.upkeep import READERS_GONE_S, Upkeep

HOUR = START_UNIX_NS // HOUR_NS
PARTS = 5


class Time:
    """A wall clock and the seconds that passed."""

    def __init__(self) -> None:
        self.now, self.passed = START_UNIX_NS + 3 * HOUR_NS, 1000.0

    def clock(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return self.passed

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)
        self.passed += seconds


def split(store: Store, lake: Lake) -> None:
    """The sealed hour in files of a few rows each, as a table has it that another program appended to."""
    (path,) = lake.files("requests")[HOUR]
    rows = pq.read_table(lake.directory / path, partitioning=None)
    folder = Path(path).parent
    for name in ("date", "hour"):
        value = next(part.partition("=")[2] for part in folder.parts if part.startswith(f"{name}="))
        rows = rows.append_column(name, [[value] * rows.num_rows])
    each = -(-rows.num_rows // PARTS)
    table = str(lake.directory / "requests")
    for number in range(PARTS):
        part = rows.slice(number * each, each)
        how: Any = {"mode": "append"} if number else {"mode": "overwrite", "predicate": _of(folder)}
        write_deltalake(table, part, **how)
    with store.write() as transaction:
        transaction.execute("DELETE FROM main.cold_files WHERE kind = 'requests'")
        found = lake.files("requests")[HOUR]
        enter_files(transaction, [placed_file(lake.directory, "requests", HOUR, path) for path in found])
        make_views(transaction, store.cold_files)


def _of(folder: Path) -> str:
    return " AND ".join(f"{name} = '{value}'" for name, _, value in (p.partition("=") for p in folder.parts[-2:]))


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def several(tmp_path: Path, time: Time) -> tuple[Path, list[tuple[Any, ...]]]:
    """A closed store, and its rows."""
    rows = []
    for number in range(60):
        request = make_request(at_s=number * 40, decode_s=1.0 + number % 7, request_key=f"{number:032x}")
        rows.append(attributed(request) | {"final": True, "revision": 1, "received_unix_ns": request.finished_unix_ns})
    with Store(tmp_path / "phasewise.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("requests", request_table(rows))
            roll_up(transaction)
        Upkeep(store, tmp_path, Keep(), time.clock, time.monotonic).run()
        split(store, Lake(store.cold_directory))
        assert rewriting_due(store) == HOUR
        return tmp_path, all_of(store)


def all_of(store: Store) -> list[tuple[Any, ...]]:
    return store.query("SELECT * FROM requests ORDER BY request_key").rows()


def files(folder: Path) -> int:
    return len(list(folder.glob("cold/requests/date=*/hour=*/*.parquet")))


def rounds(store: Store, time: Time, expected: list[tuple[Any, ...]], count: int = 8) -> Upkeep:
    """Upkeep over the hours that follow; what is read stays the same after each round."""
    upkeep = Upkeep(store, store.path.parent, Keep(), time.clock, time.monotonic)
    for _ in range(count):
        upkeep.run()
        assert all_of(store) == expected
        time.forward(1800.0)
    return upkeep


def test_several_small_files_become_one(several: tuple[Path, list[tuple[Any, ...]]], time: Time) -> None:
    folder, rows = several
    assert len(rows) == 60
    assert files(folder) == PARTS + 1  # and the one before, which nothing names
    with Store(folder / "phasewise.duckdb") as store:
        upkeep = rounds(store, time, rows)
        assert upkeep.status()["hours"] == {"sealed": 1}
        assert rewriting_due(store) is None
        time.forward(READERS_GONE_S + 1)
        upkeep.run()
        assert all_of(store) == rows
        told = store.query("SELECT path, \"rows\" FROM main.cold_files WHERE kind = 'requests'")
        assert told["rows"].to_list() == [60]
        assert Lake(store.cold_directory).files("requests")[HOUR] == told["path"].to_list()
        assert store.query("SELECT count(*) AS n FROM main.requests")["n"].item() == 0
    assert files(folder) == 1


STEPS = [
    "phasewise.collector.upkeep.thaw",
    "phasewise.collector.sealing.Sealer._written",
    "phasewise.collector.sealing.Sealer._move",
    "phasewise.collector.sealing.make_views",
    "phasewise.collector.lake.sync_path",
]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_ended_anywhere_it_goes_on(
    several: tuple[Path, list[tuple[Any, ...]]], time: Time, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder, rows = several
    with monkeypatch.context() as patched:
        ending(patched, step, 0)
        store = Store(folder / "phasewise.duckdb")
        with pytest.raises(Killed):
            rounds(store, time, rows)
        store.close()
    with Store(folder / "phasewise.duckdb") as again:
        assert all_of(again) == rows
        upkeep = rounds(again, time, rows)
        time.forward(READERS_GONE_S + 1)
        upkeep.run()
        assert all_of(again) == rows
        assert rewriting_due(again) is None
    assert files(folder) == 1
