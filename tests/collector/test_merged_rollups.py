"""Minutes and hours are summed up from finer rollups, and say what a count of the rows themselves would say."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl

from phasewise.collector import rollups
from phasewise.collector.attribution import typed
from phasewise.collector.rollups import HOUR_NS, MINUTE_NS
from phasewise.collector.store import Store, Transaction
from phasewise.collector.tables import ROLLUP_HISTOGRAMS

HOUR = 1_796_000_000 * 10**9 // HOUR_NS * HOUR_NS
_TEXTS = ", ".join(f"CAST({name}_histogram AS VARCHAR) AS {name}_histogram" for name in ROLLUP_HISTOGRAMS)


def rows(count: int) -> pl.DataFrame:
    """Requests of two hours: some without instance, cause, lengths or times, some of no length at all."""
    source = random.Random(4)

    def maybe(value: object) -> object:
        return None if source.random() < 0.2 else value

    made = [
        {
            "request_key": f"{number:032x}",
            "finished_unix_ns": HOUR + source.randrange(2 * HOUR_NS),
            "instance": maybe(source.choice("ab")),
            "cause": maybe(source.choice(["queue.slots", "decode.weights"])),
            "outcome": "ok",
            "input_tokens": maybe(source.randrange(20)),
            "output_tokens": maybe(source.randrange(20)),
            "e2e_s": maybe(source.expovariate(1)),
            "queue_s": maybe(0.0),
            "tpot_s": maybe(source.expovariate(50)),
            "cause_queue_slots_s": maybe(source.expovariate(9)),
        }
        for number in range(count)
    ]
    return typed(pl.DataFrame(made, infer_schema_length=None))


def told(transaction: Transaction, width_s: int) -> pl.DataFrame:
    return transaction.query(f"SELECT * REPLACE ({_TEXTS}) FROM rollups WHERE width_s = {width_s} ORDER BY ALL")


def test_merged_rollups_are_those_of_the_rows(tmp_path: Path) -> None:
    found = rows(3000)
    hours = [HOUR, HOUR + HOUR_NS]
    minutes = [HOUR + minute * MINUTE_NS for minute in range(120)]
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        transaction.insert("requests", found)
        rollups.rebuild(transaction, minutes, hours)
        for width_s, span_ns, starts in ((60, MINUTE_NS, minutes), (3600, HOUR_NS, hours)):
            merged = told(transaction, width_s)
            assert merged["requests"].sum() == found.height
            transaction.execute(f"DELETE FROM rollups WHERE width_s = {width_s}")
            dirty = pl.DataFrame({"start_unix_ns": starts})
            transaction.run(rollups._insert(width_s, span_ns, "main"), [starts[0], starts[-1] + span_ns], dirty=dirty)
            assert merged.equals(told(transaction, width_s))


def test_an_hour_is_made_of_all_its_minutes_not_only_those_made_anew(tmp_path: Path) -> None:
    found = rows(400)
    minutes = [HOUR + minute * MINUTE_NS for minute in range(120)]
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        transaction.insert("requests", found)
        rollups.rebuild(transaction, minutes, [HOUR, HOUR + HOUR_NS])
        before = told(transaction, 3600)
        rollups.rebuild(transaction, minutes[:1], [HOUR])
        assert told(transaction, 3600).equals(before)
