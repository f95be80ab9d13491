"""An engine that sends steps, but not which of them its requests took part in, and that nobody scrapes: vLLM with the plugin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
from analyzer_contexts import make_context
from builders import START_UNIX_NS, make_request

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.step_samples import LEAST_NS, samples_of, with_step_samples
from phasewise.collector.context import Context
from phasewise.collector.records import EngineStep, Request
from phasewise.collector.steps import STEP_SCHEMA
from phasewise.rules.load import load_rulebook

MS = 10**6


def steps(count: int, **changes: Any) -> pl.DataFrame:
    """One each 50 ms: two run, three wait for blocks of a pool that is full."""
    told = {"duration_s": 0.05, "prefill_tokens": 0, "decode_sequences": 2, "running": 2, "waiting": 3,
            "kv_blocks_used": 23, "kv_blocks_total": 23, "preemptions": 0}  # fmt: skip
    made = [
        EngineStep(instance="gpu-0", step=k, start_unix_ns=START_UNIX_NS + k * 50 * MS, **{**told, **changes})
        for k in range(count)
    ]
    rows = [{name: getattr(step, name) for name in STEP_SCHEMA} for step in made]
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def context(rows: list[Request], ran: pl.DataFrame) -> Context:
    return replace(make_context(rows), steps=ran)


def test_steps_are_thinned_to_samples() -> None:
    samples = samples_of(steps(40, preemptions=1))
    assert len(samples) in (8, 9)
    assert samples["unix_ns"].diff().drop_nulls().max() <= 2 * LEAST_NS  # type: ignore[operator]
    last = samples.row(-1, named=True)
    known = {"running": 2.0, "waiting": 3.0, "kv_usage_ratio": 1.0, "preemptions": 40.0, "output_tokens": 80.0, "prompt_tokens": 0.0}  # fmt: skip
    assert {name: last[name] for name in known} == known


def test_what_a_step_does_not_tell_is_unknown() -> None:
    reasons = {f"waiting_{reason}": 1 for reason in ("slot", "kv", "budget", "window", "policy")}
    last = samples_of(steps(10, waiting=None, prefill_tokens=None, **reasons)).row(-1, named=True)
    assert (last["waiting"], last["prompt_tokens"]) == (5.0, None)
    assert samples_of(steps(10, waiting=None))["waiting"].null_count() == len(samples_of(steps(10, waiting=None)))


def test_a_wait_while_the_pool_is_full_is_told_from_steps() -> None:
    waited = make_request(queue_s=4.0, prefill_s=0.5, decode_s=1.0)
    given = context([waited], steps(200))
    (row,) = attribute_instance(given, load_rulebook()).iter_rows(named=True)
    assert row["cause_kv_wait_s"] > 3.5
    assert row["kv_usage_peak_ratio"] == 1.0
    (blind,) = attribute_instance(replace(given, steps=given.steps.clear()), load_rulebook()).iter_rows(named=True)
    assert blind["cause_kv_wait_s"] == 0


def test_scrapes_and_segments_come_before() -> None:
    stepwise = make_request(segments="[[2,0,3]]")
    assert with_step_samples(context([stepwise], steps(5))).samples.is_empty()
    scraped = context([make_request()], steps(5))
    seen = replace(scraped, samples=samples_of(steps(1)))
    assert len(with_step_samples(seen).samples) == 1
