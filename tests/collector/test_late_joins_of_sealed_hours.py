"""What becomes known of an engine late touches its sealed hours: rows and samples end as if nothing had been sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from device_pages import dcgm
from span_tables import at
from writing import Bench, bench, each, engine_span

from phasewise.collector.context import Context
from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.facts import Statement
from phasewise.collector.late_times import LATE
from phasewise.collector.sealing import Sealer, due_hours

HOUR_S = 3600.0
ROLLUPS = "SELECT * EXCLUDE (e2e_histogram, ttft_histogram, tpot_histogram, queue_histogram) FROM rollups ORDER BY ALL"
FACTS = [Statement("startup_log", "vllm_v1", {"max_num_seqs": 64}, unix_ns=at(0), names=("i-1",))]


def told(context: Context) -> pl.DataFrame:
    """An attribution that says what it was given of the engine: its largest batch, and how many samples of it."""
    keys = sorted(context.targets)
    setting = context.settings.get("max_num_seqs")
    cause = f"seqs {setting.value}" if setting else "unknown"
    return pl.DataFrame(
        {
            "request_key": keys,
            "cause": [cause] * len(keys),
            "concurrency_at_arrival": [context.samples.height] * len(keys),
        },
        schema={"request_key": pl.String, "cause": pl.String, "concurrency_at_arrival": pl.Int64},
    )


def spans(count: int, first_s: float = 0.0, every_s: float = 60.0, trace: int = 0) -> list[dict[str, Any]]:
    return [
        engine_span(start_s=first_s + i * every_s, trace=f"{trace + i + 1:032x}", span_id=f"{trace + i + 1:016x}")
        for i in range(count)
    ]


def page(b: Bench, second: float, instance: str, finished: int) -> Exposition:
    text = f'vllm:request_success_total{{finished_reason="stop"}} {finished}\nvllm:num_requests_running 1\n'
    read = read_exposition(text, at(second), b.writer._profiles, instance=instance)
    assert read is not None
    return read


def served(b: Bench, requests: list[dict[str, Any]], samples: list[Exposition] | None = None) -> None:
    if samples:
        b.writer.add_samples(samples)
    b.receive(requests)
    b.run(1.5)
    b.run(90)
    b.run(10)


def sealed(b: Bench) -> int:
    b.clock.forward(3 * HOUR_S)
    b.run()
    b.run(10)
    return sum(Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now))


def after_facts(folder: Path, *, sealing: bool, crash: bool = False) -> tuple[list[Any], list[Any]]:
    folder.mkdir()
    with bench(folder, attribute=each(told)) as b:
        served(b, spans(20))
        if sealing:
            assert sealed(b) == 1
        b.writer.add_facts(FACTS)
        if crash:  # before any row is attributed anew
            b.reopen()
        b.run(10)
        b.run(10)
        assert b.rows("SELECT * FROM positions WHERE name = 'late'") == []
        return b.rows("SELECT * EXCLUDE (received_unix_ns) FROM requests ORDER BY request_key"), b.rows(ROLLUPS)


def test_facts_that_come_late_are_told_of_sealed_hours_too(tmp_path: Path) -> None:
    never = after_facts(tmp_path / "never", sealing=False)
    late = after_facts(tmp_path / "sealed", sealing=True)
    assert {row["cause"] for row in late[0]} == {"seqs 64"}
    assert late == never
    assert after_facts(tmp_path / "crash", sealing=True, crash=True) == never  # before any row was attributed anew


@pytest.mark.slow
def test_only_the_last_hours_of_an_engine_come_back(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=each(told)) as b:
        served(b, spans(12, first_s=-11 * HOUR_S, every_s=HOUR_S))
        assert sealed(b) >= 12
        b.writer.add_facts(FACTS)
        late = json.loads(b.rows(f"SELECT position FROM positions WHERE name = '{LATE}'")[0]["position"])
        assert late == {"i-1": [at(2 - 6 * HOUR_S), at(2)]}
        b.run(10)
        assert b.rows("SELECT count(*) AS n FROM sealed_hours WHERE state = 'thawed'")[0]["n"] <= 9
        causes = [row["cause"] for row in b.rows()]
        assert causes == ["unknown"] * 5 + ["seqs 64"] * 7


@pytest.mark.slow
def test_what_a_server_says_again_brings_nothing_back(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=each(told)) as b:
        served(b, spans(20), [page(b, second, "i-1", second // 60) for second in range(0, 1200, 60)])
        b.writer.add_answers("i-1", at(1000), {"max_num_seqs": 64})
        b.run(10)
        assert sealed(b) == 1
        b.writer.add_answers("i-1", b.clock.now, {"max_num_seqs": 64})
        b.run(10)
        b.reopen()
        b.run(10)
        assert b.rows("SELECT state FROM sealed_hours") == [{"state": "sealed"}]
        b.writer.add_answers("i-1", b.clock.now, {"max_num_seqs": 32})
        b.run(10)
        assert {row["cause"] for row in b.rows()} == {"seqs 32"}


@pytest.mark.slow
def test_rows_of_sealed_hours_get_the_samples_of_a_join_that_came_late(tmp_path: Path) -> None:
    """Two scrapes, and too few requests to tell which is this engine; hours later their counters tell it."""
    with bench(tmp_path, attribute=each(told)) as b:
        both = [page(b, second, name, 0) for second in range(0, 300, 60) for name in ("x:8000", "y:8000")]
        served(b, spans(4), both)
        assert {row["concurrency_at_arrival"] for row in b.rows()} == {0}
        assert sealed(b) == 1
        start = 2 * HOUR_S
        more = [
            page(b, start + second, name, 4 + second // 20 if name[0] == "x" else 0)
            for second in range(0, 1200, 20)
            for name in ("x:8000", "y:8000")
        ]
        served(b, spans(60, start + 1, 20.0, trace=100), more)
        b.run(10)
        assert b.rows("SELECT joined_to FROM instances WHERE kind = 'spans'") == [{"joined_to": "x:8000"}]
        first = [row for row in b.rows() if row["arrival_unix_ns"] < at(HOUR_S)]
        assert len(first) == 4
        assert all(
            row["concurrency_at_arrival"] >= 4 and row["final"] for row in first
        )  # to half a minute past their block


@pytest.mark.slow
def test_samples_of_sealed_hours_are_marked_when_their_engine_is_not_known_any_more(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        name = "unnamed:vllm_v1"
        b.writer.add_samples([page(b, second, name, 1) for second in range(0, 300, 60)])
        assert sealed(b) == 1
        marks = "SELECT DISTINCT joined FROM engine_samples WHERE instance = 'unnamed:vllm_v1'"
        assert b.rows(marks) == [{"joined": True}]
        later = spans(2, first_s=2.5 * HOUR_S)
        b.receive([later[0], {**later[1], "resource": {"service.instance.id": "i-2"}}])
        b.run(1.5)  # two engines, and nothing tells which of them it is
        assert b.rows(marks) == [{"joined": False}]
        b.run(120)
        assert sealed(b) == 2  # that one again, and the hour of the requests
        b.reopen()
        b.run(10)
        assert b.rows("SELECT DISTINCT state FROM sealed_hours") == [{"state": "sealed"}]


def devices(b: Bench, second: float, xid: int) -> Exposition:
    read = read_exposition(dcgm((0,), xid=xid), at(second), b.writer._profiles, instance="dcgm:9400")
    assert read is not None
    return read


def test_an_error_that_a_device_still_shows_is_marked_once_however_much_is_sealed(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_samples([devices(b, 0, 0), devices(b, 60, 79)])
        assert sealed(b) == 1
        b.writer.add_samples([devices(b, 3 * HOUR_S, 79)])
        assert [row["text"].split()[1] for row in b.rows("SELECT text FROM annotations WHERE kind = 'xid'")] == ["79"]


def test_a_reading_of_a_sealed_hour_that_comes_again_is_one(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        assert b.writer.add_samples([devices(b, 0, 0)]) == 1
        assert sealed(b) == 1
        assert b.writer.add_samples([devices(b, 0, 0), devices(b, 30, 0)]) == 1
        assert b.rows("SELECT count(*) AS n FROM gpu_samples") == [{"n": 2}]


def test_a_restart_is_told_by_a_sample_that_is_sealed(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_samples([page(b, 0, "e", 1000), page(b, 60, "e", 2000)])
        assert sealed(b) == 1
        b.reopen()
        b.writer.add_samples([page(b, 2 * HOUR_S, "e", 10)])
        assert [row["text"] for row in b.rows("SELECT text FROM annotations")] == ["e began anew: its counters fell"]
