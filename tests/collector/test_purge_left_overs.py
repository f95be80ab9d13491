"""A purge takes along what ended processes left half written, what was moved aside, and what nobody can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ended import Killed, ending
from span_tables import at, span_table
from writing import Bench, bench, engine_span

from phasewise.collector.balanced import note_pending, pending
from phasewise.collector.journal import JournalReader
from phasewise.collector.journal_writer import JournalWriter
from phasewise.collector.late_times import LATE
from phasewise.collector.purge_files import purge_journal
from phasewise.dashboard.housekeeping import purged
from phasewise.rules.errors import MachineError

CANARY = "canary-7f3a9c"


def named(instance: str, number: int) -> dict[str, Any]:
    resource = {"service.instance.id": instance, "service.name": "engine"}
    return engine_span(start_s=number, resource=resource, trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Bench]:
    """A request of an instance that stays and one of an instance that goes; their segment of the journal is closed."""
    folder = tmp_path / "data"
    folder.mkdir()
    with bench(folder) as b:
        b.receive([named("kept", 0), named(CANARY, 1)])
        b.run(1.5)
        b.journal._begin_segment()
        b.receive([named("kept", 2)])
        b.run(1.5)
        yield b


def purge(b: Bench) -> dict[str, object]:
    return purged(b.store, b.writer, b.folder, [f"instance:eq:{CANARY}"], "", b.clock.now)


def with_canary(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def test_span_files_that_were_never_finished_go(both: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        ending(patched, "phasewise.collector.archive.put_file", 0)
        with pytest.raises(Killed):
            both.run(10)
    (left,) = (both.folder / "spans").glob("date=*/hour=*/*.tmp")
    assert left.name.startswith(".segment-")
    both.reopen()
    purge(both)
    assert not left.exists()
    both.run(10)
    (archived,) = (both.folder / "spans").glob("date=*/hour=*/*.parquet")
    assert [row["trace_id"] for row in pq.read_table(archived, partitioning=None).to_pylist()] == [f"{1:032x}"]


LEFT = (
    "cold/expired/date=2026-11-01.damaged",
    "cold/expired/date=2026-11-01.partial",
    "cold/.rewritten-phasewise.duckdb",
    "cold/.rewritten-phasewise.duckdb.wal",
    "cold/.snapshot-1/cold/expired/date=2026-11-01.parquet",
    "cold/requests/date=2026-11-01/hour=01/part-1.parquet#1",
    "journal/00000001.purged",
    "spans/date=2026-11-01/hour=01/.segment-00000001.parquet.purged",
    "spans/date=2026-11-01/hour=01/.segment-00000001.77.tmp",
    "spans/date=2026-11-01/hour=01/segment-00000001.parquet.crc32c",
    "quarantine/1/phasewise.duckdb",
    "temporary/other/1.tmp",
    "phasewise.duckdb.bak-1",
    "phasewise.duckdb.bak-1.partial",
)


def test_nothing_that_a_process_leaves_outlives_a_purge(both: Bench) -> None:
    for name in LEFT:
        path = both.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CANARY)
    purge(both)
    both.store.checkpoint()
    assert with_canary(both.folder) == []
    assert [name for name in LEFT if (both.folder / name).exists()] == []
    assert len(both.rows()) == 2


def test_a_span_file_that_cannot_be_read_goes_whole_and_is_told(both: Bench) -> None:
    both.run(10)
    (archived,) = (both.folder / "spans").glob("date=*/hour=*/*.parquet")
    archived.write_bytes(archived.read_bytes()[:-40])
    done = purge(both)
    assert done["files"] == [str(archived.relative_to(both.folder))]
    assert list(archived.parent.iterdir()) == []
    assert purge(both)["files"] == []


@pytest.mark.parametrize(
    ("how", "column"),
    [
        ("lost", "trace_id"),
        pytest.param("lost", "end_unix_ns", marks=pytest.mark.slow),
        pytest.param("of another type", "trace_id", marks=pytest.mark.slow),
        ("of another type", "end_unix_ns"),
    ],
)
def test_a_span_file_that_tells_no_more_whose_it_is_goes_whole(both: Bench, column: str, how: str) -> None:
    """As one may be whose footer is damaged."""
    both.run(10)
    (archived,) = (both.folder / "spans").glob("date=*/hour=*/*.parquet")
    rows = pq.read_table(archived, partitioning=None).drop_columns([column])
    if how == "of another type":
        rows = rows.append_column(column, pa.array([["x"]] * rows.num_rows))
    pq.write_table(rows, archived)
    assert purge(both)["files"] == [str(archived.relative_to(both.folder))]
    assert purge(both)["files"] == []


def test_a_disk_that_does_not_give_a_span_file_loses_none(both: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    both.run(10)
    (archived,) = (both.folder / "spans").glob("date=*/hour=*/*.parquet")

    def broken(*_: object, **__: object) -> pa.Table:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("phasewise.collector.purge_files.pq.read_table", broken)
        with pytest.raises(MachineError, match="Input/output error"):
            purge(both)
    assert archived.exists()
    purge(both)
    assert pq.read_table(archived, partitioning=None).num_rows == 1


def test_what_is_noted_of_an_instance_goes_with_it(both: Bench) -> None:
    both.run(200)
    memory = both.writer._memory
    for name in (CANARY, "kept"):
        memory.refresher.touch(name, at(0), at(2))
    with both.store.write() as transaction:
        memory.refresher.store(transaction)
        note_pending(transaction, [CANARY, "host:8000"])
    assert CANARY in str(both.rows(f"SELECT * FROM positions WHERE name = '{LATE}'"))
    purge(both)
    both.store.checkpoint()
    assert with_canary(both.folder) == []
    assert list(both.rows(f"SELECT * FROM positions WHERE name = '{LATE}'")[0]["position"]).count(":") == 1
    with both.store.write() as transaction:
        assert pending(transaction) == ["host:8000"]


def none(_: pa.Array) -> pa.Array:
    return pa.array([], pa.string())


@pytest.mark.parametrize("closed", [True, False])
def test_damaged_bytes_of_the_journal_go_and_the_entries_around_them_stay(tmp_path: Path, closed: bool) -> None:
    with JournalWriter(tmp_path) as journal:
        for number in (1, 2):
            journal.append("spans", span_table([named("kept", number)]))
            journal.sync()
        (segment,) = tmp_path.glob("*.seg")
        whole = segment.read_bytes()
        first = JournalReader(tmp_path).read(None)[0].position.offset
        segment.write_bytes(whole[:first] + CANARY.encode() + whole[first:] + f"{CANARY} torn".encode())
        if closed:
            journal._begin_segment()
        assert purge_journal(tmp_path, none, None) == 0
        assert CANARY.encode() not in segment.read_bytes()
        reader = JournalReader(tmp_path)
        assert len(reader.read(None)) == 2
        assert (reader.counters["corrupt_gaps"], reader.counters["corrupt_bytes"]) == (1, len(CANARY))
        place = segment.stat().st_ino
        assert purge_journal(tmp_path, none, None) == 0
        assert segment.stat().st_ino == place, "there is nothing more to take out"
        journal.append("spans", span_table([named("kept", 3)]))
        journal.sync()
        assert len(JournalReader(tmp_path).read(None)) == 3
