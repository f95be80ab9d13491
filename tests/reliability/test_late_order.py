"""F12 at its full size: spans in any order, up to two days late, children before parents, for hours that are sealed already. What they
end in is what the same spans end in that came in order and in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from call_trees import body, tree
from numpy.typing import NDArray
from writing import NOW, SECOND, Bench, Instant, bench, give_time, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.scan import scan_traces
from phasewise.collector.sealing import Sealer, due_hours

ASKED_S = 3 * 3600.0  # over which the calls are made
LATEST_S = 48 * 3600.0
IN_TIME = (
    0.5  # of the spans; the others are late by anything between a second and two days, as often by hours as by seconds
)
TURN_SPANS = 2000  # that come together, at most
QUIET_S = 130.0  # after which nothing is waited for of an engine


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks a pass makes final does not depend on the machine."""
    give_time(monkeypatch, Instant())


def spans_of(calls: int) -> pa.Table:
    """All spans of so many calls, a client's and an engine's each."""
    every_ns = round(ASKED_S * 1e9) // calls
    parts = []
    for first in range(0, calls, 500):
        numbers = range(first, min(calls, first + 500))
        spans = [span for number in numbers for span in tree(number, NOW + number * every_ns)]
        parts.append(scan_traces(body(spans), NOW).rows)
    return pa.concat_tables(parts)


def delays_s(spans: int, seed: int) -> NDArray[np.float64]:
    draw = np.random.default_rng(seed)
    late = np.exp(draw.uniform(0.0, np.log(LATEST_S), spans))
    return np.where(draw.random(spans) < IN_TIME, 0.0, late)


def run(b: Bench, spans: pa.Table, late_s: NDArray[np.float64], turn_s: float, *, sealing: bool) -> None:
    """Each span comes its delay after it ended, those of one turn together: late ones cost the store whole hours anew."""
    comes = spans.column("end_unix_ns").to_numpy() + np.round(late_s * SECOND).astype(np.int64)
    order = np.argsort(comes, kind="stable")
    first = 0
    while first < len(order):
        last = min(first + TURN_SPANS, int(np.searchsorted(comes[order], comes[order[first]] + turn_s * SECOND)))
        chosen = order[first:last]
        b.clock.now = max(b.clock.now, int(comes[chosen[-1]]))
        received = pa.array(comes[chosen], pa.int64())
        at = spans.schema.get_field_index("received_unix_ns")
        b.journal.append("spans", spans.take(pa.array(chosen)).set_column(at, spans.schema.field(at), received))
        b.journal.sync()
        b.run(1.5)
        if last < len(order) and comes[order[last]] - b.clock.now > QUIET_S * SECOND:
            b.run(QUIET_S)
        if sealing:
            for due in due_hours(b.store, b.clock.now):
                Sealer(b.store, b.clock).seal(due)
        first = last
    for _ in range(8):
        b.run(3600.0)
    assert b.rows("SELECT count(*) AS n FROM requests WHERE NOT final") == [{"n": 0}]


def story(b: Bench) -> dict[str, pl.DataFrame]:
    """What must not depend on when something came: all rows, hot and cold, and all that is counted of them."""
    health: Any = b.writer.health()
    counters = {name: n for name, n in health["counters"].items() if name in ("spans", "duplicate_spans", "requests")}
    return {
        "requests": b.store.query("SELECT * EXCLUDE (received_unix_ns, revision) FROM requests ORDER BY request_key"),
        "turns": b.store.query("SELECT * FROM turns ORDER BY turn_key"),
        "rollups": b.store.query("SELECT * FROM rollups ORDER BY ALL"),
        "counters": pl.DataFrame(counters),
    }


def ends_the_same(folder: Path, calls: int, turn_s: float, seed: int = 12) -> None:
    spans = spans_of(calls)
    told = {}
    for name in ("sorted", "shuffled"):
        began = time.process_time()
        late_s = delays_s(spans.num_rows, seed) * (name == "shuffled")
        with bench(folder / name, attribute=attributor(rulebook())) as b:
            run(b, spans, late_s, turn_s, sealing=name == "shuffled")
            told[name] = story(b)
            sealed = b.rows("SELECT count(*) AS n FROM main.sealed_hours")[0]["n"]
        print(f"{name}: {spans.num_rows:,} spans, {sealed} hours sealed, {time.process_time() - began:.0f} CPU-seconds")
        assert (sealed > 0) == (name == "shuffled")
    assert told["sorted"]["requests"].height == calls
    for name, frame in told["sorted"].items():
        assert frame.equals(told["shuffled"][name]), f"{name} (seed {seed})"


@pytest.mark.slow
def test_two_thousand_spans_up_to_two_days_late_end_as_those_in_order(tmp_path: Path) -> None:
    ends_the_same(tmp_path, 1_000, turn_s=7200.0)


@pytest.mark.nightly
def test_a_hundred_thousand_spans_up_to_two_days_late_end_as_those_in_order(tmp_path: Path) -> None:
    ends_the_same(tmp_path, 50_000, turn_s=3600.0)
