"""What vLLM would have sent of a run: its boundaries, its attributes, and nothing it does not know."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hand_run import hand_run, moment
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from shared_data import shared_path

from phasewise.instrumented_engine import vllm_view

NAMES = (
    "time_to_first_token",
    "e2e",
    "time_in_queue",
    "time_in_model_prefill",
    "time_in_model_decode",
    "time_in_model_inference",
)


def attributes(span: Span | Resource) -> dict[str, object]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


def sent() -> dict[str, Span]:
    spans = vllm_view.spans(vllm_view.times(hand_run()))
    return {str(attributes(span)["gen_ai.request.id"]): span for span in spans}


def latencies(name: str) -> list[float]:
    found = attributes(sent()[vllm_view.request_id(name)])
    return [float(str(found[f"gen_ai.latency.{one}"])) for one in NAMES]


def test_only_served_requests_send_a_span_in_the_order_they_end() -> None:
    assert list(sent()) == ["cmpl-a-0", "cmpl-b-0", "cmpl-c-0"]


def test_a_request_alone_has_the_engine_s_own_phases() -> None:
    assert latencies("a") == pytest.approx([0.1, 0.4, 0.0, 0.1, 0.3, 0.4])


def test_the_wait_for_a_running_step_is_in_no_phase_and_a_tool_afterwards_is_outside() -> None:
    ttft, e2e, queue, prefill, decode, inference = latencies("b")
    assert (ttft, queue, prefill) == pytest.approx((0.28, 0.0, 0.25))
    assert ttft - queue - prefill == pytest.approx(0.03)
    assert (e2e, decode, inference) == pytest.approx((0.33, 0.05, 0.3))


def test_the_context_stage_lies_before_the_span() -> None:
    span = sent()["cmpl-c-0"]
    assert span.start_time_unix_nano == moment(600)
    assert span.end_time_unix_nano == moment(700) + vllm_view.WRITTEN_NS
    assert latencies("c") == pytest.approx([0.1, 0.1, 0.0, 0.1, 0.0, 0.1])


def test_a_request_that_comes_when_a_step_begins_is_in_time_for_it() -> None:
    recording = hand_run()
    arrivals = [moment(ms) for ms in (0, 100, 101, 149, 150, 500, 900)]
    taken = vllm_view.marked_queued_ns(recording, np.array(arrivals))
    assert [(at - moment(0)) // 10**6 for at in taken.tolist()] == [0, 100, 150, 150, 150, 500, 900]


def test_attributes_and_resource_are_those_of_recorded_spans() -> None:
    path = shared_path("captures", "vllm-long-prompt", "spans.jsonl.gz")
    recorded = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    recorded = [one for one in recorded if one["name"] == "llm_request"]
    always = set.intersection(*(set(one["attrs"]) for one in recorded))
    exported = vllm_view.export(hand_run(), "one")
    group = exported.resource_spans[0]
    assert set(attributes(group.resource)) == set(recorded[0]["resource"])
    assert group.scope_spans[0].scope.name == recorded[0]["scope"]
    for span in group.scope_spans[0].spans:
        own = attributes(span)
        assert set(own) == always - {"gen_ai.request.temperature"}
        assert {name: type(value) for name, value in own.items()} == {
            name: type(value) for name, value in recorded[0]["attrs"].items() if name in own
        }
        assert span.kind == recorded[0]["kind"]
