"""Prometheus text and OTLP points to samples: tolerant of lines, strict about zero and unknown."""

from __future__ import annotations

import json

import polars as pl
import pytest
from span_tables import at
from writing import rulebook

from phasewise.collector.exposition import read_exposition, samples_of_points
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import METRIC_SCHEMA

PROFILES = Profiles(rulebook().engines)


def sample(text: str) -> dict[str, object]:
    read = read_exposition(text, at(0), PROFILES, instance="i")
    assert read is not None
    return read.samples.row(0, named=True)


def test_bad_lines_are_counted_and_left_out() -> None:
    text = """
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a \\"quoted\\", name"} 4.0 1795972000000
vllm:num_requests_waiting{engine="0" 7
vllm:kv_cache_usage_perc{engine="0"} high
vllm:num_preemptions_total{engine="0"}
python_info{version="3.11"} 1
"""
    read = read_exposition(text, at(0), PROFILES, instance="i")
    assert read is not None
    assert read.bad_lines == 3
    row = read.samples.row(0, named=True)
    assert (row["running"], row["waiting"], row["kv_usage_ratio"]) == (4.0, None, None)
    assert row["model"] == 'a "quoted", name'


def test_a_page_without_an_engine_is_none() -> None:
    assert read_exposition("up 1\nnode_cpu_seconds_total 3\n", at(0), PROFILES) is None
    assert read_exposition("", at(0), PROFILES) is None


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vllm:num_requests_running 1\n", "vllm_v1"),
        ("sglang:num_running_reqs 1\n", "sglang"),
        ("trtllm_num_requests_running 1\n", "trtllm"),
        ("tgi_batch_current_size 1\n", "tgi"),
        ("llamacpp:requests_processing 1\n", "llama_cpp"),
        ('nv_inference_request_success{model="m"} 1\n', "triton"),
        ("dynamo_frontend_inflight_requests 1\n", "dynamo_frontend"),
        ("dynamo_component_inflight_requests 1\n", "dynamo_worker"),
        ("inference_objective_running_requests 1\n", "llmd"),
        ('DCGM_FI_DEV_GPU_TEMP{UUID="GPU-0"} 40\n', "devices"),
        # an engine behind a wrapper that says more about itself
        ("nv_inference_count 1\nnv_inference_exec_count 1\nvllm:num_requests_running 1\n", "vllm_v1"),
        ("dynamo_component_uptime_seconds 1\ndynamo_component_requests_total 1\ntrtllm_x 1\n", "trtllm"),
    ],
)
def test_the_engine_is_told_by_the_names_of_its_metrics(text: str, engine: str) -> None:
    read = read_exposition(text, at(0), PROFILES, instance="i")
    assert read is not None
    assert read.engine == engine


def test_not_a_number_is_unknown() -> None:
    row = sample(
        'sglang:token_usage{tp_rank="0"} NaN\nsglang:num_running_reqs{tp_rank="0"} +Inf\nsglang:num_queue_reqs 2\n'
    )
    assert (row["kv_usage_ratio"], row["running"], row["waiting"]) == (None, None, 2.0)


def test_replicas_of_one_page_are_added_and_ratios_are_not() -> None:
    row = sample(
        'vllm:num_requests_running{engine="0"} 4\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    )
    assert (row["running"], row["kv_usage_ratio"]) == (7.0, 0.75)


def test_a_counter_that_never_moved_while_tokens_flow_is_not_enabled() -> None:
    flops = 'vllm:estimated_flops_per_gpu_total{engine="0"} 0.0\n'
    assert sample(flops + 'vllm:prompt_tokens_total{engine="0"} 9\n')["modelled_flops"] is None
    assert sample(flops + 'vllm:prompt_tokens_total{engine="0"} 0\n')["modelled_flops"] == 0.0
    measured = sample('vllm:num_preemptions_total{engine="0"} 0\nvllm:prompt_tokens_total{engine="0"} 9\n')
    assert measured["preemptions"] == 0.0


def test_histograms_keep_their_edges() -> None:
    row = sample(
        'vllm:time_to_first_token_seconds_bucket{le="0.5"} 2\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 3\n'
        "vllm:time_to_first_token_seconds_count 3\nvllm:time_to_first_token_seconds_sum 4.5\n"
    )
    assert (row["ttft_count"], row["ttft_sum_s"]) == (3.0, 4.5)
    assert json.loads(str(row["histograms"])) == {"ttft": {"le": [0.5, "+Inf"], "count": [2.0, 3.0]}}


def test_a_scrape_without_a_name_is_named_after_engine_and_process() -> None:
    text = "vllm:num_requests_running 1\nprocess_start_time_seconds 1.795973375e+09\n"
    read = read_exposition(text, at(0), PROFILES)
    assert read is not None
    assert read.samples["instance"].item() == "unnamed:vllm_v1@1795973375"
    assert read.samples["process_start_unix_s"].item() == 1795973375.0


def point(name: str, **fields: object) -> dict[str, object]:
    return {
        **dict.fromkeys(METRIC_SCHEMA.names),
        "name": name,
        "kind": "gauge",
        "unix_ns": at(5),
        "resource": "{}",
        "attributes": '{"model_name":"m"}',
        "received_unix_ns": at(5),
        **fields,
    }


def test_otlp_points_of_one_time_are_one_sample() -> None:
    histogram = {"count": 3.0, "sum": 4.5, "buckets": '{"le":[0.5,"+Inf"],"count":[2,3]}', "kind": "histogram"}
    points = pl.DataFrame(
        [
            point("vllm:num_requests_running", value=4.0),
            point("vllm:prompt_tokens", value=10.0, kind="sum"),
            point("vllm:time_to_first_token_seconds", **histogram),
            point("vllm:num_requests_running", value=5.0, unix_ns=at(6)),
            point("gen_ai.client.token.usage", value=1.0),
        ],
        schema=[*METRIC_SCHEMA.names],
        orient="row",
        infer_schema_length=None,
    )
    found, strange = samples_of_points(points, {"{}": "i-1"}, PROFILES)
    assert strange == 1
    first, second = (one.samples.row(0, named=True) for one in found)
    assert (first["instance"], first["running"], first["prompt_tokens"], first["ttft_count"]) == ("i-1", 4.0, 10.0, 3.0)
    assert (first["model"], first["source"]) == ("m", "otlp")
    assert (second["unix_ns"], second["running"], second["prompt_tokens"]) == (at(6), 5.0, None)
