"""Routers, workers and phase-shaped trees: one call is one request, whatever of its trace has come."""

from __future__ import annotations

import itertools
from typing import Any

import polars as pl
import pytest
from span_tables import span_frame

from phasewise.collector.keys import span_keys
from phasewise.collector.normalize import Normalized, normalize
from phasewise.collector.profiles import Profiles
from phasewise.rules.load import load_rulebook

PROFILES = Profiles(load_rulebook().engines)
VLLM = {
    "gen_ai.latency.e2e": 3.0,
    "gen_ai.latency.time_in_queue": 0.25,
    "gen_ai.latency.time_in_model_prefill": 0.5,
    "gen_ai.usage.completion_tokens": 5,
}
FRONTEND = {"name": "http-request", "start_s": 0, "end_s": 4, "attributes": {"model": "m", "ttft_ms": 2000.0}}
WORKER = {"name": "engine.generate", "start_s": 0.25, "end_s": 3.75, "attributes": {"model": "m", "ttft_ms": 1500.0}}
ENGINE = {"name": "llm_request", "scope": "vllm.tracing.otel", "start_s": 0.5, "end_s": 3.5, "attributes": VLLM}
CLIENT = {
    "name": "chat m",
    "kind": 3,
    "start_s": 0,
    "end_s": 4.5,
    "attributes": {"gen_ai.operation.name": "chat", "gen_ai.response.time_to_first_chunk": 2.25},
}


def chain(*spans: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans that are each the parent of the next."""
    linked = []
    for index, span in enumerate(spans):
        parent = {"parent": f"{index:016x}"} if index else {}
        linked.append({**span, **parent, "span_id": f"{index + 1:016x}"})
    return linked


def rows(spans: list[dict[str, Any]]) -> Normalized:
    return normalize(span_frame(spans), PROFILES)


def key(spans: list[dict[str, Any]], name: str) -> str:
    frame = span_frame(spans).filter(pl.col("name") == name)
    return str(span_keys(frame["trace_id"], frame["span_id"]).item())


@pytest.mark.parametrize("spans", [[CLIENT, FRONTEND, WORKER, ENGINE], [FRONTEND, ENGINE], [CLIENT, WORKER, ENGINE]])
def test_however_many_stand_above_an_engine_it_is_one_request(spans: list[dict[str, Any]]) -> None:
    done = rows(chain(*spans))
    assert done.requests["engine"].to_list() == ["vllm_v1"]
    row = done.requests.row(0, named=True)
    outer = spans[0]
    assert row["entry_e2e_s"] == outer["end_s"] - outer["start_s"]
    assert row["entry_ttft_s"] == (2.25 if outer is CLIENT else None)
    assert done.turns.is_empty()


def test_without_an_engine_the_outermost_server_is_the_request_and_its_client_the_boundary() -> None:
    done = rows(chain(CLIENT, FRONTEND, WORKER))
    row = done.requests.row(0, named=True)
    assert (row["engine"], row["ttft_s"], row["entry_ttft_s"], row["entry_e2e_s"]) == (
        "dynamo_frontend",
        2.0,
        2.25,
        4.5,
    )
    assert done.requests.height == 1
    assert row["instance"] is not None


def test_an_engine_span_that_comes_late_takes_the_front_s_row_away() -> None:
    spans = chain(FRONTEND, WORKER, ENGINE)
    early = rows(spans[:2])
    assert early.requests["request_key"].to_list() == [key(spans, "http-request")]
    later = rows(spans)
    assert key(spans, "http-request") in later.superseded
    assert later.requests["request_key"].to_list() == [key(spans, "llm_request")]


def test_the_order_of_arrival_changes_nothing() -> None:
    spans = chain(CLIENT, FRONTEND, WORKER, ENGINE)
    found = {rows(list(order)).requests.write_json() for order in itertools.permutations(spans)}
    assert len(found) == 1


def test_a_second_attempt_without_an_engine_span_is_no_second_request() -> None:
    spans = chain(FRONTEND, WORKER, ENGINE)
    spans.append({**WORKER, "parent": spans[0]["span_id"], "span_id": f"{9:016x}"})
    assert rows(spans).requests["engine"].to_list() == ["vllm_v1"]


def test_a_router_s_parts_are_not_taken_for_another_request_of_the_trace() -> None:
    served, alone = chain(FRONTEND, ENGINE), {**FRONTEND, "span_id": f"{7:016x}"}
    waits = [
        {"name": "kv_router.schedule", "parent": served[0]["span_id"], "start_s": 0, "end_s": 1},
        {"name": "kv_router.schedule", "parent": alone["span_id"], "start_s": 0, "end_s": 0.25},
    ]
    done = rows([*served, alone, *({**w, "span_id": f"{20 + i:016x}"} for i, w in enumerate(waits))])
    waited = dict(done.requests.select("engine", "queue_upstream_s").iter_rows())
    assert waited == {"vllm_v1": None, "dynamo_frontend": 0.25}


def test_routing_twice_adds_the_waits_and_not_the_work_between_them() -> None:
    parts = [
        {"name": "kv_router.schedule", "parent": f"{1:016x}", "start_s": start, "end_s": start + 0.25}
        for start in (0.25, 1.5)
    ]
    spans = [*chain(FRONTEND), *({**p, "span_id": f"{20 + i:016x}"} for i, p in enumerate(parts))]
    assert rows(spans).requests["queue_s"].to_list() == [0.5]


@pytest.mark.parametrize("phases", [["prefill"], ["prefill", "vllm_prefill"], []])
def test_one_kind_of_phase_makes_no_request(phases: list[str]) -> None:
    children = [{"name": name, "parent": f"{1:016x}", "start_s": 1, "end_s": 2} for name in phases]
    spans = [*chain({"name": "compiler", "start_s": 0, "end_s": 3}), *children]
    done = rows([{**span, "span_id": f"{i + 1:016x}"} for i, span in enumerate(spans)])
    assert done.requests.is_empty()
    assert done.unmapped == {"(no scope) / compiler": 1}
