"""What came before is known after a failure, a restart and a purge as it stands in the table, however little is asked of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from span_tables import span_frame

from phasewise.collector import ledger as module
from phasewise.collector.ledger import Admitted, Ledger, prune
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "phasewise.duckdb") as opened:
        yield opened


def spans(*names: str, status: int = 0) -> pl.DataFrame:
    """Spans named "trace/span"."""
    parts = [name.partition("/") for name in names]
    return span_frame(
        [
            {
                "name": "x",
                "trace": f"{ord(trace):032x}",
                "span_id": f"{int(span):016x}",
                "start_s": 0,
                "end_s": 1,
                "status": status,
            }
            for trace, _, span in parts
        ]
    )


def admitted(store: Store, ledger: Ledger, *names: str, status: int = 0) -> Admitted:
    with store.write() as transaction:
        return ledger.admit(transaction, spans(*names, status=status))


def ids(found: pl.DataFrame) -> list[int]:
    return [int(text, 16) for text in found["span_id"]]


def test_copies_are_left_out_and_late_traces_told(store: Store) -> None:
    ledger = Ledger()
    first = admitted(store, ledger, "a/1", "a/2", "a/1")
    assert (ids(first.spans), first.late.height, first.duplicates, first.conflicts) == ([1, 2], 0, 1, 0)
    second = admitted(store, ledger, "b/9", "a/2", "a/3")
    assert (ids(second.spans), second.duplicates, second.conflicts) == ([9, 3], 1, 0)
    assert second.late["trace_id"].to_list() == [f"{ord('a'):032x}"]
    third = admitted(store, ledger, "a/2", "c/1", status=2)
    assert (ids(third.spans), third.duplicates, third.conflicts) == ([1], 0, 1)


def test_what_was_rolled_back_is_new_again(store: Store) -> None:
    ledger = Ledger()
    with pytest.raises(RuntimeError), store.write() as transaction:
        assert ledger.admit(transaction, spans("a/1", "a/2")).spans.height == 2
        raise RuntimeError
    again = admitted(store, ledger, "a/1", "a/2")
    assert (ids(again.spans), again.late.height, again.duplicates) == ([1, 2], 0, 0)
    assert admitted(store, ledger, "a/1").duplicates == 1


def test_a_new_process_knows_what_the_table_holds(store: Store) -> None:
    admitted(store, Ledger(), "a/1", "b/1")
    told = admitted(store, Ledger(), "a/1", "b/2")
    assert (ids(told.spans), told.duplicates, told.late.height) == ([2], 1, 1)


def test_a_table_that_could_not_be_read_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted(store, Ledger(), "a/1")
    ledger = Ledger()
    with monkeypatch.context() as broken:
        broken.setattr(Transaction, "query", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            admitted(store, ledger, "a/1")
    assert admitted(store, ledger, "a/1").duplicates == 1


def test_another_table_is_read_anew(store: Store) -> None:
    ledger = Ledger()
    admitted(store, ledger, "a/1")
    with store.write() as transaction:
        transaction.execute("DELETE FROM span_ledger")
    assert admitted(store, ledger, "a/1").duplicates == 0  # taken out of the table: the sieve may know more
    with store.write() as transaction:  # put into the table past the ledger: it has to be told
        transaction.execute("UPDATE span_ledger SET span = span + 1, trace = trace + 1")
    ledger.forget()
    assert admitted(store, ledger, "a/1").duplicates == 0


def test_it_is_made_anew_when_it_holds_too_much(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIEVE_NUMBERS", 10)
    monkeypatch.setattr(module, "LEDGER_SPANS", 4)
    ledger, source = Ledger(), random.Random(5)
    sent: set[int] = set()
    for _ in range(30):
        drawn = [source.randrange(40) for _ in range(source.randrange(1, 6))]
        new = admitted(store, ledger, *(f"a/{number}" for number in drawn))
        assert set(ids(new.spans)) == set(drawn) - sent
        sent |= set(drawn)
    with store.write() as transaction:
        prune(transaction)  # all were received at once: none is older than the newest four
    assert admitted(store, ledger, "a/1").duplicates == (1 in sent)
