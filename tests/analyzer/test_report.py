"""The verdict object from whole scenes: built rows, attributed by the real function, judged by the real rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import polars as pl
import pytest
from analyzer_contexts import four_slots, make_context, sample_frame
from builders import START_UNIX_NS, make_request, make_sample

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.report import scene_verdict
from phasewise.analyzer.scene import Scene
from phasewise.analyzer.window import Window, parse_slo
from phasewise.collector.context import Setting
from phasewise.collector.records import EngineSample, Request
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
KEYS = set(
    "status objective window requests refused aborted open affected baseline primary cause shares explained_ratio confidence"
    " evidence recommend will_not_help missing verify stage examples provenance".split()
)


def scene(
    rows: Sequence[Request], samples: Sequence[EngineSample] = (), settings: dict[str, object] | None = None
) -> Scene:
    context = make_context(rows, samples, settings)
    frame = context.requests
    if rows:
        answer = attribute_instance(context, RULES)
        added = [name for name in answer.columns if name != "request_key"]
        frame = frame.drop(added).join(answer, on="request_key").select(context.requests.columns)
    stated = {name: Setting(value, "test") for name, value in (settings or {}).items()}
    end = START_UNIX_NS + 600 * 10**9
    newest = [t for t in (frame["finished_unix_ns"].max(), context.samples["unix_ns"].max()) if isinstance(t, int)]
    return Scene(
        window=Window(START_UNIX_NS - 10**9, end),
        requests=frame,
        refused=0,
        aborted=0,
        replicas=(Replica("gpu-0", "vllm_v1", sample_frame(samples), stated, True),) if rows or samples else (),
        before=frame.clear(),
        baseline=None,
        now_unix_ns=end,
        newest_unix_ns=max(newest, default=None),
    )


def calm(count: int) -> list[Request]:
    return [
        make_request(at_s=2.0 * i, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.0) for i in range(count)
    ]


def seen(count: int, **fields: object) -> list[EngineSample]:
    return [make_sample(at_s=i + 0.5, source="import", **fields) for i in range(count)]


def techniques(verdict: dict[str, object], part: str) -> set[str]:
    listed = verdict[part]
    assert isinstance(listed, list)
    return {one["technique"] for one in listed}


def test_overload_at_a_slot_limit() -> None:
    verdict = scene_verdict(scene(four_slots(36), seen(12, running=4.0, waiting=20.0, kv_usage_ratio=0.05)), RULES)
    assert (verdict["status"], verdict["primary"], verdict["cause"]) == ("slow", "queueing", "queue.slots")
    assert techniques(verdict, "recommend") & {"raise_max_num_seqs", "admission_control", "add_replicas"}
    assert not techniques(verdict, "recommend") & {"kv_cache_quantization", "prefix_caching", "speculative_decoding"}
    assert "kv_cache_quantization" in techniques(verdict, "will_not_help")
    assert verdict["stage"] == "chosen"


def test_overload_at_a_full_pool() -> None:
    samples = [
        make_sample(at_s=i + 0.5, source="import", running=4.0, waiting=20.0, kv_usage_ratio=0.98, preemptions=float(i))
        for i in range(12)
    ]
    verdict = scene_verdict(scene(four_slots(36), samples), RULES)
    assert (verdict["status"], verdict["primary"]) == ("slow", "kv")
    assert not techniques(verdict, "recommend") & {"raise_max_num_seqs", "prefix_caching", "speculative_decoding"}


def test_spans_alone_leave_slots_and_kv_open_and_say_what_would_decide() -> None:
    verdict = scene_verdict(scene(four_slots(36)), RULES)
    assert verdict["status"] == "slow"  # waiting is contention, whatever was waited for
    assert verdict["primary"] == "inconclusive"
    assert verdict["cause"] is None
    missing = verdict["missing"]
    assert isinstance(missing, list)
    assert "engine_metrics" in {one["signal"] for one in missing}
    assert techniques(verdict, "recommend") <= {"collect_missing_signals"}


def test_a_calm_engine_is_healthy_and_offers_no_capacity() -> None:
    verdict = scene_verdict(scene(calm(40), seen(80, running=1.0, waiting=0.0, kv_usage_ratio=0.02)), RULES)
    assert (verdict["status"], verdict["primary"]) == ("healthy", "bandwidth")
    assert not techniques(verdict, "recommend") & {"raise_max_num_seqs", "admission_control", "add_replicas"}


def test_nothing_is_unknown_not_healthy() -> None:
    verdict = scene_verdict(scene([]), RULES)
    assert (verdict["status"], verdict["primary"], verdict["requests"]) == ("unknown", "inconclusive", 0)
    assert verdict["shares"] == {}
    assert verdict["recommend"] == []


@pytest.mark.parametrize("rows", [[], calm(1), calm(40), four_slots(36)])
def test_every_verdict_has_the_contract_s_keys_and_is_plain_json(rows: list[Request]) -> None:
    verdict = scene_verdict(scene(rows), RULES, parse_slo("ttft:500ms"))
    assert set(verdict) >= KEYS
    text = json.dumps(verdict, allow_nan=False)
    assert "NaN" not in text
    shares = verdict["shares"]
    assert isinstance(shares, dict)
    assert not rows or sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    recommended = verdict["recommend"]
    assert isinstance(recommended, list)
    assert len(recommended) <= 3


def test_the_slo_names_the_affected_with_their_denominator() -> None:
    verdict = scene_verdict(
        scene(four_slots(36), seen(12, running=4.0, waiting=20.0, kv_usage_ratio=0.05)), RULES, parse_slo("ttft:5s")
    )
    affected = verdict["affected"]
    assert isinstance(affected, dict)
    assert affected["count"] == 20  # turns five to nine wait 5 s and longer before 0.1 s of prefill
    assert affected["of"] == 40
    assert affected["slo"] == "ttft 5 s"


def test_same_rows_in_another_order_give_the_same_bytes() -> None:
    built = scene(four_slots(36), seen(12, running=4.0, waiting=20.0, kv_usage_ratio=0.05))
    turned = replace(
        built, requests=built.requests.sort("request_key", descending=True).sort("finished_unix_ns", "request_key")
    )
    one, other = (json.dumps(scene_verdict(s, RULES), sort_keys=True) for s in (built, turned))
    assert one == other


def test_client_figures_pool_all_gaps() -> None:
    rows = [
        replace(one, entry_e2e_s=2.0, entry_ttft_s=0.5, client_gaps=json.dumps([0.01] * 99 + [1.0]), output_tokens=101)
        for one in calm(3)
    ]
    statistics = scene_verdict(scene(rows), RULES)["statistics"]
    assert isinstance(statistics, dict)
    client = statistics["client"]
    assert client["itl"]["n"] == 300
    assert client["itl"]["p50_s"] == pytest.approx(0.01)
    assert client["tpot"]["p50_s"] == pytest.approx(0.015)
    assert statistics["engine"]["ttft"]["n"] == 3


def test_a_known_machine_is_judged_by_roofline() -> None:
    rows = [replace(one, model="Llama-3.1-8B") for one in calm(20)]
    verdict = scene_verdict(scene(rows, settings={"accelerator": "H100 SXM"}), RULES)
    roofline = verdict["roofline"]
    assert isinstance(roofline, dict)
    assert roofline["decode"]["bound"] == "bandwidth"
    assert roofline["decode"]["accelerator"] == "h100-sxm"
    assert pl.Series([group["name"] for group in roofline["decode"]["groups"]]).to_list() == [
        "linear",
        "attention",
        "head",
    ]


def test_retractions_in_spans_count_where_no_counter_does() -> None:
    rows = [replace(one, preemptions=2) for one in four_slots(36)]
    samples = [replace(one, preemptions=None) for one in seen(12, running=4.0, waiting=20.0, kv_usage_ratio=0.95)]
    verdict = scene_verdict(scene(rows, samples), RULES)
    signals = verdict["signals"]
    assert isinstance(signals, dict)
    assert signals["preemptions_count"] == 80
    assert verdict["primary"] == "kv"


def test_a_broken_itl_is_not_blamed_on_the_queue() -> None:
    """No wait before the first token lengthens the gaps after it: more slots would make them longer."""
    verdict = scene_verdict(
        scene(four_slots(36), seen(12, running=4.0, waiting=20.0, kv_usage_ratio=0.05)), RULES, parse_slo("tpot:5ms")
    )
    assert (verdict["status"], verdict["primary"]) == ("slow", "bandwidth")
    assert "raise_max_num_seqs" not in techniques(verdict, "recommend")
    assert verdict["signals"]["objective_metric"] == "tpot"  # type: ignore[index]


def test_time_in_front_of_the_engine_is_neither_healthy_nor_the_engine_s() -> None:
    """A server span around the engine lasts five times as long: the host in front of it holds the time."""
    rows = [replace(one, entry_e2e_s=6.0) for one in calm(20)]
    verdict = scene_verdict(scene(rows, seen(40, running=1.0, waiting=0.0, kv_usage_ratio=0.02)), RULES)
    assert (verdict["status"], verdict["primary"], verdict["cause"]) == ("slow", "host", "host")


def test_the_client_s_own_clock_points_to_the_client() -> None:
    rows = [replace(one, entry_e2e_s=6.0, entry_ttft_s=4.0) for one in calm(20)]
    verdict = scene_verdict(
        scene(rows, seen(40, running=1.0, waiting=0.0, kv_usage_ratio=0.02)), RULES, parse_slo("client.e2e:3s")
    )
    assert (verdict["status"], verdict["primary"], verdict["cause"]) == ("slow", "external", "client")


def test_a_healthy_deployment_bound_by_context_is_told_in_plain_words() -> None:
    rows = [
        make_request(
            at_s=2.0 * i,
            queue_s=0.0,
            prefill_s=0.1,
            first_token_s=0.0,
            decode_s=0.1,
            context_s=1.0,
            e2e_s=1.2,
            ttft_s=1.1,
        )
        for i in range(40)
    ]
    verdict = scene_verdict(scene(rows), RULES)
    assert (verdict["status"], verdict["cause"]) == ("healthy", "context")
    assert str(verdict["headline"]).startswith(
        "Healthy: time goes mostly into preparing requests, before the engine starts them (83% of it)."
    )
