"""Minutes and hours are summed up from finer rollups, and say what a count of the rows themselves would say."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest

from phasewise.collector import rollups
from phasewise.collector.attribution import typed
from phasewise.collector.rollups import HOUR_NS, MINUTE_NS
from phasewise.collector.store import Store
from phasewise.collector.tables import GAMMA, ROLLUP_HISTOGRAMS, ROLLUP_SUMS
from phasewise.collector.transaction import Transaction
from phasewise.rules.vocabulary import CAUSE_COLUMNS

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


def counted(width_s: int) -> str:
    """The rollups of one width, each from the rows themselves."""
    width_ns = width_s * 10**9
    names = [*ROLLUP_SUMS, *(column.removesuffix("_s") for column in CAUSE_COLUMNS)]
    sums = [f"sum(CAST(round({name}_s * 1e9) AS BIGINT)) AS {name}_ns" for name in names]
    histograms = [
        f"histogram(CASE WHEN {name}_s > 0 THEN CAST(floor(ln({name}_s) / ln({GAMMA})) AS INTEGER) ELSE -2000000000 END) "
        f"FILTER (WHERE {name}_s IS NOT NULL) AS {name}_histogram"
        for name in ROLLUP_HISTOGRAMS
    ]
    return f"""
INSERT INTO rollups BY NAME
SELECT {width_s} AS width_s, finished_unix_ns // {width_ns} * {width_ns} AS bucket_unix_ns,
  CAST(floor(log2(nullif(input_tokens, 0))) AS BIGINT) AS input_log2,
  CAST(floor(log2(nullif(output_tokens, 0))) AS BIGINT) AS output_log2, model, instance, cause, outcome,
  count(*) AS requests, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
  sum(preemptions) AS preemptions, {", ".join([*sums, *histograms])}
FROM requests GROUP BY ALL
"""


def told(transaction: Transaction, width_s: int) -> pl.DataFrame:
    return transaction.query(f"SELECT * REPLACE ({_TEXTS}) FROM rollups WHERE width_s = {width_s} ORDER BY ALL")


@pytest.mark.parametrize("part_rows", [pytest.param(100, marks=pytest.mark.slow), 10**6])
def test_merged_rollups_are_those_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_rows: int) -> None:
    """However many minutes are looked at together, and 10 s by 10 s where a minute alone holds many rows."""
    monkeypatch.setattr(rollups, "_PART_ROWS", part_rows)
    found = pl.concat([rows(3000), rows(200).with_columns(pl.lit(HOUR + 1).alias("finished_unix_ns"))])
    hours = [HOUR, HOUR + HOUR_NS]
    minutes = [HOUR + minute * MINUTE_NS for minute in range(120)]
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        transaction.insert("requests", found)
        rollups.rebuild(transaction, minutes, hours)
        for width_s in (10, 60, 3600):
            merged = told(transaction, width_s)
            assert merged["requests"].sum() == found.height
            transaction.execute(f"DELETE FROM rollups WHERE width_s = {width_s}")
            transaction.execute(counted(width_s))
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
