"""A damaged or shortened store: noticed, moved aside, made anew from the journal and the cold tier, with its loss told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from span_tables import span_table
from writing import Bench, engine_span, rulebook

from phasewise.collector.import_marks import Mark
from phasewise.collector.importers import Imported
from phasewise.collector.integrity import check
from phasewise.collector.recovery import open_store
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.sidecar import SLOT_BYTES, Committed, Sidecar
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.collector.writer import Writer
from phasewise.rules.errors import MachineError

SLOW = pytest.mark.slow
ROWS = "SELECT * EXCLUDE (received_unix_ns, revision) FROM requests ORDER BY request_key"


def spans(first: int, count: int) -> list[dict[str, Any]]:
    return [
        engine_span(start_s=i * 60.0, trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}")
        for i in range(first, first + count)
    ]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, pl.DataFrame]:
    """Two hours of requests, the first sealed, as kill -9 left them: a log that no checkpoint took in."""
    monkeypatch.setattr("phasewise.collector.sidecar.EVERY_S", 0.0)  # the witness is up to a second late otherwise
    b = Bench(tmp_path)
    b.receive(spans(0, 30))
    b.run(1.5)
    b.clock.forward(4 * 3600)
    b.run()
    assert sum(Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now)) == 1
    b.store.checkpoint()
    b.receive([span | {"start_s": span["start_s"] + 14_400, "end_s": span["end_s"] + 14_400} for span in spans(30, 20)])
    b.run(1.5)
    rows = b.store.query(ROWS)
    assert rows.height == 50
    copy = tmp_path.with_name(tmp_path.name + "-killed")
    shutil.copytree(tmp_path, copy)
    b.store.close()
    b.journal.close()
    b.folder = copy
    return b, rows


def reopened(b: Bench, expect: str) -> tuple[Store, Writer]:
    store, damage = open_store(b.folder, b.clock)
    assert expect in damage
    writer = Writer(store, b.folder, rulebook(), b.attribute, clock=b.clock)
    writer.report_loss(damage)
    for _ in range(8):
        b.clock.forward(20)
        writer.step()
    return store, writer


def wal(b: Bench) -> Path:
    return b.folder / "phasewise.duckdb.wal"


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 20)


def gone(path: Path) -> None:
    path.unlink()


def flipped(at: float) -> Any:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 0x10
        path.write_bytes(bytes(data))

    return flip


@pytest.mark.parametrize(
    "damage",
    [half, *(pytest.param(d, marks=SLOW) for d in (empty, noise, gone, flipped(0.5), flipped(0.01), flipped(0.999)))],
)
def test_no_damage_of_the_log_starts_silently_and_no_span_is_lost(
    stopped: tuple[Bench, pl.DataFrame], damage: Any
) -> None:
    b, before = stopped
    assert wal(b).stat().st_size > 1000
    damage(wal(b))
    store, writer = reopened(b, "")
    with store:
        assert (
            store.query(ROWS)
            .select("request_key", "e2e_s", "queue_s")
            .equals(before.select("request_key", "e2e_s", "queue_s"))
        )
        losses = writer.health()["losses"]
        assert isinstance(losses, list)
        assert any("lacks its commits" in text for text in losses), losses
        assert store.query("SELECT count(*) AS n FROM annotations WHERE kind = 'loss'")["n"].item() >= 1


@pytest.mark.parametrize("damage", ["block", *(pytest.param(d, marks=SLOW) for d in (noise, half, flipped(0.001)))])
def test_a_broken_file_is_moved_aside_and_made_anew(stopped: tuple[Bench, pl.DataFrame], damage: Any) -> None:
    b, before = stopped
    path = b.folder / "phasewise.duckdb"
    if damage == "block":  # zeros in the midst of the rows: it opens, and its rows cannot be read
        with Store(path) as store:
            store.checkpoint()
        data = bytearray(path.read_bytes())
        start = data.find(b"00000000000000000000000000000021")
        data[start : start + 64] = bytes(64)
        path.write_bytes(bytes(data))
    else:
        damage(path)
    damaged = path.read_bytes()
    assert not check(b.folder)["ok"]
    with pytest.raises(DamagedStore, match="db restore"):
        open_store(b.folder, b.clock, "fail")
    assert path.read_bytes() == damaged and not (b.folder / "quarantine").exists()
    store, _ = reopened(b, "a new one holds 1 sealed hours (30 rows)")
    with store:
        (aside,) = (b.folder / "quarantine").iterdir()
        assert (aside / "phasewise.duckdb").read_bytes() == damaged
        assert store.query(ROWS).select("request_key", "e2e_s").equals(before.select("request_key", "e2e_s"))
        hours = store.query("SELECT sum(requests) AS n FROM rollups WHERE width_s = 3600")
        assert hours["n"].item() >= 30
        assert due_hours(store, b.clock.now + 3 * 3600 * 10**9)


@pytest.mark.slow
def test_a_store_that_lacks_commits_is_not_opened_where_that_is_to_fail(stopped: tuple[Bench, pl.DataFrame]) -> None:
    b, _ = stopped
    log = b.folder / "phasewise.duckdb.wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size // 2)
    with pytest.raises(DamagedStore, match=r"lacks its commits .*--on-corruption=quarantine"):
        open_store(b.folder, b.clock, "fail")
    assert (b.folder / "phasewise.duckdb").exists()
    store, _ = open_store(b.folder, b.clock)
    store.close()


def test_a_damaged_segment_is_named_with_its_bytes(tmp_path: Path) -> None:
    b = Bench(tmp_path)
    for number in range(3):
        b.receive(spans(number, 1))
    b.store.close()
    b.journal.close()
    segment = tmp_path / "journal" / "00000001.seg"
    data = bytearray(segment.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20] = bytes(20)
    segment.write_bytes(data)
    b.open()
    b.run(1.5)
    assert b.store.query("SELECT count(*) AS n FROM requests")["n"].item() == 2
    health = b.writer.health()
    losses = health["losses"]
    assert isinstance(losses, list)
    (said,) = losses
    assert str(segment) in said
    assert "are damaged" in said
    (mark,) = b.rows("SELECT * FROM annotations WHERE kind = 'loss'")
    assert mark["text"] == said
    b.store.close()


def test_a_volume_without_room_is_an_error_of_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Bench(tmp_path)
    assert b.writer.health()["write_error"] == ""
    monkeypatch.setattr("phasewise.collector.journal_writer.FREE_RATIO", 1.0)
    monkeypatch.setattr("phasewise.collector.journal_writer.FREE_BYTES", 1 << 60)
    assert "senders are refused" in str(b.writer.health()["write_error"])
    b.store.close()
    b.journal.close()


@pytest.mark.slow
def test_with_a_store_made_anew_nothing_counts_as_brought_in(stopped: tuple[Bench, pl.DataFrame]) -> None:
    b, _ = stopped
    (b.folder / "backfill.json").write_text("{}")
    (b.folder / "phasewise.duckdb").write_bytes(b"x" * 9000)
    store, damage = open_store(b.folder, b.clock)
    store.close()
    assert "hourly rollups of 0 expired ones" in damage
    assert not (b.folder / "backfill.json").exists()


def test_a_store_that_is_only_busy_is_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "phasewise.duckdb"
    Store(path).close()
    path.chmod(0o600)
    (tmp_path / "phasewise.duckdb").write_bytes(path.read_bytes())
    store, damage = open_store(tmp_path, lambda: 0)
    store.close()
    assert damage == ""


def test_the_witness_never_knows_of_more_than_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import is one transaction of several works: none of them is committed before all."""
    b = Bench(tmp_path)
    seen: list[tuple[int, int]] = []

    def note(sidecar: Sidecar, state: Committed, at_once: bool = False) -> None:
        found = b.store.query("SELECT position FROM positions WHERE name = 'commit'")
        seen.append((state.number, Committed.parse(found["position"].item() if found.height else "").number))

    monkeypatch.setattr(Sidecar, "note", note)
    imported = Imported("spans", "otlp-json", spans=span_table(spans(0, 3)))
    b.writer.add_import(imported, Mark("0" * 32, "done"))
    assert seen
    assert all(witness <= committed for witness, committed in seen), seen
    b.store.close()
    b.journal.close()


def test_the_witness_survives_a_torn_slot(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "watermark")
    for number in (1, 2, 3):
        sidecar.note(Committed(number, number * 10**9, 0, "1:5"), at_once=True)
    assert Sidecar(tmp_path / "watermark").last.number == 3
    data = bytearray((tmp_path / "watermark").read_bytes())
    data[SLOT_BYTES + 20] ^= 1  # slot of turn 3
    (tmp_path / "watermark").write_bytes(bytes(data))
    assert Sidecar(tmp_path / "watermark").last.number == 2


def test_an_older_store_is_migrated_in_one_go_and_its_copy_stays_until_a_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store, store.write() as transaction:
        transaction.execute("DROP TABLE main.cold_files")
        transaction.execute("ALTER TABLE requests DROP COLUMN tenant")
        transaction.execute("DELETE FROM schema_version")
        transaction.execute("INSERT INTO schema_version VALUES (1, 0)")
    before = path.read_bytes()

    def broken(*_: object) -> None:
        raise RuntimeError("killed in the midst")

    with monkeypatch.context() as patched:
        patched.setattr("phasewise.collector.store.make_views", broken)
        with pytest.raises(RuntimeError):
            Store(path)
    assert (tmp_path / "phasewise.duckdb.bak-1").read_bytes() == before
    store = Store(path)
    assert store.query("SELECT max(version) AS v FROM schema_version")["v"].item() == SCHEMA_VERSION
    assert store.query("SELECT tenant FROM requests").columns == ["tenant"]
    assert (tmp_path / "phasewise.duckdb.bak-1").read_bytes() == before
    store.close()
    assert not (tmp_path / "phasewise.duckdb.bak-1").exists()


def test_a_migration_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "phasewise.duckdb"
    with Store(path) as store, store.write() as transaction:
        transaction.execute("DELETE FROM schema_version")
        transaction.execute("INSERT INTO schema_version VALUES (1, 0)")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("phasewise.collector.migration.shutil.disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(MachineError, match="make room"):
        Store(path)
