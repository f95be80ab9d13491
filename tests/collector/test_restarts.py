"""Engines that began anew are marked; several processes behind one address are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from span_tables import at
from writing import Bench, bench, rulebook

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)


def sample(second: float, tokens: float, started_s: float | None = None, instance: str = "e") -> Exposition:
    text = f"vllm:prompt_tokens_total {tokens}\nvllm:generation_tokens_total {tokens / 2}\n"
    if started_s is not None:
        text += f"process_start_time_seconds {at(started_s) / 1e9}\n"
    read = read_exposition(text, at(second), PROFILES, instance=instance)
    assert read is not None
    return read


def marks(b: Bench) -> list[tuple[int, str]]:
    rows = b.rows("SELECT unix_ns, kind, text FROM annotations ORDER BY unix_ns")
    assert {row["kind"] for row in rows} <= {"restart"}
    return [(row["unix_ns"], row["text"]) for row in rows]


def test_another_start_time_is_a_restart_at_that_time(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_samples([sample(0, 1000, -50)])
        b.reopen()
        b.writer.add_samples([sample(1, 2000, -50), sample(30, 10, 20), sample(31, 3000, 20)])
        ((moment, text),) = marks(b)
        assert moment == pytest.approx(at(20), abs=10**6)
        assert text == "e began anew: another process"


@pytest.mark.parametrize("started_s", [1e300, 1e302, 1e12])
def test_a_start_that_is_no_time_is_told_by_the_sample(tmp_path: Path, started_s: float) -> None:
    text = f"vllm:prompt_tokens_total 3000\nprocess_start_time_seconds {started_s}\n"
    strange = read_exposition(text, at(31), PROFILES, instance="e")
    assert strange is not None
    with bench(tmp_path) as b:
        b.writer.add_samples([sample(0, 1000, -50), strange])
        assert marks(b) == [(at(31), "e began anew: another process")]


def test_without_start_times_counters_that_fall_tell_it(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_samples([sample(0, 1000), sample(1, 2000), sample(2, 30), sample(3, 60)])
        assert marks(b) == [(at(2), "e began anew: its counters fell")]


def test_processes_that_answer_in_turn_at_one_address_are_no_restarts(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for second in range(6):
            b.writer.add_samples([sample(second, 1000 + second, -90 if second % 2 else -50)])
        assert marks(b) == []
        for second in range(6):
            b.writer.add_samples([sample(second, 1000 - 100 * (second % 2) + second, instance="f")])
        assert marks(b) == []


def test_old_samples_that_come_late_tell_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_samples([sample(100, 5000)])
        b.writer.add_samples([sample(10, 100), sample(20, 200)])
        b.writer.add_samples([sample(101, 5100)])
        assert marks(b) == []
