"""Pages of /metrics of a run, read by the collector as it reads those of a real vLLM."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hand_run import KV_BLOCKS, START, hand_run, moment

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.instrumented_engine import vllm_scrapes
from phasewise.instrumented_engine.vllm_scrapes import VllmServer
from phasewise.rules.load import load_rulebook

PROFILES = Profiles(load_rulebook().engines)
SERVER = VllmServer(model="m-8b", started_ns=START - 10**9, kv_blocks=KV_BLOCKS, block_tokens=16, prefix_caching=True)


def scraped(*at_ms: float) -> list[Exposition]:
    pages = vllm_scrapes.pages(hand_run(), SERVER, [moment(ms) for ms in at_ms])
    found = [read_exposition(text, at, PROFILES, instance="e:8000") for at, text in pages]
    return [one for one in found if one is not None and one.bad_lines == 0]


def values(one: Exposition, *names: str) -> list[float]:
    return [one.samples[name].item() for name in names]


def test_a_page_shows_the_state_after_the_last_step_before_it() -> None:
    pages = scraped(-10, 99, 100, 260, 360, 400, 500, 5000)
    running = [values(one, "running")[0] for one in pages]
    waiting = [values(one, "waiting")[0] for one in pages]
    assert running == [0, 0, 1, 1, 2, 1, 0, 0]
    assert waiting == [0, 0, 0, 0, 0, 3, 0, 0]
    usage = [values(one, "kv_usage_ratio")[0] for one in pages]
    assert usage == pytest.approx([0, 0, 4 / KV_BLOCKS, 5 / KV_BLOCKS, 8 / KV_BLOCKS, 0, 0, 0])


def test_counters_at_the_end_are_what_the_run_did() -> None:
    (last,) = scraped(5000)
    assert last.engine == "vllm_v1"
    assert values(last, "finished", "preemptions", "prompt_tokens", "output_tokens") == [3, 2, 120, 7]
    assert values(last, "refused", "steps", "step_tokens") == [1, 6, 127]
    assert values(last, "prefix_queries_tokens", "prefix_hits_tokens") == [120, 2]
    assert values(last, "ttft_count", "e2e_count", "queue_count", "itl_count") == [3, 3, 3, 4]
    assert values(last, "ttft_sum_s", "e2e_sum_s", "queue_sum_s", "itl_sum_s") == pytest.approx([0.48, 0.83, 0.0, 0.35])
    assert last.samples["model"].item() == "m-8b"
    assert last.samples["process_start_unix_s"].item() == (START - 10**9) / 1e9
    told = {
        name: last.settings[name] for name in ("block_size_tokens", "kv_blocks_total", "prefix_caching", "kv_dtype")
    }
    assert told == {"block_size_tokens": 16, "kv_blocks_total": KV_BLOCKS, "prefix_caching": True, "kv_dtype": "auto"}


def test_histograms_have_the_edges_of_vllm_and_count_up() -> None:
    (last,) = scraped(5000)
    shapes = json.loads(last.samples["histograms"].item())
    assert shapes["ttft"]["le"][:4] == [0.001, 0.005, 0.01, 0.02] and shapes["ttft"]["le"][-1] == "+Inf"
    by_edge = dict(zip(shapes["itl"]["le"], shapes["itl"]["count"], strict=True))
    assert [by_edge[edge] for edge in (0.025, 0.05, 0.1, 0.2, "+Inf")] == [0, 3, 3, 4, 4]


def test_gaps_across_a_preemption_are_counted_once() -> None:
    """Tokens in steps 0, 1, 2; preempted; recomputed in 4 and 5, which gives a token; decodes on in 6."""
    end = np.array([10, 20, 30, 40, 50, 60, 70], dtype=np.int64) * 10**9
    seen = vllm_scrapes.token_gaps([[[1, 0, 0], [2, 1, 2], [3, 4, 5], [2, 6, 6]], [[1, 0, 0], [2, 1, 1]]], end)
    assert sorted(zip(seen.step.tolist(), seen.value.tolist(), seen.weight.tolist(), strict=True)) == [
        (1, 10.0, 2), (2, 10.0, 1), (5, 30.0, 1), (6, 10.0, 1),
    ]  # fmt: skip


def test_scrapes_come_every_five_seconds_whatever_the_steps_do() -> None:
    at = vllm_scrapes.moments_ns(hand_run(), seed=3)
    assert at[0] <= START + 10**8 and at[-1] >= moment(700)
    gaps = np.diff(at) / 1e9
    assert len(at) >= 2 and (abs(gaps - 5) <= 0.21).all() and len(set(gaps.tolist())) == len(gaps)
    assert vllm_scrapes.moments_ns(hand_run(), seed=3) == at
