"""How many steps attribution is given: a busy engine makes a hundred a second, and rows are attributed every second."""

from __future__ import annotations

from pathlib import Path

from builders import SECOND_NS, START_UNIX_NS, record_table

from phasewise.collector.records import EngineStep
from phasewise.collector.scope import LEAST_NS, steps_from
from phasewise.collector.store import Store


def at(seconds: float) -> int:
    return START_UNIX_NS + round(seconds * SECOND_NS)


def test_of_many_steps_the_newest_and_those_of_the_targets_are_taken(tmp_path: Path) -> None:
    steps = [
        EngineStep(instance="e", step=k, start_unix_ns=at(k), duration_s=0.5, prefill_tokens=0, decode_sequences=1)
        for k in range(1000)
    ]
    low, high = at(-3600), at(2000)
    with Store(tmp_path / "p.duckdb", threads=1) as store, store.write() as transaction:
        transaction.insert("engine_steps", record_table(EngineStep, steps))
        assert steps_from(transaction, ["e"], low, high, at(990), 1000) == low
        assert steps_from(transaction, ["e"], low, high, at(990), 100) == at(999 - 99.9)
        assert steps_from(transaction, ["e"], low, high, at(500), 100) == at(500) - LEAST_NS
        assert steps_from(transaction, ["e"], low, high, at(-4000), 100) == low
        assert steps_from(transaction, ["other"], low, high, at(990), 100) == low
        assert steps_from(transaction, [], low, high, at(990), 100) == low
