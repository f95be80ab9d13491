"""The recorded deployments whose bottleneck is known by construction, told by their summary numbers alone."""

from __future__ import annotations

import json
from functools import cache

import pytest
from shared_data import shared_path
from summary_documents import make_summary

from phasewise.analyzer.summary import explain_summary
from phasewise.rules.load import Rulebook, load_rulebook

NAMES = (
    "vllm-light", "vllm-long-prompt", "vllm-overload", "vllm-kv-starvation", "vllm-shared-prefix", "vllm-mixed",
    "vllm-client-openai-v2", "sglang-light", "sglang-overload",
)  # fmt: skip
KNOWN = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")


@cache
def rules() -> Rulebook:
    return load_rulebook()


def told(name: str) -> dict[str, object]:
    """A recording as a summary: its gauges, and phases at both boundaries; nothing about how it was set up."""
    facts = json.loads(shared_path("captures", name, "facts.json").read_text(encoding="utf-8"))
    gauges = facts["metrics"]

    def phases(times: dict[str, float | None]) -> dict[str, float]:
        return {f"{k}_ms": v * 1000 for k, v in times.items() if v is not None and k.rpartition("_")[0] in KNOWN}

    queries = gauges.get("prefix_cache_queries")
    observed = {
        "requests_running": gauges["max_running"],
        "requests_waiting": gauges.get("max_waiting", gauges.get("max_queue")),
        "kv_cache_usage_ratio": gauges.get("max_kv_usage", gauges.get("max_token_usage")),
        "preemptions_count": gauges.get("preemptions", gauges.get("retracted")),
        "prefix_cache_hit_ratio": gauges["prefix_cache_hits"] / queries if queries else None,
    }
    return make_summary(
        name,
        hardware={"kind": "cpu", "count": 1},
        engine={"name": name.partition("-")[0], "gateway": "none"},
        workload={"input_tokens": facts["prompt_tokens_p50"], "output_tokens": facts["completion_tokens_p50"]},
        observed=observed,
        client=phases(facts["client_s"]),
        server=phases(facts["server_span_s"]),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_judged_right_or_not_at_all(name: str) -> None:
    expected = json.loads(shared_path("captures", "expected.json").read_text(encoding="utf-8"))[name]
    verdict = explain_summary(told(name), rules())
    contended = expected["status"] == ["slow"]
    primaries = {*expected.get("primary", ("bandwidth", "host", "compute")), "inconclusive"}
    assert verdict["primary"] in primaries
    recommend = verdict["recommend"]
    assert isinstance(recommend, list)
    assert not {one["technique"] for one in recommend} & set(expected.get("must_not_recommend", ()))
    if not contended:
        assert verdict["primary"] not in ("queueing", "kv")


@pytest.mark.parametrize(
    ("name", "primary"),
    [("vllm-overload", "queueing"), ("sglang-overload", "queueing"), ("vllm-kv-starvation", "kv"), ("vllm-long-prompt", "compute")],
)  # fmt: skip
def test_a_bottleneck_that_the_gauges_show_is_named(name: str, primary: str) -> None:
    assert explain_summary(told(name), rules())["primary"] == primary
