"""Spans and steps are enough for a verdict: nothing was scraped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import START_UNIX_NS, record_table, request_table
from step_contexts import INSTANCE, recorded_context

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.step_samples import STRETCHES, read_step_samples
from phasewise.analyzer.window import Window, parse_slo
from phasewise.collector.records import EngineStep
from phasewise.collector.store import Store
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import Setup, simulate
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
MODEL = "llama-3.1-8b"


def run(config: EngineConfig, prompts: tuple[int, int], outputs: tuple[int, int], rate_per_s: float) -> Recording:
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.exponential(1 / rate_per_s, 150))
    arrivals = [
        RequestSpec(
            request_id=f"r{k}",
            arrival_ns=round(at[k] * 1e9),
            prompt_tokens=int(rng.integers(*prompts)),
            max_output_tokens=int(rng.integers(*outputs)),
        )
        for k in range(150)
    ]
    deployment = Deployment(gpu=RULES.gpus["h100-sxm"], model=RULES.models[MODEL])
    return simulate(Setup(config, deployment), arrivals, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "p.duckdb", threads=1) as opened:
        yield opened


def judged(store: Store, recording: Recording, slo: str | None = None) -> dict[str, Any]:
    rows, steps, context = recorded_context(recording, MODEL, {"accelerator": "h100-sxm", "model": MODEL})
    answers = {row["request_key"]: row for row in attribute_instance(context, RULES).iter_rows(named=True)}
    stored = [asdict(row) | answers[row.request_key] | {"revision": 0, "final": True} for row in rows]
    with store.write() as transaction:
        transaction.insert("requests", request_table(stored))
        transaction.insert("engine_steps", record_table(EngineStep, steps))
    end = max(row.finished_unix_ns for row in rows) + 10**9
    window = Window(START_UNIX_NS - 10**9, end)
    return window_verdict(store, RULES, window, slo=parse_slo(slo) if slo else (), now_unix_ns=end)


def test_too_few_seats_are_found_without_a_scrape(store: Store) -> None:
    verdict = judged(store, run(EngineConfig(max_num_seqs=4), (100, 400), (50, 150), 30.0))
    assert (verdict["primary"], verdict["cause"]) == ("queueing", "queue.slots")
    assert verdict["signals"]["slots_limit_count"] == 4
    assert verdict["signals"]["waiting_max"] > 10
    assert "engine_metrics" not in {one["signal"] for one in verdict["missing"]}


def test_a_small_pool_is_found_without_a_scrape(store: Store) -> None:
    verdict = judged(store, run(EngineConfig(kv_blocks=600, max_num_seqs=64), (500, 1500), (50, 150), 20.0))
    assert (verdict["primary"], verdict["cause"]) == ("kv", "kv.wait")
    assert verdict["signals"]["kv_usage_p95_ratio"] > 0.9
    stated = [one for one in verdict["evidence"] if "as the engine states them" in one["name"]]
    assert any("kv" in one["for"] for one in stated)


def test_an_objective_on_the_first_token_is_not_answered_with_decoding(store: Store) -> None:
    """Decode holds nearly all of the time; what makes a first token late is the prompt."""
    recording = run(EngineConfig(), (6000, 7900), (200, 290), 0.5)
    whole = judged(store, recording)
    assert whole["primary"] == "bandwidth"
    with Store(store.path.parent / "other.duckdb", threads=1) as other:
        first = judged(other, recording, "ttft:100ms")
    assert (first["primary"], first["cause"]) == ("compute", "prefill.compute")
    assert first["affected_shares"].get("decode.weights", 0.0) < 0.2


def test_steps_are_thinned_before_they_are_read(store: Store) -> None:
    rng = np.random.default_rng(0)
    count = 20_000
    steps = [
        EngineStep(
            instance=INSTANCE, step=k, start_unix_ns=START_UNIX_NS + k * 10**9, duration_s=0.9, prefill_tokens=int(k % 7),
            decode_sequences=3, running=5, waiting_slot=1, waiting_kv=0, waiting_budget=0, waiting_window=0, waiting_policy=0,
            kv_blocks_used=int(rng.integers(0, 100)), kv_blocks_total=100, preemptions=1,
        )
        for k in range(count)
    ]  # fmt: skip
    with store.write() as transaction:
        transaction.insert("engine_steps", record_table(EngineStep, steps))
    samples = read_step_samples(store, START_UNIX_NS, START_UNIX_NS + count * 10**9)
    assert 0.9 * STRETCHES <= len(samples) <= STRETCHES + 1
    assert samples["preemptions"][-1] == count
    assert samples["prompt_tokens"][-1] == sum(k % 7 for k in range(count))
    assert samples["kv_usage_ratio"].max() == max(one.kv_blocks_used or 0 for one in steps) / 100
    assert samples["running"].unique().to_list() == [5.0]
    assert read_step_samples(store, 0, 10).is_empty()
