"""What was added is always told; of the rest very little is."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.collector import sieve
from phasewise.collector.sieve import Numbers, Sieve


def drawn(count: int, seed: int) -> Numbers:
    return np.random.default_rng(abs(2 * seed + (seed < 0))).integers(0, 2**64, count, dtype=np.uint64)


def test_what_was_added_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "LINE_BITS", 7)
    monkeypatch.setattr(sieve, "_LINE_SHIFT", np.uint64(57))
    crowded = Sieve()
    for seed in range(20):  # many numbers share a word
        crowded.add(drawn(500, -seed), drawn(500, seed))
    assert all(crowded.may_hold(drawn(500, -seed), drawn(500, seed)).all() for seed in range(20))
    assert crowded.added == 10_000


def test_a_group_that_fills_its_line_is_still_told() -> None:
    held, group = Sieve(), np.full(50_000, 7, np.uint64)
    held.add(group, drawn(50_000, 1))
    assert held.may_hold(group, drawn(50_000, 1)).all()
    assert not held.may_hold(drawn(1000, 2), drawn(1000, 1)[:1000]).any()


def test_little_else_is_told() -> None:
    held = Sieve()
    assert not held.may_hold(drawn(1000, 0), drawn(1000, 1)).any()
    held.add(drawn(200_000, 4), drawn(200_000, 2))
    assert held.may_hold(drawn(1_000_000, 5), drawn(1_000_000, 3)).mean() < 1e-5


def test_nothing_is_neither_added_nor_told() -> None:
    held = Sieve()
    held.add(drawn(0, 1), drawn(0, 1))
    assert held.added == 0
    assert len(held.may_hold(drawn(0, 1), drawn(0, 1))) == 0
