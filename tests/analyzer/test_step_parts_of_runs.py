"""What holds for any run of the engine: seconds add up, none is negative, nothing but the rows themselves decides."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_contexts import recorded_context, stepped_context

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.composition import read_chunks, read_segments
from phasewise.analyzer.step_table import read_tables
from phasewise.collector.context import Context
from phasewise.collector.records import EngineStep, Request
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.simulation import Setup, simulate
from phasewise.rules.load import load_rulebook
from phasewise.rules.vocabulary import CAUSE_COLUMNS, CONTENTION, cause_column

RULES = load_rulebook()
MODEL, GPU = "llama-3.1-8b", "h100-sxm"
SETTINGS = {"accelerator": GPU, "model": MODEL}
UNEXPLAINED_RATIO = 0.02


def run(config: EngineConfig, arrivals: list[RequestSpec], seed: int = 0, **deployment: object) -> Recording:
    at = Deployment(gpu=RULES.gpus[GPU], model=RULES.models[MODEL], **deployment)  # type: ignore[arg-type]
    return simulate(Setup(config, at), arrivals, seed=seed)


def traffic(seed: int, count: int, rate_per_s: float, tools: bool = False) -> list[RequestSpec]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate_per_s, count))
    found = []
    for k in range(count):
        output = int(rng.integers(1, 120))
        calls = (
            (ToolCall(int(rng.integers(0, output)), int(rng.integers(1, 400)) * 1_000_000),)
            if tools and k % 3 == 0
            else ()
        )
        found.append(
            RequestSpec(
                request_id=f"r{k}",
                arrival_ns=round(at[k] * 1e9),
                prompt_tokens=int(rng.integers(1, 3000)),
                max_output_tokens=output,
                priority=int(rng.integers(0, 3)),
                context_ns=int(rng.integers(0, 2)) * 20_000_000,
                tools=calls,
            )
        )
    return found


CONFIGS = st.builds(
    EngineConfig,
    batching=st.sampled_from(["continuous", "static"]),
    max_num_seqs=st.sampled_from([2, 8, 64]),
    step_token_budget=st.sampled_from([256, 2048]),
    max_prefill_tokens=st.sampled_from([None, 128]),
    batching_window_s=st.sampled_from([0.0, 0.05]),
    order=st.sampled_from(["fcfs", "priority", "fair"]),
    preempt_for_priority=st.booleans(),
    kv_blocks=st.sampled_from([260, 400, 4000]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.integers(0, 10**6), st.sampled_from([2.0, 20.0, 200.0]), st.booleans())
def test_seconds_add_up_and_little_is_unexplained(config: EngineConfig, seed: int, rate: float, tools: bool) -> None:
    rows, _, context = recorded_context(run(config, traffic(seed, 60, rate, tools), seed), MODEL, SETTINGS)
    answer = attribute_instance(context, RULES)
    assert answer["first_causes"].null_count() == 0
    seconds = answer.select(CAUSE_COLUMNS).to_numpy()
    assert np.isfinite(seconds).all() and (seconds >= 0).all()
    e2e = {row.request_key: row.e2e_s for row in rows}
    whole = np.array([e2e[key] for key in answer["request_key"]], dtype=float)
    np.testing.assert_allclose(seconds.sum(axis=1), whole, rtol=0, atol=1e-9)
    unexplained = answer[cause_column("unexplained")].to_numpy() / whole
    assert np.quantile(unexplained, 0.95) <= UNEXPLAINED_RATIO
    measured = answer["measured_s"].to_numpy()
    assert (measured <= whole + 1e-9).all()


def digest(context: Context) -> str:
    answer = attribute_instance(context, RULES).sort("request_key")
    return hashlib.sha256(answer.write_json().encode()).hexdigest()


@pytest.fixture(scope="module")
def busy() -> tuple[list[Request], list[EngineStep], Recording]:
    config = EngineConfig(max_num_seqs=16, step_token_budget=512, kv_blocks=700)
    recording = run(config, traffic(7, 200, 8.0, tools=True), 7)
    rows, steps, _ = recorded_context(recording, MODEL)
    return rows, steps, recording


def test_the_order_of_rows_changes_no_bit(busy: tuple[list[Request], list[EngineStep], Recording]) -> None:
    rows, steps, _ = busy
    expected = digest(stepped_context(rows, steps, SETTINGS))
    rng = np.random.default_rng(1)
    mixed = stepped_context(
        [rows[k] for k in rng.permutation(len(rows))], [steps[k] for k in rng.permutation(len(steps))], SETTINGS
    )
    assert digest(mixed) == expected
    twice = stepped_context(rows, [*steps, *steps[10:20]], SETTINGS)
    assert digest(twice) == expected


_ALONE = """
import sys
sys.path[:0] = {paths!r}
import test_step_parts_of_runs as runs
config = runs.EngineConfig(max_num_seqs=16, step_token_budget=512, kv_blocks=700)
rows, steps, context = runs.recorded_context(runs.run(config, runs.traffic(7, 200, 8.0, tools=True), 7), runs.MODEL, runs.SETTINGS)
print(runs.digest(context))
"""


@pytest.mark.slow
def test_threads_change_no_bit(busy: tuple[list[Request], list[EngineStep], Recording]) -> None:
    rows, steps, _ = busy
    expected = digest(stepped_context(rows, steps, SETTINGS))
    here = Path(__file__).parent
    for threads in ("1", "4"):
        names = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        program = _ALONE.format(paths=[str(here), str(here.parent)])
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected


def test_a_request_that_runs_alone_waits_for_no_one() -> None:
    apart = [replace(one, arrival_ns=k * 10**11, tools=()) for k, one in enumerate(traffic(3, 30, 1.0))]
    _, _, context = recorded_context(run(EngineConfig(), apart), MODEL, SETTINGS)
    answer = attribute_instance(context, RULES)
    for cause in sorted(CONTENTION - {"cold_start"}):
        assert answer[cause_column(cause)].max() == 0.0, cause


def test_chunks_are_recovered_from_prompts_and_steps(busy: tuple[list[Request], list[EngineStep], Recording]) -> None:
    """What the wire does not carry: how many tokens of a step belong to whom."""
    rows, steps, recording = busy
    context = stepped_context(rows, steps)
    table = next(iter(read_tables(context.steps, 0).values()))
    frame = context.requests
    segments = read_segments(frame["segments"], np.ones(len(frame), dtype=np.bool_), table)
    known = (frame[name].cast(pl.Float64).to_numpy() for name in ("input_tokens", "cached_tokens"))
    chunks = read_chunks(segments, table, *known)
    index = {row.request_id: one.index for row, one in zip(rows, recording.finished, strict=True)}
    found = {(int(step), index[frame["request_id"][int(row)]]): tokens
             for row, step, tokens in zip(chunks.row, chunks.step, chunks.tokens, strict=True)}  # fmt: skip
    true = recording.chunk_columns()
    pairs = list(zip(true["step"].tolist(), true["request"].tolist(), true["new_tokens"].tolist(), strict=True))
    assert len(found) == len(pairs)
    off = np.array([abs(found[step, request] - tokens) for step, request, tokens in pairs])
    assert (off <= 0.5).mean() >= 0.95
    assert off.sum() <= 0.02 * sum(tokens for _, _, tokens in pairs)


def test_an_unknown_accelerator_leaves_no_more_unexplained(
    busy: tuple[list[Request], list[EngineStep], Recording],
) -> None:
    rows, steps, _ = busy
    answer = attribute_instance(stepped_context(rows, steps), RULES)
    seconds = answer.select(CAUSE_COLUMNS).to_numpy()
    assert (answer[cause_column("unexplained")].to_numpy() <= UNEXPLAINED_RATIO * seconds.sum(axis=1)).mean() >= 0.95
