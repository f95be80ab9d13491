"""Rows that are stored before there was time to attribute them are attributed soon after, whatever happens between."""

from __future__ import annotations

from pathlib import Path

import pytest
from writing import Bench, bench, engine_span

from phasewise.collector import refresher


class Ticking:
    """A monotonic clock on which every attribution takes 50 ms, so that its instance rests for 150 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.05
        return self.now_s


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresher, "time", Ticking())


def unattributed(b: Bench) -> int:
    return sum(row["revision"] is None for row in b.rows())


def request(number: int) -> dict[str, object]:
    return engine_span(start_s=float(number), trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


def left_raw(b: Bench) -> None:
    """One row attributed, then one that comes while its instance rests."""
    b.receive([request(0)])
    b.run()
    b.receive([request(1)])
    b.run(0.1)
    assert unattributed(b) == 1


def test_a_row_stored_raw_is_attributed_after_the_rest(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        left_raw(b)
        b.run(0.2)  # rested, but too soon for rows that are in the store already
        b.run(0.5)
        assert unattributed(b) == 0


def test_a_row_stored_raw_is_attributed_after_a_crash(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        left_raw(b)
        b.reopen()
        b.run()
        assert unattributed(b) == 0
