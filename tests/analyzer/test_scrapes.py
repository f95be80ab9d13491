"""Windows with more scrapes than are read: counters move by what they moved by, gauges are looked at evenly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from builders import START_UNIX_NS, attributed, make_instance, make_request, make_sample, record_table, request_table
from large_windows import SECOND_NS

from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.records import EngineSample, Instance
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

WINDOW = Window(START_UNIX_NS + 600 * SECOND_NS, START_UNIX_NS + 4200 * SECOND_NS)
RESTART_S = 2000
ENDS = tuple(range(5, 4800, 8))  # of requests, in seconds from START_UNIX_NS on


def _scrapes() -> list[EngineSample]:
    """Every second; the engine counts each request, begins again at RESTART_S, and was refused to one in ten."""
    chance = random.Random(3)
    found = []
    for at_s in range(4800):
        counted = sum(1 for end in ENDS if (end > RESTART_S) == (at_s > RESTART_S) and end <= at_s)
        moved: dict[str, Any] = {"finished": counted, "refused": counted // 10, "preemptions": counted // 4}
        moved |= {"prefix_queries_tokens": 100 * counted, "prefix_hits_tokens": 40 * counted}
        running, waiting = float(chance.choice([2, 3, 4])), float(chance.choice([0, 0, 5]))
        floats = {name: float(value) for name, value in moved.items()}
        found.append(make_sample(at_s=at_s, engine="vllm_v1", running=running, waiting=waiting, **floats))
    return found


def test_what_is_read_of_many_scrapes_tells_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [attributed(make_request(at_s=end - 2.0, queue_s=0.5, decode_s=1.29, engine="vllm_v1")) for end in ENDS]
    with Store(tmp_path / "p.duckdb") as store:
        with store.write() as transaction:
            transaction.insert("requests", request_table(requests))
            transaction.insert("engine_samples", record_table(EngineSample, _scrapes()))
            transaction.insert("instances", record_table(Instance, [make_instance(engine="vllm_v1")]))

        def verdict() -> dict[str, Any]:
            return window_verdict(store, load_rulebook(), WINDOW, now_unix_ns=WINDOW.to_unix_ns)

        whole = verdict()
        monkeypatch.setattr("phasewise.analyzer.scrapes.MOST_SCRAPES", 400)
        found = verdict()
    assert whole["provenance"]["drawn"] is None
    told = found["provenance"]["drawn"]
    assert told["read"] == told["of"] == whole["requests"] == 450
    assert 400 < told["scrapes"]["read"] < 650
    assert told["scrapes"]["of"] > 3600
    for name in ("refused", "aborted", "open", "requests", "affected", "in_flight", "status", "primary", "cause"):
        assert found[name] == whole[name], name
    assert found["refused"] > 0
    mine, theirs = found["signals"], whole["signals"]
    for name in ("preemptions_count", "prefix_hit_ratio"):
        assert mine[name] == theirs[name] is not None
    for name in ("running_mean", "waiting_mean"):
        assert mine[name] == pytest.approx(theirs[name], rel=0.15)
    assert found["provenance"]["sampling"]["kind"] == whole["provenance"]["sampling"]["kind"] == "whole"
    assert found["provenance"]["sampling"]["counted"] == pytest.approx(
        whole["provenance"]["sampling"]["counted"], abs=2
    )
    assert f"{told['scrapes']['of']:,} scrapes" in " ".join(found["notes"])
