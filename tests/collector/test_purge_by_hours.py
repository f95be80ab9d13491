"""A purge works hour by hour on sealed hours as they lie, goes on where it was broken off, and never half writes a journal."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ended import Killed, ending
from span_tables import at, span_table
from writing import Bench, bench, engine_span

from phasewise.collector.exposition import read_exposition
from phasewise.collector.journal import JournalReader
from phasewise.collector.journal_writer import JournalWriter
from phasewise.collector.purge import is_unfinished
from phasewise.collector.purge_files import purge_journal
from phasewise.collector.retention import DAY_NS, Keep, Retention
from phasewise.collector.rollup_table import SELECTED
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.dashboard.housekeeping import UnfinishedPurge, purged
from phasewise.rules.errors import MachineError

HOURS = 3
PAGE = "vllm:num_requests_running 1\n"
ROWS = "SELECT * EXCLUDE (revision) FROM requests ORDER BY request_key"
ROLLUPS = f"SELECT {SELECTED} FROM rollups ORDER BY ALL"
SLOW = pytest.mark.slow


def spans(instance: str) -> list[dict[str, Any]]:
    number = 500 if instance == "gone" else 0
    resource = {"service.instance.id": instance, "service.name": "engine"}
    return [
        engine_span(
            start_s=hour * 3600.0 + i * 60.0, resource=resource, trace=f"{(n := number + hour * 8 + i) + 1:032x}", span_id=f"{n + 1:016x}"
        )
        for hour in range(-HOURS, 1)
        for i in range(6)
    ]  # fmt: skip


@contextmanager
def filled(folder: Path, *instances: str) -> Iterator[Bench]:
    """Hours of requests and samples of some instances, all but the last sealed; everything still in the journal."""
    folder.mkdir()
    with bench(folder) as b:
        for instance in instances:
            b.writer.add_samples(
                [
                    one
                    for second in range(-HOURS * 3600, 300, 900)
                    if (one := read_exposition(PAGE, at(second), b.writer._profiles, instance=instance)) is not None
                ]
            )
            b.receive(spans(instance))
        b.run(1.5)
        b.run(200)
        b.clock.forward(2 * 3600)
        b.run()
        b.run(10)
        for due in due_hours(b.store, b.clock.now)[:HOURS]:
            assert Sealer(b.store, b.clock).seal(due)
        yield b


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Bench]:
    with filled(tmp_path / "both", "kept", "gone") as b:
        yield b


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is stored where only what stays ever came."""
    with filled(tmp_path_factory.mktemp("alone") / "data", "kept") as b:
        return state(b)


def purge(b: Bench) -> dict[str, object]:
    return purged(b.store, b.writer, b.folder, ["instance:eq:gone"], "", b.clock.now)


def state(b: Bench) -> dict[str, Any]:
    samples = "SELECT instance, unix_ns FROM engine_samples ORDER BY ALL"
    return {"rows": b.rows(ROWS), "rollups": b.store.query(ROLLUPS).to_dicts(), "samples": b.rows(samples)}


def in_journal(b: Bench) -> list[str]:
    entries = JournalReader(b.folder / "journal").read(None, limit=10_000, limit_rows=10**9)
    return [str(row["resource"]) for entry in entries for row in entry.rows.to_pylist()]


def test_sealed_hours_are_left_as_if_the_purged_never_came(both: Bench, expected: dict[str, Any]) -> None:
    hot = both.rows("SELECT count(*) AS n FROM main.requests")[0]["n"]
    done = purge(both)
    assert (done["requests"], done["journal_rows"]) == (24, 24)
    assert state(both) == expected
    assert both.rows("SELECT state, count(*) AS n FROM sealed_hours GROUP BY 1") == [{"state": "sealed", "n": HOURS}]
    assert both.rows("SELECT count(*) AS n FROM main.requests")[0]["n"] == hot - 6  # nothing came back for it
    assert both.rows("SELECT count(*) AS n FROM purging") == [{"n": 0}]
    assert "gone" not in str(in_journal(both)) and len(in_journal(both)) == 24


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("phasewise.collector.purge._purge_hour", 1),
        pytest.param("phasewise.collector.lake.Lake.write_hour", 3, marks=SLOW),
        pytest.param("phasewise.collector.rewriting.make_views", 1, marks=SLOW),
        pytest.param("phasewise.collector.purge._forget_all", 0, marks=SLOW),
        pytest.param("phasewise.collector.purge_files.put_in_place", 0, marks=SLOW),
        pytest.param("phasewise.collector.purge.drop_copies", 0, marks=SLOW),
    ],
)
def test_what_was_broken_off_goes_on_at_the_next_start(
    both: Bench, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, point: str, after: int
) -> None:
    with monkeypatch.context() as patched:
        ending(patched, point, after)
        with pytest.raises(Killed):
            purge(both)
    both.reopen()
    assert {row["request_key"] for row in expected["rows"]} <= {row["request_key"] for row in both.rows(ROWS)}
    left = UnfinishedPurge(both.store, both.writer, both.folder)
    assert left.status() == {"unfinished": True, "error": ""}
    left.go_on(both.clock.now)
    assert left.status() == {"unfinished": False, "error": ""}
    assert state(both) == expected
    assert "gone" not in str(in_journal(both)) and len(in_journal(both)) == 24
    assert '"continued"' in (both.folder / "audit.jsonl").read_text()


@SLOW
def test_a_disk_that_refuses_is_told_and_tried_again(both: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MachineError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("phasewise.collector.purge.rewrite", full)
        with pytest.raises(MachineError):
            purge(both)
        left = UnfinishedPurge(both.store, both.writer, both.folder)
        left.go_on(both.clock.now)
        assert left.status() == {"unfinished": True, "error": "MachineError: no space left"}
    assert both.run() >= 0  # the writer goes on meanwhile
    purge(both)
    assert not is_unfinished(both.store)


@SLOW
def test_an_instance_whose_hours_have_all_expired_goes_from_their_rollups(both: Bench) -> None:
    now = both.clock.now + 20 * DAY_NS
    retention = Retention(both.store, both.folder, Keep(), lambda: now, lambda: now / 1e9, lambda _: (0, 10**12))
    retention._seen = (now, now / 1e9)
    assert retention.run() == HOURS
    with both.store.write() as transaction:
        transaction.execute("DELETE FROM main.requests")
    purge(both)
    assert both.rows("SELECT DISTINCT instance FROM rollups WHERE width_s = 3600") == [{"instance": "kept"}]


@SLOW
def test_a_purge_that_an_older_release_left_goes_on(both: Bench) -> None:
    """It had deleted the rows, and noted the traces that are still in files."""
    gone = both.rows("SELECT trace_id FROM requests WHERE instance = 'gone'")
    told = json.dumps([{"traces": [row["trace_id"] for row in gone], "hours": [], "before_unix_ns": None}])
    with both.store.write() as transaction:
        transaction.execute("INSERT INTO main.positions VALUES ('purge', ?)", [told])
    left = UnfinishedPurge(both.store, both.writer, both.folder)
    left.go_on(both.clock.now)
    assert left.status() == {"unfinished": False, "error": ""}
    assert "gone" not in str(in_journal(both)) and len(in_journal(both)) == 24


def going(wanted: str) -> Any:
    return lambda traces: pa.array([trace for trace in traces.to_pylist() if trace == wanted], pa.string())


def entry(number: int) -> pa.Table:
    return span_table([engine_span(trace=f"{number:032x}", span_id=f"{number:016x}")])


def traces(directory: Path) -> list[int]:
    entries = JournalReader(directory).read(None, limit=10_000, limit_rows=10**9)
    return [int(trace, 16) for one in entries for trace in one.rows["trace_id"].to_pylist()]


@pytest.mark.parametrize("point", ["put_in_place", "_write", "shutil.copyfile"])
def test_a_purge_that_ends_in_a_segment_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with JournalWriter(tmp_path) as journal:
        for number in range(1, 6):
            journal.append("spans", entry(number))
        journal.sync()
        (segment,) = tmp_path.glob("*.seg")
        before = segment.read_bytes()
        with monkeypatch.context() as patched:
            ending(patched, f"phasewise.collector.purge_files.{point}", 0)
            with pytest.raises(Killed):
                purge_journal(tmp_path, going(f"{3:032x}"), None)
        assert segment.read_bytes() == before
        assert purge_journal(tmp_path, going(f"{3:032x}"), None) == 1
        assert traces(tmp_path) == [1, 2, 4, 5]
        assert list(tmp_path.glob("*.purged")) == []
        journal.append("spans", entry(9))  # into a segment of its own: that one was replaced
        journal.sync()
        assert traces(tmp_path) == [1, 2, 4, 5, 9]
        assert len(list(tmp_path.glob("*.seg"))) == 2


def test_what_is_received_while_a_segment_is_replaced_is_all_there(tmp_path: Path) -> None:
    """Four threads append and sync; meanwhile every seventh span is purged, again and again."""
    acknowledged: list[int] = []
    with JournalWriter(tmp_path, segment_bytes=1 << 16) as journal:
        stop = threading.Event()

        def send(first: int) -> None:
            for number in range(first, first + 60):
                journal.append("spans", entry(number))
                journal.sync()
                acknowledged.append(number)

        def purge_some() -> None:
            while not stop.is_set():
                purge_journal(tmp_path, _sevenths, None)

        senders = [threading.Thread(target=send, args=(1000 * k + 1,)) for k in range(4)]
        purging = threading.Thread(target=purge_some)
        for thread in (*senders, purging):
            thread.start()
        for thread in senders:
            thread.join()
        stop.set()
        purging.join()
        purge_journal(tmp_path, _sevenths, None)
    assert len(acknowledged) == 240
    assert sorted(traces(tmp_path)) == sorted(number for number in acknowledged if number % 7)
    assert JournalReader(tmp_path).counters["corrupt_gaps"] == 0


def _sevenths(found: pa.Array) -> pa.Array:
    return pa.array([trace for trace in found.to_pylist() if int(trace, 16) % 7 == 0], pa.string())
