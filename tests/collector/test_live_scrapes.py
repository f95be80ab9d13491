"""Scrapes come several times a second: they are written at once, and all that follows from them is left to the passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from span_tables import at
from writing import Bench, Instant, bench, each, engine_span, give_time, plain_attribute

from phasewise.collector.context import Context
from phasewise.collector.exposition import Exposition, read_exposition


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def page(b: Bench, second: float, instance: str = "i-1") -> Exposition:
    read = read_exposition("vllm:num_requests_running 3\n", at(second), b.writer._profiles, instance=instance)
    assert read is not None
    return read


def test_a_scrape_is_stored_at_once_and_attributes_nothing(tmp_path: Path) -> None:
    asked: list[int] = []

    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        asked.append(max(len(context.samples) for context in contexts))
        return each(plain_attribute)(contexts)

    with bench(tmp_path, attribute=attribute) as b:
        b.receive([engine_span()])
        b.run(1)
        asked.clear()
        assert b.writer.add_scrapes([page(b, 0.5), page(b, 1.0)]) == 2
        assert len(b.rows("SELECT * FROM engine_samples")) == 2
        assert b.counter("samples") == 2
        assert asked == []
        for _ in range(8):
            b.run(1)
        assert asked and asked[-1] == 2  # the next passes see them
        assert b.writer.add_scrapes([page(b, 0.5)]) == 0


def test_scrapes_survive_a_crash_and_are_joined(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.run(1)
        b.writer.add_scrapes([page(b, 1.0, instance="i-1")])
        b.reopen()
        for _ in range(8):
            b.run(1)
        assert b.rows("SELECT joined FROM engine_samples") == [{"joined": True}]


@pytest.mark.slow
def test_what_attribution_fails_at_is_tried_no_more_often_while_others_are_scraped(tmp_path: Path) -> None:
    tries: list[None] = []
    broken = False

    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        if broken and any(context.instance == "i-1" for context in contexts):
            tries.extend([None] * (len(contexts) == 1))
            raise ValueError("on purpose")
        return each(plain_attribute)(contexts)

    with bench(tmp_path, attribute=attribute) as b:
        b.receive([engine_span()])
        b.run(1)
        broken = True
        b.run(400)
        before = len(tries)
        for second in range(0, 120, 2):
            b.writer.add_scrapes([page(b, 400.0 + second, instance="other")])
            b.run(2)
        assert len(tries) - before <= 6  # every twenty seconds at most
        broken = False
        for _ in range(30):
            b.run(20)
        assert [row["final"] for row in b.rows()] == [True]
