"""Which rollups do not say what the rows say is known after a crash too, and a busy writer waits until a minute is quiet."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from writing import NOW, SECOND, Bench, bench, engine_span

from phasewise.collector.rollups import HOUR_NS, LIVE_ROWS, MINUTE_NS, QUIET_NS, DirtyRollups
from phasewise.collector.store import Store

AT = NOW // HOUR_NS * HOUR_NS
FAR = 2**62
ROWS = pl.DataFrame({"finished_unix_ns": [AT + SECOND, AT + 2 * MINUTE_NS]})


def counted(b: Bench) -> dict[int, int]:
    return {row["width_s"]: row["n"] for row in b.rows("SELECT width_s, sum(requests) AS n FROM rollups GROUP BY 1")}


def test_minutes_written_before_a_crash_are_rebuilt_after_it(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.writer.step()  # busy: it leaves the rollups for later
        assert len(b.rows()) == 1
        assert counted(b) == {}
        b.reopen()
        b.run()
        assert counted(b) == {10: 1, 60: 1, 3600: 1}
        assert b.rows("SELECT * FROM positions WHERE name = 'dirty_rollups'") == []


def test_a_busy_writer_rebuilds_what_is_quiet(tmp_path: Path) -> None:
    dirty = DirtyRollups()
    dirty.add(ROWS.head(1), NOW)
    dirty.add(ROWS.tail(1), NOW + SECOND)
    assert not dirty.is_due(NOW + QUIET_NS - 1, False, FAR)
    assert dirty.is_due(NOW + SECOND, True, 0)
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        dirty.rebuild(transaction, NOW + QUIET_NS, False, FAR)
        dirty.store(transaction)
        told = transaction.query("SELECT position FROM positions WHERE name = 'dirty_rollups'")["position"].item()
        assert told == f'{{"minutes": [{AT + 2 * MINUTE_NS}], "hours": [{AT}]}}'
        assert DirtyRollups(told).is_due(NOW, False, 0)  # how long ago they were written is not known any more
        dirty.rebuild_all(transaction)
        dirty.store(transaction)
        assert transaction.query("SELECT * FROM positions").is_empty()


def test_an_idle_writer_leaves_a_busy_minute_until_its_rows_are_final(tmp_path: Path) -> None:
    busy = pl.DataFrame({"finished_unix_ns": [AT + SECOND] * (LIVE_ROWS + 1)})
    dirty = DirtyRollups()
    dirty.add(busy, NOW)
    assert not dirty.is_due(NOW + SECOND, True, AT + MINUTE_NS - 1)
    dirty.add(ROWS.tail(1), NOW)  # another minute of that hour, with one row
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        dirty.rebuild(transaction, NOW, True, AT)
        dirty.store(transaction)
        told = transaction.query("SELECT position FROM positions WHERE name = 'dirty_rollups'")["position"].item()
        assert told == f'{{"minutes": [{AT}], "hours": [{AT}]}}'  # an hour waits for the last of its minutes
        later = NOW + 10 * SECOND
        assert not dirty.is_due(later, False, AT + MINUTE_NS)
        assert dirty.is_due(later, True, AT + MINUTE_NS)
        dirty.rebuild(transaction, later, True, AT + MINUTE_NS)
        dirty.store(transaction)
        assert transaction.query("SELECT * FROM positions").is_empty()
