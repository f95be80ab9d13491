"""Backup, restore, check and purge of a folder with hot and sealed hours, archived and journaled spans."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import record_table
from ended import Killed, ending
from waiting import until
from writing import Bench, bench, engine_span, rulebook

from phasewise.collector.backup import restore, take_snapshot, write_backup
from phasewise.collector.import_marks import DONE, Mark, write_mark
from phasewise.collector.integrity import check
from phasewise.collector.patience import Patience
from phasewise.collector.records import Place
from phasewise.collector.recovery import FILE
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.housekeeping import purged
from phasewise.rules.errors import InputError

ROWS = "SELECT * FROM requests ORDER BY request_key"
CANARY = "canary-7f3a9c"


def spans(first: int, count: int, later_s: float = 0.0, attributes: Any = None) -> list[dict[str, Any]]:
    return [
        engine_span(
            start_s=later_s + i * 30.0, trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}", attributes=attributes or {}
        )
        for i in range(first, first + count)
    ]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Bench]:
    """Sealed requests, hot ones, some with a canary in the model's name and in an attribute that is kept as it came."""
    folder = tmp_path / "data"
    folder.mkdir()
    with bench(folder) as b:
        told = {"gen_ai.request.model": CANARY, "note": f"x-{CANARY}-x"}
        b.receive([*spans(0, 20), *spans(20, 3, attributes=told)])
        b.run(1.5)
        b.journal._begin_segment()
        b.clock.forward(4 * 3600)
        b.run()
        b.run(10)
        for due in due_hours(b.store, b.clock.now):
            assert Sealer(b.store, b.clock).seal(due)
        b.receive([*spans(40, 10, 14_400), *spans(50, 2, 14_400, told)])
        b.run(1.5)
        b.run(120)
        b.run(10)
        yield b


def backed_up(b: Bench, out: Path) -> dict[str, object]:
    snapshot = take_snapshot(b.store, b.folder)
    try:
        return write_backup(snapshot.folder, out)
    finally:
        shutil.rmtree(snapshot.folder)


def holds(folder: Path, text: str) -> list[str]:
    """Files with that text in any byte, compressed columns read as well."""
    import pyarrow.parquet as pq

    found = [str(p) for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]
    for path in folder.rglob("*.parquet"):
        if text in str(pq.read_table(path, partitioning=None).to_pylist()):
            found.append(str(path))
    from phasewise.collector.journal import JournalReader

    for entry in JournalReader(folder / "journal").read(None, limit=10_000, limit_rows=10**9):
        if text in str(entry.rows.to_pylist()):
            found.append("journal")
    return found


def test_a_backup_holds_what_was_stored_at_one_commit(full: Bench, tmp_path: Path) -> None:
    before = full.rows(ROWS)
    (full.folder / "keys.json").write_text("{}")
    told = backed_up(full, tmp_path / "backup")
    full.receive(spans(70, 5, 14_400))
    full.run(1.5)
    assert len(full.rows(ROWS)) == len(before) + 5
    done = restore(tmp_path / "backup", tmp_path / "again")
    assert (done["requests"], done["commit"]) == (len(before), told["commit"])
    assert (tmp_path / "again" / "keys.json").read_text() == "{}", "restored, it would let everybody in"
    with Store(tmp_path / "again" / FILE) as store:
        writer = Writer(store, tmp_path / "again", rulebook(), full.attribute, clock=full.clock)
        writer.step()
        assert writer.health()["losses"] == []
        assert list(store.query(ROWS).iter_rows(named=True)) == before
    assert check(tmp_path / "again")["faults"] == []


def test_a_span_acknowledged_and_not_yet_settled_is_in_the_backup(full: Bench, tmp_path: Path) -> None:
    whole = spans(90, 1, 14_400)
    part = [whole[0] | {"name": "turn", "scope": "app", "kind": 1}]
    full.receive(part)
    full.writer.step()  # read, and waiting for the rest of its trace
    assert full.writer.health()["open_spans"] == 1
    backed_up(full, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "again")
    with Store(tmp_path / "again" / FILE) as store:
        writer = Writer(store, tmp_path / "again", rulebook(), full.attribute, clock=full.clock)
        assert writer.health()["open_spans"] == 1


@pytest.mark.slow
def test_a_backup_that_is_not_whole_is_refused(full: Bench, tmp_path: Path) -> None:
    backed_up(full, tmp_path / "backup")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(InputError, match="not an empty folder"):
        restore(tmp_path / "backup", tmp_path / "used")
    victim = next((tmp_path / "backup" / "cold").rglob("*.parquet"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(InputError, match="is damaged"):
        restore(tmp_path / "backup", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "backup" / "backup.json").unlink()
    with pytest.raises(InputError, match="no whole backup"):
        restore(tmp_path / "backup", tmp_path / "new")


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x20
    path.write_bytes(bytes(data))


@pytest.mark.slow
def test_check_names_what_is_damaged_and_what_it_costs(full: Bench) -> None:
    full.store.close()
    full.journal.sync()
    told = check(full.folder)
    assert told["ok"], told
    tables = told["tables"]
    assert isinstance(tables, dict)
    assert tables["requests"] == 35
    cold = next((full.folder / "cold" / "requests").glob("date=*/hour=*/*.parquet"))
    flip(cold)
    flip(next((full.folder / "spans").glob("date=*/hour=*/*.parquet")), 0.02)
    (full.folder / "watermark").unlink()
    segment = sorted((full.folder / "journal").glob("*.seg"))[-1]
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(bytes(data) + segment.read_bytes()[: len(data)])  # a whole entry behind the damaged one
    told = check(full.folder)
    assert not told["ok"]
    text = json.dumps(told["faults"])
    assert "rows of requests of hour" in text
    assert "its raw spans are lost" in text
    assert "the entries in them are lost" in text


@pytest.mark.parametrize(
    "where", [[f"model:eq:{CANARY}"], pytest.param([f"model:prefix:{CANARY[:8]}"], marks=pytest.mark.slow)]
)
def test_no_byte_is_left_of_what_is_purged(full: Bench, where: list[str]) -> None:
    assert len(holds(full.folder, CANARY)) >= 4  # store, cold tier, spans, journal
    rest = [row for row in full.rows(ROWS) if row["model"] != CANARY]
    (full.folder / "quarantine").mkdir()
    (full.folder / "quarantine" / "old").write_text(CANARY)
    done = purged(full.store, full.writer, full.folder, where, "", full.clock.now)
    assert done["requests"] == 5
    left = full.rows(ROWS)
    assert [row["request_key"] for row in left] == [row["request_key"] for row in rest]
    full.store.checkpoint()
    assert holds(full.folder, CANARY) == []
    (line,) = (full.folder / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["requests"] == 5
    hours = full.store.query("SELECT sum(requests) AS n FROM rollups WHERE width_s = 3600")["n"].item()
    assert hours == 30
    full.receive(spans(80, 2, 14_400))
    full.run(1.5)
    assert len(full.rows(ROWS)) == 32  # it goes on
    full.clock.forward(3 * 3600)
    full.run()
    for due in due_hours(full.store, full.clock.now):
        assert Sealer(full.store, full.clock).seal(due)
    assert len(full.rows(ROWS)) == 32


@pytest.mark.slow
def test_with_an_instance_goes_what_is_known_of_its_place(full: Bench) -> None:
    (name,) = {row["instance"] for row in full.rows(ROWS)}
    places = [Place(instance=name, host=CANARY), Place(instance="another", host="h")]
    with full.store.write() as transaction:
        transaction.insert("places", record_table(Place, places))
    purged(full.store, full.writer, full.folder, [f"instance:eq:{name}"], "", full.clock.now)
    assert [row["instance"] for row in full.rows("SELECT instance FROM places")] == ["another"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["collector.lake.Lake.vacuum", "collector.purge_files._purge_file", "collector.store.Store.rewrite"]
)
def test_a_purge_that_was_broken_off_is_finished_by_the_next(full: Bench, call: str) -> None:
    def purge() -> Any:
        return purged(full.store, full.writer, full.folder, [f"model:eq:{CANARY}"], "", full.clock.now)

    with pytest.MonkeyPatch.context() as patched:
        ending(patched, f"phasewise.{call}", 0)
        with pytest.raises(Killed):
            purge()
    assert holds(full.folder, CANARY)
    stray = full.folder / "journal" / "00000099.purged"
    stray.write_text(CANARY)
    full.reopen()
    assert purge()["requests"] == 0  # its rows went with the first
    full.store.checkpoint()
    assert holds(full.folder, CANARY) == []
    assert full.store.query("SELECT * FROM positions WHERE name = 'purge'").is_empty()


@pytest.mark.slow
def test_a_purge_stops_the_questions_that_run(full: Bench) -> None:
    patience = Patience(60)
    told: list[BaseException] = []

    def ask() -> None:
        try:
            full.store.query("SELECT count(*) FROM range(10000000) a, range(10000000) b", patience=patience)
        except Exception as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: full.store._readers._running)
    assert purged(full.store, full.writer, full.folder, [f"model:eq:{CANARY}"], "", full.clock.now)["requests"] == 5
    asking.join(10)
    assert told
    assert full.store.broken == ""
    assert holds(full.folder, CANARY) == []


@pytest.mark.slow
def test_what_was_purged_may_come_again(full: Bench) -> None:
    with full.store.write() as transaction:
        write_mark(transaction, Mark("0" * 32, DONE))
    purged(full.store, full.writer, full.folder, [f"model:eq:{CANARY}"], "", full.clock.now)
    assert full.writer.import_position("0" * 32) == ""
    before = len(full.rows(ROWS))
    full.receive(spans(50, 2, 14_400, {"gen_ai.request.model": CANARY}))
    full.run(1.5)
    assert len(full.rows(ROWS)) == before + 2


@pytest.mark.slow
def test_everything_before_a_time_goes(full: Bench) -> None:
    before = str(sorted(row["finished_unix_ns"] for row in full.rows(ROWS))[22] + 1)
    done = purged(full.store, full.writer, full.folder, [], before, full.clock.now)
    assert done["requests"] == 23
    assert len(full.rows(ROWS)) == 12
    assert full.rows("SELECT count(*) AS n FROM main.sealed_hours WHERE state = 'sealed'") == [{"n": 0}]
    assert list((full.folder / "cold" / "requests").glob("date=*/hour=*/*.parquet")) == []


@pytest.mark.slow
def test_nothing_is_not_a_condition(full: Bench) -> None:
    with pytest.raises(InputError, match="says nothing to delete"):
        purged(full.store, full.writer, full.folder, [], "", full.clock.now)
    assert len(full.rows(ROWS)) == 35
