"""When rows become final, as the store has them, whatever the clocks of their engines say and whoever of a replica is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from span_tables import BASE_UNIX_NS, at
from writing import SECOND, Bench, Clock, Instant, bench, engine_span, give_time

from phasewise.collector.exposition import read_exposition
from phasewise.collector.sealing import Sealer, due_hours

STEP_S = 20  # less than silence lasts


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def named(instance: str, start_s: float, number: int) -> dict[str, Any]:
    resource = {"service.instance.id": instance, "service.name": "engine"}
    return engine_span(start_s=start_s, resource=resource, trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


def live(b: Bench, instance: str, for_s: int, ahead_s: float, first: int = 0) -> dict[str, float]:
    """A request that ends every STEP_S, by a clock that is ahead; by its key, how long after its end on our own clock it was seen final."""
    seen: dict[str, float] = {}
    for number in range(for_s // STEP_S):
        now_s = (b.clock.now - BASE_UNIX_NS) / SECOND
        b.receive([named(instance, now_s + ahead_s - 2.0, first + number)])
        b.clock.forward(STEP_S)
        b.writer.step()
        for row in b.rows(
            f"SELECT request_key, finished_unix_ns FROM requests WHERE final AND instance = '{instance}'"
        ):
            ended_ns = row["finished_unix_ns"] - round(ahead_s * 1e9)
            seen.setdefault(row["request_key"], (b.clock.now - ended_ns) / SECOND)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [0, 100, 700])
def test_no_row_of_an_engine_that_lives_is_final_before_its_neighbours_have_come(tmp_path: Path, ahead_s: int) -> None:
    with bench(tmp_path, clock=Clock(at(0))) as b:
        lasted = live(b, "i", 620 + ahead_s // 300 * 300, ahead_s)
        assert 15 < len(lasted) < 27
        assert min(lasted.values()) >= 60 + ahead_s
        assert max(lasted.values()) < 60 + ahead_s + 400  # the longest wait is that for the end of a span of the clock


@pytest.mark.slow
def test_a_peer_whose_rows_are_all_sealed_keeps_no_row_from_becoming_final_after_a_restart(tmp_path: Path) -> None:
    with bench(tmp_path, clock=Clock(at(0))) as b:
        pages = []
        for second in range(0, 70, 2):
            done = sum(i * 3.0 + 2.0 <= second for i in range(20))
            page = f'vllm:num_requests_running 1\nvllm:request_success_total{{finished_reason="stop"}} {done}\n'
            pages.append(read_exposition(page, at(second), b.writer._profiles, instance="host:8000"))
        b.writer.add_samples([page for page in pages if page is not None])
        b.receive([named("api-0" if i % 2 else "api-1", i * 3.0, i) for i in range(20)])
        b.run(70)
        b.run(3 * 3600)
        b.run(10)
        for due in due_hours(b.store, b.clock.now):
            assert Sealer(b.store, b.clock).seal(due)
        assert b.rows("SELECT * FROM main.requests") == []
        live(b, "api-0", STEP_S, 0, first=100)
        b.reopen()
        registry = b.writer._memory.registry
        assert registry.peers("api-0") == ["api-0", "api-1"]
        seen = live(b, "api-0", 400, 0, first=200)
        assert registry.peers("api-0") == ["api-0", "api-1"]
        hot = b.rows("SELECT request_key FROM main.requests WHERE final")
        assert len(hot) > 5 and {row["request_key"] for row in hot} <= seen.keys()
