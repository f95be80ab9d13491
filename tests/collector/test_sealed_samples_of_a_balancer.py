"""An address that turns out to be a balancer after hours of it were sealed: its samples there get the names of its processes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ended import Killed, ending
from span_tables import at
from writing import Bench, bench

from phasewise.collector.balanced import pending
from phasewise.collector.cold import thaw
from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.lake import HOUR_NS, Lake
from phasewise.collector.renaming import rename_sealed
from phasewise.collector.sealing import Sealer, due_hours

HOUR_S = 3600.0
FIRST, SECOND = -50.0, -90.0  # when its two processes began
NAMES = "SELECT instance, count(*) AS n FROM engine_samples GROUP BY 1 ORDER BY 1"


def page(b: Bench, second: float, started_s: float, address: str = "lb:8000") -> Exposition:
    text = f"vllm:prompt_tokens_total {1000 + second - started_s}\nprocess_start_time_seconds {at(started_s) / 1e9}\n"
    read = read_exposition(text, at(second), b.writer._profiles, instance=address)
    assert read is not None
    return read


def seal(b: Bench) -> int:
    b.clock.forward(3 * HOUR_S)
    b.run()
    b.run(10)
    return sum(Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now))


def name(started_s: float) -> str:
    return f"lb:8000#{at(started_s) / 1e9}"


def recognised(b: Bench) -> None:
    """Two sealed hours of one process and of another address, then the second process answers as well."""
    for hour in range(2):
        b.writer.add_samples(
            [
                page(b, hour * HOUR_S + second, FIRST, one)
                for second in (0, 60, 120)
                for one in ("lb:8000", "other:8000")
            ]
        )
    assert seal(b) == 2
    later = 5 * HOUR_S
    b.writer.add_samples([page(b, later + second, SECOND if second % 20 else FIRST) for second in range(0, 60, 10)])


def renamed(b: Bench) -> list[dict[str, Any]]:
    while pending(b.store):
        rename_sealed(b.store, Lake(b.store.cold_directory), 1)
    return b.rows(NAMES)


EXPECTED = [
    {"instance": name(SECOND), "n": 3},
    {"instance": name(FIRST), "n": 9},
    {"instance": "other:8000", "n": 6},
]


def test_sealed_samples_get_the_name_of_the_process_that_answered(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        recognised(b)
        assert b.rows(NAMES)[0] == {"instance": "lb:8000", "n": 6}  # what is sealed comes later
        assert renamed(b) == EXPECTED
        assert b.rows("SELECT state FROM sealed_hours") == [{"state": "sealed"}] * 2
        (life,) = b.rows(f"SELECT first_seen_unix_ns AS first FROM instances WHERE instance = '{name(FIRST)}'")
        assert life["first"] == at(0)
        b.reopen()
        assert b.rows(NAMES) == EXPECTED
        assert b.writer.add_samples([page(b, 60, FIRST)]) == 0
        assert b.rows("SELECT state FROM sealed_hours ORDER BY hour")[0] == {"state": "thawed"}
        assert seal(b) == 3  # what came back for that sample, and the hour that is new
        assert b.rows(NAMES) == EXPECTED


def test_an_hour_that_comes_back_before_it_was_renamed_is_renamed_then(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        recognised(b)
        assert b.writer.add_samples([page(b, 60, FIRST)]) == 0
        with b.store.write() as transaction:
            thaw(transaction, b.store.cold_files, {at(0) // HOUR_NS}, b.clock.now)
        assert b.rows("SELECT count(*) AS n FROM engine_samples WHERE instance = 'lb:8000'")[0]["n"] <= 3
        assert renamed(b) == EXPECTED


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("phasewise.collector.lake.Lake.write_hour", marks=pytest.mark.slow),
        "phasewise.collector.rewriting.enter_files",
        pytest.param("phasewise.collector.rewriting.make_views", marks=pytest.mark.slow),
    ],
)
def test_ended_anywhere_each_sample_is_seen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    with bench(tmp_path) as b:
        recognised(b)
        with monkeypatch.context() as patched:
            ending(patched, point, 1)
            with pytest.raises(Killed):
                renamed(b)
        assert sum(row["n"] for row in b.rows(NAMES)) == 18
        b.reopen()
        assert renamed(b) == EXPECTED
