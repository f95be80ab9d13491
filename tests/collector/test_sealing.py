"""Sealed hours: moved once whatever ends the process, seen with the hot rows as one, brought back by what comes late."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import (
    SECOND_NS,
    START_UNIX_NS,
    attributed,
    make_instance,
    make_request,
    make_sample,
    record_table,
    request_table,
)
from ended import Killed, ending

from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.cold import thaw
from phasewise.collector.lake import HOUR_NS, Lake
from phasewise.collector.records import EngineSample, Instance
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.dashboard.answers import GuardedReader
from phasewise.rules.load import load_rulebook

FIRST = START_UNIX_NS // HOUR_NS  # the fictitious day begins at a full hour
SLOW = pytest.mark.slow
LATER = START_UNIX_NS + 8 * HOUR_NS


def fill(store: Store, hours: int = 3, an_hour: int = 40) -> None:
    chance = random.Random(3)
    rows = []
    for number in range(hours * an_hour):
        at_s = number * 3600 / an_hour
        request = make_request(
            at_s=at_s, queue_s=chance.uniform(0, 2), decode_s=chance.uniform(0.5, 4), request_key=f"{number:032x}"
        )
        rows.append(attributed(request) | {"final": True, "revision": 1, "received_unix_ns": request.finished_unix_ns})
    samples = [
        make_sample(instance="gpu-0:8000", at_s=at_s, running=2.0, waiting=1.0) for at_s in range(0, hours * 3600, 300)
    ]
    instances = [
        make_instance(instance="gpu-0:8000", joined_to="gpu-0"),
        make_instance(instance="gpu-0", kind="spans", joined_to=None),
    ]
    with store.write() as transaction:
        transaction.insert("requests", request_table(rows))
        transaction.insert("engine_samples", record_table(EngineSample, samples))
        transaction.insert("instances", record_table(Instance, instances))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "phasewise.duckdb") as opened:
        fill(opened)
        yield opened


def sealer(store: Store) -> Sealer:
    return Sealer(store, lambda: LATER)


def everything(store: Store) -> list[tuple[Any, ...]]:
    return store.query("SELECT * FROM requests ORDER BY request_key").rows()


def verdict(store: Store) -> str:
    window = Window(START_UNIX_NS, START_UNIX_NS + 3 * HOUR_NS)
    found = window_verdict(GuardedReader(store), load_rulebook(), window, now_unix_ns=LATER)
    return json.dumps(found, sort_keys=True, default=str)


def hot(store: Store) -> int:
    return int(store.query("SELECT count(*) AS n FROM main.requests")["n"].item())


def test_an_hour_is_due_when_it_is_over_quiet_and_final(store: Store) -> None:
    just_ended = START_UNIX_NS + HOUR_NS + HOUR_NS
    assert due_hours(store, just_ended) == []
    assert [due.hour for due in due_hours(store, just_ended + 901 * SECOND_NS)] == [FIRST]
    assert [due.hour for due in due_hours(store, LATER)] == [FIRST, FIRST + 1, FIRST + 2]
    with store.write() as transaction:
        transaction.execute("UPDATE requests SET final = FALSE WHERE finished_unix_ns < ?", [START_UNIX_NS + HOUR_NS])
    assert FIRST not in [due.hour for due in due_hours(store, LATER)]
    assert FIRST in [due.hour for due in due_hours(store, LATER + 30 * HOUR_NS)]  # it will not become final any more
    second = START_UNIX_NS + HOUR_NS
    with (
        store.write() as transaction
    ):  # requests so long that the next hour's are not final yet: they are judged by this one
        transaction.execute("UPDATE requests SET final = finished_unix_ns < ?", [second])
    assert [due.hour for due in due_hours(store, LATER)] == []
    with store.write() as transaction:
        transaction.execute("UPDATE requests SET final = finished_unix_ns < ?", [second + HOUR_NS])
    assert [due.hour for due in due_hours(store, LATER)] == [FIRST]
    with store.write() as transaction:
        transaction.execute("UPDATE requests SET received_unix_ns = ?", [LATER - 60 * SECOND_NS])
    assert [due.hour for due in due_hours(store, LATER)] == []


def test_an_hour_whose_rollups_wait_is_not_sealed(store: Store) -> None:
    due = due_hours(store, LATER)[0]
    dirty = DirtyRollups()
    dirty.add(store.query("SELECT finished_unix_ns FROM requests"), LATER)
    with store.write() as transaction:
        dirty.store(transaction)
    assert due_hours(store, LATER) == []
    assert sealer(store).seal(due) is False  # it was due, and became dirty then
    with store.write() as transaction:
        dirty.rebuild_all(transaction)
        dirty.store(transaction)
    assert len(due_hours(store, LATER)) == 3
    assert sealer(store).seal(due)


@pytest.mark.parametrize("sealed", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_hot_and_cold_are_one_for_any_split(store: Store, sealed: int) -> None:
    before, judged = everything(store), verdict(store)
    for due in due_hours(store, LATER)[:sealed]:
        assert sealer(store).seal(due)
    assert hot(store) == 120 - sum(
        1 for row in store.query("SELECT rows FROM cold_files WHERE kind = 'requests'").rows() for _ in range(row[0])
    )
    assert hot(store) < 120 - 30 * sealed
    assert everything(store) == before
    assert verdict(store) == judged


@pytest.mark.slow
def test_the_split_outlives_a_restart_and_another_place(store: Store, tmp_path: Path) -> None:
    before = everything(store)
    for due in due_hours(store, LATER):
        sealer(store).seal(due)
    store.close()
    shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("elsewhere"))
    shutil.rmtree(tmp_path / "cold")
    with Store(tmp_path / "elsewhere" / "phasewise.duckdb") as moved:
        assert everything(moved) == before


QUICK: list[tuple[str, int]] = [
    ("phasewise.collector.lake.Lake._make_durable", 1),  # one table has the hour, the other not
    ("phasewise.collector.sealing.make_views", 0),
]
POINTS: list[tuple[str, int]] = [
    ("phasewise.collector.lake.Lake.write_hour", 0),
    ("phasewise.collector.lake.Lake.write_hour", 1),
    ("phasewise.collector.lake.Lake._make_durable", 0),
    ("phasewise.collector.sealing.Sealer._digest_of_files", 0),
    ("phasewise.collector.sealing.Sealer._move", 0),
    ("phasewise.collector.sealing.enter_files", 0),
]


@pytest.mark.parametrize(("point", "after"), [*QUICK, *(pytest.param(*one, marks=SLOW) for one in POINTS)])
def test_ended_anywhere_each_row_is_there_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, point: str, after: int
) -> None:
    before, judged = everything(store), verdict(store)
    (due, *_) = due_hours(store, LATER)
    with monkeypatch.context() as patched:
        ending(patched, point, after)
        with pytest.raises(Killed):
            sealer(store).seal(due)
    path = store.path
    store.close()
    with Store(path) as again:
        assert everything(again) == before
        (due, *_) = due_hours(again, LATER)
        assert due.hour == FIRST
        assert sealer(again).seal(due)
        assert everything(again) == before
        assert verdict(again) == judged
        table = Lake(again.cold_directory).files("requests")
        assert list(table) == [FIRST]


@pytest.mark.slow
def test_a_row_that_comes_while_an_hour_is_written_keeps_the_hour_hot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (due, *_) = due_hours(store, LATER)
    original = Sealer._digest_of_files
    late = attributed(make_request(at_s=5, request_key="f" * 32)) | {"final": True, "revision": 1}

    def insert_first(self: Sealer, placed: Any) -> Any:
        if not store.query("SELECT 1 FROM requests WHERE request_key = ?", ["f" * 32]).height:
            with store.write() as transaction:
                transaction.insert("requests", request_table([late]))
        return original(self, placed)

    monkeypatch.setattr(Sealer, "_digest_of_files", insert_first)
    assert sealer(store).seal(due)  # written once more, with the late row
    assert len(everything(store)) == 121
    assert store.query("SELECT generation FROM sealed_hours")["generation"].to_list() == [2]


def test_what_comes_late_brings_its_hour_back_and_the_hour_is_sealed_again(store: Store) -> None:
    for due in due_hours(store, LATER):
        sealer(store).seal(due)
    with store.write() as transaction:
        assert thaw(transaction, store.cold_files, {FIRST, FIRST + 7}, LATER)
        assert not thaw(transaction, store.cold_files, {FIRST + 7}, LATER)
        transaction.execute("UPDATE main.requests SET revision = 2, queue_s = 99 WHERE request_key = ?", [f"{1:032x}"])
    assert hot(store) > 30
    assert store.query("SELECT queue_s, revision FROM requests WHERE request_key = ?", [f"{1:032x}"]).rows() == [
        (99.0, 2)
    ]
    assert len(everything(store)) == 120
    assert due_hours(store, LATER) == []  # it rests first
    (due,) = due_hours(store, LATER + 2 * HOUR_NS)
    assert (due.hour, due.generation) == (FIRST, 2)
    assert sealer(store).seal(due)
    assert hot(store) == 0
    assert len(everything(store)) == 120
    assert store.query("SELECT queue_s FROM requests WHERE request_key = ?", [f"{1:032x}"]).rows() == [(99.0,)]
    assert Lake(store.cold_directory).vacuum("requests", 0) == 1


@pytest.mark.slow
def test_rows_of_an_older_release_lack_columns(store: Store, tmp_path: Path) -> None:
    path = store.path
    with store.write() as transaction:
        transaction.execute("ALTER TABLE requests DROP COLUMN tenant")
    import phasewise.collector.cold as cold
    import phasewise.collector.sealing as sealing

    with pytest.MonkeyPatch.context() as patched:
        from phasewise.collector.records import arrow_schema, columns

        def shorter(record: type) -> Any:
            return {name: kind for name, kind in columns(record).items() if name != "tenant"}

        patched.setattr(cold, "columns", shorter)
        patched.setattr(
            sealing,
            "arrow_schema",
            lambda r: (
                arrow_schema(r)
                if "tenant" not in arrow_schema(r).names
                else arrow_schema(r).remove(arrow_schema(r).get_field_index("tenant"))
            ),
        )
        for due in due_hours(store, LATER)[:2]:
            assert sealer(store).seal(due)
    store.close()
    with Store(path) as newer:
        assert newer.query("SELECT count(*) AS n, count(tenant) AS t FROM requests").rows() == [(120, 0)]
        (due,) = due_hours(newer, LATER)
        assert sealer(newer).seal(due)
        assert newer.query("SELECT count(*) AS n, count(tenant) AS t FROM requests").rows() == [(120, 0)]
        with newer.write() as transaction:
            thaw(transaction, newer.cold_files, {FIRST}, LATER)
        assert newer.query("SELECT count(*) AS n FROM requests").rows() == [(120,)]
