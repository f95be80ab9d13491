"""A disk that takes nothing: said at once, counted exactly, made good by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from writing import NOW, Bench, bench, engine_span

from phasewise.collector.records import METRIC_SCHEMA
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction

POINTS = pa.Table.from_pylist(
    [
        {
            "name": "vllm:num_requests_running",
            "kind": "gauge",
            "unix_ns": NOW,
            "value": 1.0,
            "resource": "{}",
            "attributes": "{}",
        }
    ],
    schema=METRIC_SCHEMA,
)


class FullDisk(Store):
    """A store whose commits fail while `full` is set."""

    full = False

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        with super().write() as transaction:
            yield transaction
            if self.full:
                raise OSError(28, "No space left on device")


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("writing.Store", FullDisk)
    monkeypatch.setattr(FullDisk, "full", False)
    with bench(tmp_path) as b:
        yield b


def test_a_full_disk_is_told_and_counts_only_what_was_committed(full: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    full.receive([engine_span(trace="1" * 32)])
    full.run()
    committed = full.writer.health()["counters"]
    assert committed == {"spans": 1, "requests": 1}
    monkeypatch.setattr(FullDisk, "full", True)
    full.receive([engine_span(trace=f"{i:032x}") for i in range(2, 7)])
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            full.run()
        health = full.writer.health()
        assert health["counters"] == committed
        assert "No space left on device" in str(health["write_error"])
        journal = health["journal"]
        assert isinstance(journal, dict) and journal["lag_bytes"] > 0
    assert len(full.rows()) == 1
    monkeypatch.setattr(FullDisk, "full", False)
    full.run()
    assert full.writer.health()["write_error"] == ""
    assert full.writer.health()["counters"] == {"spans": 6, "requests": 6}
    assert len(full.rows()) == 6


def test_it_is_well_again_without_new_data(full: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    full.receive([engine_span()])
    full.run()
    monkeypatch.setattr(FullDisk, "full", True)
    with pytest.raises(OSError, match="No space left"):
        full.writer.add_points(POINTS)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            full.writer.step()
    monkeypatch.setattr(FullDisk, "full", False)
    full.writer.step()
    assert full.writer.health()["write_error"] == ""
    assert "metric_points" not in full.writer.health()["counters"]  # type: ignore[operator]


class Doubtful(Store):
    """A store whose commits are done and say that they failed, while `fails` is set."""

    fails = False

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        with super().write() as transaction:
            yield transaction
        if self.fails:
            raise duckdb.OutOfMemoryException("could not allocate what comes after the commit")


def test_a_commit_that_says_it_failed_and_was_done_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("writing.Store", Doubtful)
    with bench(tmp_path) as b:
        b.receive([engine_span(trace="1" * 32)])
        b.run()
        monkeypatch.setattr(Doubtful, "fails", True)
        b.receive([engine_span(trace=f"{i:032x}") for i in range(2, 7)])
        for _ in range(3):
            with pytest.raises(duckdb.OutOfMemoryException):
                b.run()
        monkeypatch.setattr(Doubtful, "fails", False)
        b.run()
        assert b.writer.health()["counters"] == {"spans": 6, "requests": 6}
        assert len(b.rows()) == len({row["request_key"] for row in b.rows()}) == 6
        assert b.writer.health()["write_error"] == ""
        assert b.writer.health()["losses"] == []
