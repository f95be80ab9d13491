"""The sums of a verdict, over rows that were read and by the database: the same whatever a sender sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl
import pytest
from large_windows import rows

from phasewise.analyzer.filters import Condition
from phasewise.analyzer.stored_sums import stored_sums
from phasewise.analyzer.sums import PHASES, RowSums, Sums
from phasewise.collector.records import Request
from phasewise.collector.schemas import polars_schema
from phasewise.collector.store import Store
from phasewise.rules.vocabulary import CAUSES, cause_column

ALL = Condition("TRUE", ())
NAMES = (
    "count unattributed provisional clamped dropped unknown_waits with_phases by_class told e2e_s measured_s phases_s seconds stepped"
    " stepped_s first_s coarse_s unexplained_wait_s preemptions cached_tokens prompts_with_cache_tokens"
).split()
SECONDS = [
    *(f"{name}_s" for name in PHASES),
    *map(cause_column, CAUSES),
    *("e2e_s", "ttft_s", "measured_s", "entry_e2e_s", "entry_ttft_s", "entry_before_s"),
]
ODD = [None, math.nan, math.inf, -math.inf]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "p.duckdb") as opened:
        yield opened


def both(store: Store, made: Sequence[Mapping[str, object]]) -> tuple[Sums, Sums]:
    with store.write() as transaction:
        transaction.execute("DELETE FROM requests")
        transaction.insert("requests", pl.DataFrame(made, schema=polars_schema(Request), orient="row"))
    return RowSums(store.query("SELECT * FROM requests")), stored_sums(store, ALL, ALL)[0]


def told(sums: Sums) -> dict[str, object]:
    """Every figure, those of a mapping under its name and theirs; what is unknown says so, since None has no distance."""
    found = {name: getattr(sums, name) for name in NAMES} | {
        metric: sums.outside_s(metric) for metric in ("e2e", "ttft")
    }
    flat: dict[str, object] = {}
    for name, value in found.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{name} {part}": "unknown" if one is None else one for part, one in parts}
    return flat


def assert_alike(read: Sums, stored: Sums) -> None:
    mine, theirs = told(read), told(stored)
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-6)
        assert theirs[name] == expected, name


def test_requests_as_they_come(store: Store) -> None:
    assert_alike(*both(store, rows(400)))


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_is_no_number_of_seconds_is_left_out_by_both(store: Store, odd: float | None, everywhere: bool) -> None:
    made = [
        row | {name: odd for place, name in enumerate(SECONDS) if everywhere or (number + place) % 7 == 0}
        for number, row in enumerate(rows(400))
    ]
    read, stored = both(store, made)
    assert_alike(read, stored)
    assert math.isfinite(read.e2e_s) and math.isfinite(read.unexplained_wait_s)
    assert (read.phases_s["queue"] is None) == everywhere
    assert (read.e2e_s > 0) != everywhere


def test_a_cause_that_is_no_number_explains_no_wait_and_takes_none_away(store: Store) -> None:
    (row, *_) = rows(1)
    waited = {"queue_s": 2.0, cause_column("unexplained"): 2.0, cause_column("queue.budget"): 1.5}
    read, stored = both(store, [row | waited | {cause_column("queue.slots"): math.nan}])
    assert (read.unexplained_wait_s, stored.unexplained_wait_s) == (0.5, 0.5)


def test_seconds_of_rows_without_steps_are_exact_beside_many_of_others(store: Store) -> None:
    """Near 20 million seconds two floats are 4 ns apart."""
    (row, *_) = rows(1)
    column = cause_column("host")
    stepped = row | {column: 2e7, "first_causes": json.dumps({"host": 0.5})}
    read, stored = both(store, [stepped, row | {column: 3e-9, "first_causes": None}])
    assert (read.coarse_s["host"], stored.coarse_s["host"]) == (3e-9, 3e-9)
