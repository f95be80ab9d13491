"""The same requests, samples and readings give the same answers to the last bit, in whatever order, tier and number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import same_answers
from large_windows import NOW_UNIX_NS, SECOND_NS
from same_answers import answers, filled

from phasewise.collector.sealing import Sealer, due_hours

LIMIT = "phasewise.analyzer.draw.MOST_ROWS"
COUNT = 1200


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def test_the_order_of_rows_and_their_tier_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT, 300)  # of the first verdict; the program below reads all for its own
    with filled(tmp_path / "a.duckdb", COUNT, 0) as store:
        expected = answers(store)
    (tmp_path / "b").mkdir()
    with filled(tmp_path / "b" / "b.duckdb", COUNT, 5) as store:
        assert differing(expected, answers(store)) == []
        late = NOW_UNIX_NS + 30 * 3600 * SECOND_NS  # some requests never become final
        (due,) = due_hours(store, late)
        assert Sealer(store, lambda: late).seal(due)
        assert not store.query("SELECT * FROM cold_files WHERE kind = 'requests'").is_empty()
        assert differing(expected, answers(store)) == []


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit() -> None:
    told = []
    for seed, threads in enumerate(("1", "2", "5")):
        environment = os.environ | {"POLARS_MAX_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, same_answers.__file__, "--count", "20000", "--seed", str(seed), "--threads", threads]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        told.append(json.loads(done.stdout))
    assert differing(told[0], told[1]) == []
    assert differing(told[0], told[2]) == []
