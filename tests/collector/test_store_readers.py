"""Reads of the store that take too long or are no longer wanted, and too many of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest
from endless import ENDLESS
from machine_speed import slowness
from waiting import until

from phasewise.collector.patience import Patience
from phasewise.collector.readers import AT_ONCE, MOST_WAITING
from phasewise.collector.store import Store, _Running
from phasewise.rules.errors import Cancelled, MachineError, TooBusy, TooSlow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "s.duckdb") as opened:
        yield opened


def raised_by(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Work in a thread of its own, and what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.alone
def test_a_query_that_takes_too_long_is_stopped_and_the_store_lives_on(store: Store) -> None:
    began = time.monotonic()
    with pytest.raises(TooSlow, match=r"stopped after 0\.3 s .*narrow the range or add a filter") as raised:
        store.query(ENDLESS, patience=Patience(0.3))
    assert 0.25 < time.monotonic() - began < 5 * slowness()
    assert isinstance(raised.value, MachineError)
    assert store.query("SELECT 1 AS one", patience=Patience(5))["one"].to_list() == [1]
    assert store.broken == ""


def test_whoever_asked_may_cancel(store: Store) -> None:
    patience = Patience(60)
    thread, raised = raised_by(lambda: store.query(ENDLESS, patience=patience))
    until(lambda: bool(store._readers._running))
    patience.cancel()
    thread.join(5)
    assert [type(one) for one in raised] == [Cancelled]
    with pytest.raises(Cancelled):
        store.query("SELECT 1", patience=patience)


def test_the_limit_holds_for_all_queries_of_an_answer(store: Store) -> None:
    patience = Patience(0.05)
    assert store.query("SELECT 1", patience=patience).height == 1
    time.sleep(0.06)
    with pytest.raises(TooSlow):
        store.query("SELECT 1", patience=patience)


def test_a_transaction_of_the_writer_is_not_stopped_with_a_reader(store: Store) -> None:
    with store.write() as transaction:
        transaction.execute("INSERT INTO counters BY NAME SELECT 'a' AS name, '' AS label, 1 AS value")
        with pytest.raises(TooSlow):
            store.query(ENDLESS, patience=Patience(0.2))
        transaction.execute("INSERT INTO counters BY NAME SELECT 'b' AS name, '' AS label, 2 AS value")
    assert store.query("SELECT sum(value) AS v FROM counters")["v"].to_list() == [3]


def test_few_run_at_once_some_wait_and_the_rest_is_refused(store: Store) -> None:
    patience = Patience(60)
    threads = [raised_by(lambda: store.query(ENDLESS, patience=patience)) for _ in range(AT_ONCE + MOST_WAITING)]
    until(lambda: store._readers._waiting == MOST_WAITING)
    assert len(store._readers._running) == AT_ONCE
    with pytest.raises(TooBusy, match="ask again"):
        store.query("SELECT 1", patience=Patience(5))
    assert store.query("SELECT 1").height == 1, "the writer's own reads need no place"
    assert store.query("SELECT 1", patience=Patience(5), waits=False).height == 1, "nor do probes"
    patience.cancel()
    for thread, raised in threads:
        thread.join(10)
        assert [type(one) for one in raised] == [Cancelled]
    assert store.query("SELECT 1", patience=Patience(5)).height == 1


def test_waiting_for_a_place_is_bounded(store: Store) -> None:
    busy = Patience(60)
    threads = [raised_by(lambda: store.query(ENDLESS, patience=busy))[0] for _ in range(AT_ONCE)]
    until(lambda: len(store._readers._running) == AT_ONCE)
    with pytest.raises(TooSlow):
        store.query("SELECT 1", patience=Patience(0.2))
    busy.cancel()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("stopping_s", [5.0, 0.0])
def test_closing_stops_the_readers_and_breaks_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping_s: float
) -> None:
    """With 0 s the connection goes while queries run on it: each ends with a sentence and the watch with nothing."""
    monkeypatch.setattr("phasewise.collector.readers._STOPPING_S", stopping_s)
    store = Store(tmp_path / "s.duckdb")
    threads = [raised_by(lambda: store.query(ENDLESS, patience=Patience(3.0))) for _ in range(AT_ONCE)]
    until(lambda: len(store._readers._running) == AT_ONCE)
    store.close()
    for thread, raised in threads:
        thread.join(10)
        assert len(raised) == 1 and isinstance(raised[0], MachineError)
    watcher = store._readers._watcher
    assert watcher is not None
    watcher.join(10)
    assert not watcher.is_alive()
    with pytest.raises(MachineError, match="it was closed"):
        store.query("SELECT 1", patience=Patience(5))


def test_the_watch_outlives_a_cursor_that_was_closed_under_its_query(store: Store) -> None:
    patience = Patience(60)
    patience.cancel()
    cursor, _ = store._cursor()
    cursor.close()  # as closing its connection does
    with pytest.raises(duckdb.ConnectionException):
        cursor.interrupt()
    with store._readers.watched(_Running(cursor), patience):
        time.sleep(0.2)
        watcher = store._readers._watcher
        assert watcher is not None and watcher.is_alive()
    assert store.query("SELECT 1", patience=Patience(5)).height == 1
