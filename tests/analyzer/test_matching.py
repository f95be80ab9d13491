"""Which changes are offered and refused, with rich signals and with hardly any."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from situations import MIXED, OVERLOAD, SHORT_BUDGET, SHORT_POOL, STARVED, make_situation, offered, refused

from phasewise.analyzer.conditions import Situation, Value, complete_signals
from phasewise.analyzer.matching import LEDGER_LIMIT, assess, match
from phasewise.collector.context import Setting
from phasewise.rules.load import load_rulebook
from phasewise.rules.schema import Example
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

RULES = load_rulebook()
EXAMPLES = [(t.id, i, e) for t in RULES.techniques.values() for i, e in enumerate(t.examples)]

# --- the files' own examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "example"), [(n, e) for n, _, e in EXAMPLES], ids=[f"{n}-{i}" for n, i, _ in EXAMPLES]
)
def test_each_technique_answers_its_own_examples(name: str, example: Example) -> None:
    situation = Situation(
        primary=example.primary,
        cause=example.cause,
        shares=example.shares,
        signals=example.signals,
        engine=example.engine,
        engine_version=None,
        settings={key: Setting(value, "example") for key, value in example.settings.items()},
    )
    assessment = assess(RULES.techniques[name], situation, complete_signals(situation))
    assert assessment.outcome == example.expect, example.because


# --- domain truths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["queue.slots", "queue.capacity"])
def test_a_full_slot_limit_with_an_empty_pool(cause: str) -> None:
    shares = {cause: 0.9, "decode.weights": 0.06, "prefill.compute": 0.02, "decode.kv": 0.01, "host": 0.01}
    matched = match(make_situation(cause, OVERLOAD, shares), RULES)
    assert {"raise_max_num_seqs", "admission_control", "add_replicas"} & set(offered(matched))
    assert not {"kv_cache_quantization", "prefix_caching", "speculative_decoding"} & set(offered(matched))
    ledger = refused(matched)
    assert ledger["kv_cache_quantization"]["number"] == 0.07
    assert "7 %" in str(ledger["kv_cache_quantization"]["reason"])
    assert ledger["kv_cache_quantization"]["starts_to_help_at"]
    assert "speculative_decoding" in ledger
    assert ledger["prefix_caching"]["reason"] == "it is in force already"


def test_raising_the_limit_comes_first_where_slots_are_missing() -> None:
    shares = {"queue.slots": 0.9, "decode.weights": 0.1}
    first = match(make_situation("queue.slots", OVERLOAD, shares), RULES).recommend[0]
    assert first["technique"] == "raise_max_num_seqs"
    assert first["flags"] == {"vllm": "--max-num-seqs <larger>"}
    assert first["ceiling"] == {"direct": 0.9, "induced": 0.0}


def test_prefix_caching_that_is_off_is_refused_by_the_share_of_prefill() -> None:
    signals = {**OVERLOAD, "prefix_caching": False}
    ledger = refused(
        match(
            make_situation(
                "queue.slots", signals, {"queue.slots": 0.9, "prefill.compute": 0.02, "decode.weights": 0.08}
            ),
            RULES,
        )
    )
    assert ledger["prefix_caching"]["number"] == 0.02
    assert "2 %" in str(ledger["prefix_caching"]["reason"])


@pytest.mark.parametrize("cause", ["kv.wait", "kv.preempt"])
def test_a_starved_pool(cause: str) -> None:
    shares = {"kv.wait": 0.5, "kv.preempt": 0.2, "decode.weights": 0.2, "prefill.compute": 0.1}
    matched = match(make_situation(cause, STARVED, shares), RULES)
    helpful = {
        "lower_max_num_seqs",
        "raise_gpu_memory_utilization",
        "add_gpu_memory",
        "kv_cache_quantization",
        "admission_control",
    }
    assert helpful & set(offered(matched))
    assert not {"raise_max_num_seqs", "speculative_decoding", "prefix_caching"} & set(offered(matched))
    assert "100 %" in str(refused(matched)["raise_max_num_seqs"]["reason"])


@pytest.mark.parametrize("cause", ["interference", "queue.budget"])
def test_prefill_that_stalls_others(cause: str) -> None:
    shares = {"interference": 0.45, "queue.budget": 0.2, "decode.weights": 0.2, "prefill.compute": 0.15}
    matched = match(make_situation(cause, MIXED, shares), RULES)
    helpful = {
        "cap_prefill_per_step",
        "interleave_decode_with_prefill",
        "prefill_decode_disaggregation",
        "fair_or_priority_scheduling",
        "shorten_prompt",
    }
    assert helpful & set(offered(matched))
    forbidden = {
        "raise_max_num_seqs",
        "kv_cache_quantization",
        "speculative_decoding",
        "raise_prefill_chunk",
        "weight_only_quantization",
    }
    assert not forbidden & set(offered(matched))


def test_chunked_prefill_is_not_offered_twice() -> None:
    matched = match(make_situation("interference", MIXED, {"interference": 0.6, "decode.weights": 0.4}), RULES)
    assert refused(matched)["interleave_decode_with_prefill"]["reason"] == "it is in force already"


def test_own_prefill_that_computes() -> None:
    signals: dict[str, Value] = {
        "device_has_fp8": True,
        "weight_bits": 16.0,
        "device_kind": "gpu",
        "input_tokens_p95": 6000.0,
        "prefix_caching": True,
        "prefix_reusable_ratio": 0.0,
    }
    shares = {"prefill.compute": 0.8, "decode.weights": 0.2}
    matched = match(make_situation("prefill.compute", signals, shares), RULES, limit=6)
    assert {"shorten_prompt", "tensor_parallel", "low_precision_compute"} <= set(offered(matched))
    assert not {
        "add_replicas",
        "raise_max_num_seqs",
        "speculative_decoding",
        "weight_only_quantization",
        "prefix_caching",
    } & set(offered(matched))


def test_a_faster_data_type_on_an_unknown_device_ranks_last_and_says_how_to_read_it() -> None:
    signals: dict[str, Value] = {"input_tokens_p95": 6000.0, "weight_bits": 16.0, "prefix_caching": True}
    matched = match(
        make_situation("prefill.compute", signals, {"prefill.compute": 0.8, "decode.weights": 0.2}), RULES, limit=20
    )
    item = next(i for i in matched.recommend if i["technique"] == "low_precision_compute")
    assert any("accelerator" in text for text in item["read_first"])  # type: ignore[attr-defined]
    known = [i["technique"] for i in matched.recommend if not i["read_first"]]
    assert offered(matched).index("low_precision_compute") > max(offered(matched).index(name) for name in known)


def test_decode_that_reads_weights() -> None:
    signals: dict[str, Value] = {
        "decode_batch_mean": 1.0,
        "weight_bits": 16.0,
        "speculation": False,
        "decode_weight_io_ratio": 0.97,
        "decode_kv_io_ratio": 0.03,
        "decode_bound": "bandwidth",
        "kv_dtype_bits": 16.0,
        "device_kind": "gpu",
        "offline_ratio": 1.0,
    }
    matched = match(
        make_situation("decode.weights", signals, {"decode.weights": 0.9, "prefill.compute": 0.1}), RULES, limit=10
    )
    assert {"weight_only_quantization", "speculative_decoding", "larger_decode_batch", "tensor_parallel"} <= set(
        offered(matched)
    )
    assert "kv_cache_quantization" not in offered(matched)
    assert "3 %" in str(refused(matched)["kv_cache_quantization"]["reason"])


def test_decode_that_reads_kv() -> None:
    signals: dict[str, Value] = {
        "decode_batch_mean": 128.0,
        "decode_kv_io_ratio": 0.82,
        "decode_weight_io_ratio": 0.18,
        "kv_dtype_bits": 16.0,
        "decode_bound": "bandwidth",
    }
    matched = match(make_situation("decode.kv", signals, {"decode.kv": 0.7, "decode.weights": 0.15}), RULES)
    assert offered(matched)[0] == "kv_cache_quantization"
    assert "weight_only_quantization" not in offered(matched)
    assert "18 %" in str(refused(matched)["weight_only_quantization"]["reason"])


@pytest.mark.parametrize("cause", ["decode.weights", "host", "prefill.compute", "queue.slots", "queue.capacity"])
def test_a_healthy_window_gets_no_capacity(cause: str) -> None:
    signals = {**OVERLOAD, "status": "healthy", "slots_full_ratio": 1.0}
    matched = match(make_situation(cause, signals, {cause: 0.6, "unexplained": 0.1, "decode.kv": 0.3}), RULES)
    assert not {"raise_max_num_seqs", "admission_control", "add_replicas", "autoscale_on_queue_depth"} & set(
        offered(matched)
    )


def test_missed_prefixes_are_restored_not_switched_on() -> None:
    signals: dict[str, Value] = {
        "prefix_caching": True,
        "prefix_hit_ratio": 0.02,
        "prefix_reusable_ratio": 0.95,
        "input_tokens_p95": 18000.0,
    }
    matched = match(make_situation("prefill.compute", signals, {"prefill.compute": 0.9}), RULES)
    assert "restore_prefix_cache_hits" in offered(matched)
    assert "prefix_caching" not in offered(matched)


def test_hits_that_are_there_need_no_repair() -> None:
    signals: dict[str, Value] = {"prefix_caching": True, "prefix_hit_ratio": 0.95, "prefix_reusable_ratio": 0.96}
    matched = match(
        make_situation("prefill.compute", signals, {"prefill.compute": 0.4, "decode.weights": 0.6}), RULES, limit=20
    )
    assert not {"restore_prefix_cache_hits", "prefix_caching"} & set(offered(matched))


# --- what a refusal says ------------------------------------------------------------------------------------------------------


def test_a_change_that_acts_but_spares_too_little_is_refused_by_its_ceiling() -> None:
    """11 % of a fifth of the time: the number that decides is what it could take, not what it acts on."""
    shares = {"prefill.compute": 0.2, "decode.weights": 0.15, "decode.kv": 0.65}
    matched = match(make_situation("prefill.compute", {"prefix_missed_ratio": 0.11}, shares), RULES)
    said = refused(matched)["prefix_caching"]
    assert said["number"] == pytest.approx(0.022)
    assert said["reason"] == "it acts on what was found, but could take at most 2.2 % of the affected time"
    assert said["starts_to_help_at"] == "when it could take 3 % of the affected time or more"


def test_no_refusal_claims_that_what_was_found_must_first_become_what_is_found() -> None:
    """The point from which a change starts to help never names the cause that holds the time already."""
    for cause in CLASS_OF_CAUSE:
        if cause == "unexplained":
            continue
        for signals in ({}, OVERLOAD, SHORT_POOL, SHORT_BUDGET, MIXED):
            for item in match(make_situation(cause, signals, {cause: 0.9, "decode.weights": 0.1}), RULES).will_not_help:
                starts = str(item["starts_to_help_at"])
                assert not (starts.endswith("is what makes requests slow") and cause in starts.split()), (cause, item)
                assert not (f"{cause}, stays as it is" in str(item["reason"]) and f"({cause}" in str(item["reason"])), (
                    item
                )


def test_a_technique_answers_the_classes_of_all_causes_it_acts_on() -> None:
    """Else the ledger would say of a change that it leaves alone what it acts on."""
    for technique in RULES.techniques.values():
        assert {CLASS_OF_CAUSE[cause] for cause in technique.acts_on} <= set(technique.categories), technique.id


def test_the_expected_interval_follows_how_likely_a_change_delivers() -> None:
    matched = match(
        make_situation("queue.slots", OVERLOAD, {"queue.slots": 0.9, "decode.weights": 0.1}), RULES, limit=9
    )
    found = {str(i["technique"]): i for i in matched.recommend}
    for name, item in found.items():
        ceiling, expected = item["ceiling"], item["expected"]
        assert isinstance(ceiling, dict)
        assert isinstance(expected, dict)
        total = min(1.0, ceiling["direct"] + (ceiling["induced"] or 0.0))
        unknown = len(item["read_first"])  # type: ignore[arg-type]
        likelihood = RULES.techniques[name].likelihood
        assert expected["low"] == pytest.approx(0.5 * likelihood * 0.7**unknown * total, rel=1e-4), name
        assert expected["high"] == pytest.approx(0.9 * total, rel=1e-4)
    assert found["raise_max_num_seqs"]["expected"] != found["admission_control"]["expected"]


# --- hardly any signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", [cause for cause in CLASS_OF_CAUSE if cause != "unexplained"])
def test_a_cause_alone_is_enough_to_answer(cause: str) -> None:
    matched = match(make_situation(cause, engine=None, version=None), RULES)
    assert 1 <= len(matched.recommend) <= 3
    for item in matched.recommend:
        if item["technique"] != "collect_missing_signals":
            assert cause in RULES.techniques[str(item["technique"])].acts_on
        assert item["ceiling"] == {"direct": None, "induced": None}
    json.dumps([matched.recommend, matched.will_not_help, matched.withheld], allow_nan=False)


def test_nothing_is_offered_for_an_external_wait_without_evidence() -> None:
    matched = match(make_situation("external"), RULES)
    assert offered(matched) == ["collect_missing_signals"]
    assert matched.recommend[0]["read_first"]
    assert {"disable_proxy_buffering", "fix_tool_latency"} <= {item["technique"] for item in matched.withheld}


def test_an_inconclusive_verdict_asks_for_signals_only() -> None:
    matched = match(make_situation(None, {}, primary="inconclusive"), RULES)
    assert offered(matched) == ["collect_missing_signals"]
    assert matched.will_not_help == []


def test_a_device_far_from_every_roof_is_to_be_checked() -> None:
    signals: dict[str, Value] = {"decode_over_roof_ratio": 60.0, "prefill_over_roof_ratio": 400.0}
    assert set(offered(match(make_situation(None, signals, primary="inconclusive"), RULES))) == {
        "collect_missing_signals",
        "check_device_health",
    }


def test_a_class_without_a_cause_is_matched_by_class() -> None:
    matched = match(make_situation(None, {"kv_usage_max_ratio": 1.0}, primary="kv"), RULES)
    assert offered(matched)
    assert all("kv" in RULES.techniques[str(name)].categories for name in offered(matched))


# --- order and shape ----------------------------------------------------------------------------------------------------------


def test_the_callers_candidates_come_first_unless_a_number_speaks_against_them() -> None:
    named: Sequence[str] = ("move_blocking_work_off_event_loop", "cuda_graphs")
    matched = match(make_situation("host", {"cuda_graphs": True}), RULES, candidates=named)
    assert offered(matched)[0] == "move_blocking_work_off_event_loop"
    assert "cuda_graphs" not in offered(matched)


def test_an_unknown_state_ranks_last() -> None:
    matched = match(make_situation("interference", {"long_prompt_ratio": 0.8}, {"interference": 0.8}), RULES, limit=20)
    unknown = [
        bool(item["read_first"])
        for item in matched.recommend
        if item["technique"]
        in ("interleave_decode_with_prefill", "prefill_decode_disaggregation", "fair_or_priority_scheduling")
    ]
    assert all(unknown)
    assert offered(matched)[0] in ("cap_prefill_per_step", "separate_pools")


def test_at_most_three_and_one_of_them_acts_on_the_waiting() -> None:
    matched = match(make_situation("queue.capacity", OVERLOAD, {"queue.capacity": 0.9, "decode.weights": 0.1}), RULES)
    assert len(matched.recommend) == 3
    assert any(RULES.techniques[str(name)].acts_on_waiting for name in offered(matched))
    assert len(matched.will_not_help) <= LEDGER_LIMIT


def test_the_current_value_and_its_source_are_shown() -> None:
    seen = {"max_num_seqs": Setting(8, "server_info")}
    matched = match(
        make_situation("queue.slots", OVERLOAD, {"queue.slots": 0.9, "decode.weights": 0.1}, settings=seen), RULES
    )
    first = next(i for i in matched.recommend if i["technique"] == "raise_max_num_seqs")
    assert first["current"] == {"setting": "max_num_seqs", "value": 8, "source": "server_info"}


def test_flags_are_those_of_the_engine_seen() -> None:
    shares = {"queue.slots": 0.9, "decode.weights": 0.1}
    sglang = match(make_situation("queue.slots", OVERLOAD, shares, engine="sglang", version="0.5.23"), RULES).recommend[
        0
    ]
    assert list(sglang["flags"]) == ["sglang"]  # type: ignore[call-overload]
    both = match(make_situation("queue.slots", OVERLOAD, shares, engine=None, version=None), RULES).recommend[0]
    assert list(both["flags"]) == ["vllm", "sglang"]  # type: ignore[call-overload]
    other = match(make_situation("queue.slots", OVERLOAD, shares, engine="tgi", version="3"), RULES).recommend[0]
    assert other["flags"] == {}


def test_the_shape_of_the_verdict() -> None:
    matched = match(make_situation("queue.slots", OVERLOAD, {"queue.slots": 0.9, "decode.weights": 0.1}), RULES)
    wanted = {
        "technique",
        "title",
        "ceiling",
        "expected",
        "flags",
        "current",
        "risk",
        "output_effect",
        "does_not_change",
        "requires_with",
        "why",
    }
    for item in matched.recommend:
        assert wanted <= set(item)
        assert item["expected"]["source"] == "model estimate"  # type: ignore[index]
        assert 0 <= item["expected"]["low"] <= item["expected"]["high"] <= 1  # type: ignore[index]
    for item in matched.will_not_help:
        assert {"technique", "title", "reason", "number", "starts_to_help_at"} == set(item)
        assert item["reason"]


def test_the_same_situation_gives_the_same_bytes() -> None:
    shares = {"queue.slots": 0.7, "queue.capacity": 0.2, "decode.weights": 0.1}
    turned = dict(reversed(list(shares.items())))
    first, second = (
        json.dumps(match(make_situation("queue.slots", OVERLOAD, s), RULES).recommend) for s in (shares, turned)
    )
    assert first == second
