"""Arithmetic of durations does not depend on how many rows or threads there are."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import polars as pl

from phasewise.collector.durations import added, seconds

_PROGRAM = """
import random, polars as pl
from phasewise.collector.durations import added
source = random.Random(7)
names = [f"c{n}" for n in range(9)]
frame = pl.DataFrame({name: [source.expovariate(1) for _ in range(20_000)] for name in names})
print(frame.select(added(names)).to_series().hash(1).sum())
"""


def test_columns_are_added_from_left_to_right() -> None:
    source = random.Random(3)
    names = [f"c{n}" for n in range(9)]
    rows = [[None if source.random() < 0.2 else source.expovariate(1) for _ in names] for _ in range(500)]
    found = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Float64), orient="row").select(added(names)).to_series()
    for row, told in zip(rows, found, strict=True):
        expected = 0.0
        for value in row:
            expected += value or 0.0
        assert told == expected
    assert pl.DataFrame({"x": [1]}).select(added([])).item() == 0.0


def test_the_number_of_threads_changes_no_bit() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | {"POLARS_MAX_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "5")
    }
    assert len(told) == 1


def test_nanoseconds_are_the_same_seconds_alone_and_among_others() -> None:
    source = random.Random(5)
    values = [source.randrange(10**12) for _ in range(300)]
    together = pl.DataFrame({"n": values}).select(seconds(pl.col("n"))).to_series().to_list()
    alone = [pl.DataFrame({"n": [value]}).select(seconds(pl.col("n"))).item() for value in values]
    assert together == alone
