"""/metrics against recorded scrapes of vLLM 0.32, and against the collector's reader."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict

import pytest
from live_engine import SMALL, engine
from shared_data import shared_path

from phasewise.collector.exposition import parse_text, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.histogram import Histogram, one_two_five
from phasewise.instrumented_engine.metrics import EngineCounters
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.rules.load import load_rulebook

Shape = dict[str, tuple[str, set[frozenset[tuple[str, str]]]]]
# The model's and the configuration's own values.
FREE_LABELS = {"model_name", "engine"}
# Bounds follow from the longest sequence the recorded server took (1-2-5 up to it); SMALL takes longer ones.
BY_LENGTH = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
             "request_params_max_tokens", "request_prefill_kv_computed_tokens")  # fmt: skip


def shape(text: str) -> Shape:
    """Of each vLLM series: its type and the label sets it has, values of free labels left out."""
    kinds: dict[str, str] = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    found: dict[str, set[frozenset[tuple[str, str]]]] = defaultdict(set)
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if line.startswith("vllm:") and brace:
            labels = re.findall(r'(\w+)="([^"]*)"', rest)
            found[name].add(frozenset((key, "" if key in FREE_LABELS else value) for key, value in labels))
    return {
        name: (kinds.get(name) or kinds.get(re.sub(r"_(bucket|sum|count)$", "", name), ""), labels)
        for name, labels in found.items()
    }


def recorded_text(capture: str) -> str:
    return gzip.decompress(shared_path("captures", capture, "metrics-last.prom.gz").read_bytes()).decode()


def counters(**changes: object) -> EngineCounters:
    config = EngineConfig(max_model_tokens=800, step_token_budget=2048)
    return EngineCounters(model="m", config=config, kv_blocks=100, start_s=1000.0, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", ["vllm-kv-starvation", "vllm-shared-prefix"])
def test_names_types_labels_and_bounds_are_those_of_vllm(capture: str) -> None:
    recorded = shape(recorded_text(capture))
    ours = shape(counters().render(1001.0))
    assert set(recorded) == set(ours)
    for name, (kind, labels) in recorded.items():
        if name == "vllm:cache_config_info":
            assert {key for one in ours[name][1] for key, _ in one} <= {key for one in labels for key, _ in one}
        elif any(part in name for part in BY_LENGTH):
            assert kind == ours[name][0]
        else:
            assert (kind, labels) == ours[name], name


def test_bounds_by_length_are_those_of_vllm() -> None:
    text = recorded_text("vllm-kv-starvation")
    bounds = re.findall(r'request_prompt_tokens_bucket\{engine="0",le="([^"]+)"', text)
    assert tuple(float(bound) for bound in bounds[:-1]) == one_two_five(768)  # 24 blocks of 32 tokens


def test_every_series_has_help_and_type_before_it() -> None:
    told: set[str] = set()
    for line in counters().render(1001.0).splitlines():
        if line.startswith("# TYPE"):
            told.add(line.split()[2])
        elif not line.startswith("#"):
            name = re.split(r"[{ ]", line)[0]
            assert name in told or re.sub(r"_(bucket|sum|count)$", "", name) in told


def test_before_the_start_there_is_nothing() -> None:
    assert counters().render(999.0) == ""


def test_a_label_may_hold_anything() -> None:
    text = EngineCounters(model='a"b\\c\nd', config=SMALL, kv_blocks=1, start_s=0.0).render(1.0)
    points, bad = parse_text(text, ("vllm:",))
    assert bad == 0
    assert points[1].labels["model_name"] == 'a"b\\c\nd'


def test_a_histogram_counts_at_or_below_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    assert histogram.cumulative() == [2, 6, 7]
    assert histogram.count == 7
    assert histogram.total == 12.0


def finished(**changes: object) -> Sequence:
    sequence = Sequence(RequestSpec(request_id="r", arrival_ns=10**9, prompt_tokens=100, max_output_tokens=50))
    told: dict[str, object] = {
        "queued_ns": 2 * 10**9, "scheduled_ns": 4 * 10**9, "prefilled_ns": 5 * 10**9, "first_token_ns": 5 * 10**9,
        "last_token_ns": 9 * 10**9, "finished_ns": 10 * 10**9, "output_tokens": 5, "cached_tokens": 16,
        "finish_reason": "length", "preemptions": 1,
    }  # fmt: skip
    for name, value in {**told, **changes}.items():
        setattr(sequence, name, value)
    return sequence


def test_the_collector_reads_what_was_observed() -> None:
    seen = counters()
    row = (0, 10, 84, 0, 0, 1, 1, 3, 40, 4, 2, 3, 0, 1, 0, 4, 25, 2, 7)  # STEP_COLUMNS
    seen.observe_admission(finished())
    seen.observe_step(row, [finished()])
    seen.observe_first_token(4.0)
    seen.observe_gap(0.03, times=3)
    seen.observe_request(finished())
    seen.observe_request(finished(finish_reason="abort"))
    seen.observe_refusal("queue full")
    read = read_exposition(seen.render(1001.0), 1, Profiles(load_rulebook().engines), instance="i")
    assert read is not None
    assert read.bad_lines == 0
    sample = read.samples.row(0, named=True)
    assert read.engine == "vllm_v1"
    expected = {
        "running": 4, "waiting": 6, "kv_usage_ratio": 0.25, "preemptions": 2, "prefix_queries_tokens": 100,
        "prefix_hits_tokens": 16, "prompt_tokens": 100, "output_tokens": 4, "finished": 1, "aborted": 1, "refused": 1,
        "steps": 1, "step_tokens": 88, "ttft_count": 1, "ttft_sum_s": 4.0, "itl_count": 3, "e2e_count": 1, "e2e_sum_s": 9.0,
        "queue_count": 1, "queue_sum_s": 2.0,
    }  # fmt: skip
    assert {name: sample[name] for name in expected if name in sample} == pytest.approx(expected)
    assert read.settings["kv_blocks_total"] == 100
    assert read.settings["block_size_tokens"] == 16
    assert read.settings["prefix_caching"] is True
    assert read.settings["kv_pool_tokens"] == 1600


def test_latencies_of_a_request_lie_between_vllms_moments() -> None:
    seen = counters()
    seen.observe_request(finished(), n=2, arrival_ns=0)
    totals = {name: histogram.total for name, histogram in seen.phases.items()}
    assert totals == {"e2e": 10.0, "queue": 2.0, "inference": 5.0, "prefill": 1.0, "decode": 4.0}
    assert seen.tpot.total == 1.0
    assert seen.params_n.total == 2
    assert seen.sizes["computed"].total == 84


def test_the_batching_window_counts_as_deferred() -> None:
    seen = counters()
    seen.observe_state(1, (1, 2, 3, 4, 5), 0)
    lines = [line for line in seen.render(1001.0).splitlines() if line.startswith("vllm:num_requests_waiting")]
    assert [float(line.split()[-1]) for line in lines] == [15.0, 11.0, 4.0]


def test_a_live_engine_counts_what_it_served() -> None:
    with engine() as running:
        for _ in range(3):
            running.post("/v1/completions", {"prompt": "word " * 40, "max_tokens": 6})
        read = read_exposition(running.client.get("/metrics").text, 1, Profiles(load_rulebook().engines), instance="i")
        assert read is not None
        sample = read.samples.row(0, named=True)
        assert sample["finished"] == 3
        assert sample["output_tokens"] == 18
        assert sample["prompt_tokens"] == running.metric("vllm:request_prompt_tokens_sum")
        assert sample["prefix_queries_tokens"] == sample["prompt_tokens"]
        assert 0 < sample["prefix_hits_tokens"] < sample["prompt_tokens"]
        computed = running.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
        assert sample["step_tokens"] == computed + 18
        assert sample["running"] == sample["waiting"] == sample["kv_usage_ratio"] == 0
