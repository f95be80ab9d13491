"""The pieces below the verdict: units, settings, the machine's limits, weighing, shares."""

from __future__ import annotations

import math

import pytest
from summary_documents import make_summary

from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, either
from phasewise.analyzer.summary.machine import dtype_bits, read_machine
from phasewise.analyzer.summary.points import finite, near, ratio
from phasewise.analyzer.summary.reader import read_summary
from phasewise.analyzer.summary.shares import shares_of
from phasewise.analyzer.summary.verdict import decide
from phasewise.rules.load import load_rulebook


def hypothesis(cause: str, strength: float, symptoms: frozenset[str] = frozenset(), against: int = 0) -> Hypothesis:
    signs = [Evidence("n", 1.0, None, "count", "observed.n", "for")]
    signs += [Evidence(f"a{i}", 1.0, None, "count", "observed.a", "against", "against") for i in range(against)]
    return Hypothesis(cause, cause, strength, "said", tuple(signs), symptoms=symptoms)


def test_milliseconds_become_seconds_at_the_edge() -> None:
    summary = read_summary(make_summary(observed={"ttft_p50_ms": 1500, "queue_p99_ms": 20}))
    assert summary.observed.seconds("ttft_p50") == 1.5
    assert summary.seconds("queue_p99") == 0.02


def test_a_comparison_overrides_single_settings() -> None:
    document = make_summary(
        engine={"max_num_seqs": 8, "name": "vllm"},
        observed={},
        sweep=[{"differs": {"engine.max_num_seqs": 32}}],
    )
    summary = read_summary(document)
    assert summary.count("engine.max_num_seqs") == 8
    assert summary.sweep[0].count("engine.max_num_seqs") == 32
    assert summary.sweep[0].text("engine.name") == "vllm"


def test_a_series_holds_only_runs_that_differ_in_that_number() -> None:
    document = make_summary(
        workload={"concurrency": 4},
        observed={"ttft_p50_ms": 4},
        sweep=[
            {"differs": {"workload.concurrency": 16}, "ttft_p50_ms": 16},
            {"differs": {"workload.concurrency": 8, "engine.version": "2"}, "ttft_p50_ms": 8},
            {"differs": {"workload.concurrency": 2}, "view": "server", "ttft_p50_ms": 2},
        ],
    )
    assert [load for load, _ in read_summary(document).series("workload.concurrency")] == [4, 16]


def test_lengths_of_a_group_come_from_the_group() -> None:
    document = make_summary(
        workload={"input_tokens": 100, "groups": [{"name": "long", "input_tokens": 9000}, {"name": "short"}]},
        observed={"group": "long"},
        requests=[{"group": "short"}, {"group": "long", "input_tokens": 7}],
    )
    summary = read_summary(document)
    assert summary.input_tokens == 9000
    assert [p.input_tokens for p in summary.requests] == [100, 7]


@pytest.mark.parametrize(
    ("text", "bits"),
    [("bf16", 16), ("FP8", 8), ("Model-27B W4A16", 4.5), ("NVFP4", 4.5), ("4.25bpw", 4.25), ("f16", 16), ("Q8_0", 8), ("exotic", None), (None, None)],
)  # fmt: skip
def test_data_types_by_any_name(text: str | None, bits: float | None) -> None:
    assert dtype_bits(text) == bits


def test_the_floor_of_a_decode_step_is_bytes_over_bandwidth() -> None:
    document = make_summary(
        hardware={"kind": "gpu", "memory_bandwidth_gb_per_s": 1000},
        model={"params_b": 10, "weight_dtype": "bf16", "kv_bytes_per_token": 100000},
    )
    machine = read_machine(read_summary(document), load_rulebook())
    assert machine.floor_s() == pytest.approx(0.020)
    assert machine.floor_s(batch=10, context_tokens=1000) == pytest.approx(0.021)


def test_tensor_parallel_ranks_share_the_bytes_and_layer_splits_do_not() -> None:
    hardware = {"kind": "gpu", "count": 4, "memory_bandwidth_gb_per_s": 1000}
    model = {"weight_gb": 40}
    shared = read_summary(make_summary(hardware=hardware, model=model, engine={"tensor_parallel": 4}))
    split = read_summary(make_summary(hardware=hardware, model=model, engine={"pipeline_parallel": 4}))
    assert read_machine(shared, load_rulebook()).floor_s() == pytest.approx(0.010)
    assert read_machine(split, load_rulebook()).floor_s() == pytest.approx(0.040)


def test_a_large_model_that_does_not_tell_its_active_part_has_no_floor_to_rely_on() -> None:
    document = make_summary(model={"name": "unheard-of", "params_b": 400, "weight_dtype": "fp8"})
    machine = read_machine(read_summary(document), load_rulebook())
    assert machine.read_low_bytes != machine.read_high_bytes or machine.read_low_bytes is None


def test_the_estimate_of_a_pool_is_what_the_weights_leave() -> None:
    document = make_summary(
        hardware={"kind": "gpu", "memory_gb": 80},
        model={"weight_gb": 16, "kv_bytes_per_token": 131072},
        engine={"gpu_memory_utilization": 0.9},
    )
    machine = read_machine(read_summary(document), load_rulebook())
    assert machine.pool_estimate_tokens(0.9) == pytest.approx((72e9 - 16e9 - 3.5e9) / 131072)


@pytest.mark.parametrize("value", [True, "3", None, [], {}])
def test_only_numbers_are_numbers(value: object) -> None:
    assert finite(value) is None


def test_magnitudes_are_clipped_so_that_products_stay_finite() -> None:
    largest = finite(10**400)
    assert largest is not None and math.isfinite(largest**8)
    assert finite(5e-324) == 0.0


def test_unknown_stays_unknown_in_arithmetic() -> None:
    assert ratio(1.0, None) is None and ratio(None, 1.0) is None and ratio(1.0, 0.0) is None
    assert not near(None, 1.0, 0.5) and not near(0.0, 0.0, 0.5)


def test_signs_together_are_stronger_than_each() -> None:
    assert either(0.5, 0.5) == 0.75
    assert either() == 0.0


def test_the_strongest_explanation_wins_with_a_lead() -> None:
    decision = decide([hypothesis("kv.wait", 0.8), hypothesis("queue.slots", 0.5)])
    assert decision.winner is not None and decision.winner.cause == "kv.wait"


def test_two_that_explain_equally_well_are_no_verdict() -> None:
    decision = decide([hypothesis("kv.wait", 0.7), hypothesis("host", 0.68)])
    assert decision.winner is None and "equally well" in decision.reason


def test_a_symptom_does_not_compete_with_what_makes_it() -> None:
    pool = hypothesis("kv.wait", 0.75, symptoms=frozenset({"queueing"}))
    decision = decide([pool, hypothesis("queue.slots", 0.72)])
    assert decision.winner is not None and decision.winner.cause == "kv.wait"
    weaker = hypothesis("kv.wait", 0.5, symptoms=frozenset({"queueing"}))
    assert (left := decide([weaker, hypothesis("queue.slots", 0.8)]).winner) is not None and left.cause == "queue.slots"


def test_weak_signs_and_two_against_are_no_verdict() -> None:
    assert decide([hypothesis("host", 0.4)]).winner is None
    assert decide([hypothesis("host", 0.55, against=2)]).winner is None
    assert decide([]).winner is None


def test_shares_hold_the_winner_the_measured_phases_and_the_rest() -> None:
    document = make_summary(
        workload={"output_tokens": 101},
        observed={"ttft_p50_ms": 6000, "tpot_p50_ms": 40, "e2e_p50_ms": 10000, "prefill_p50_ms": 1000},
    )
    winner = Hypothesis("queue.slots", "slot_limit", 0.8, "", (), share=0.8, phase="ttft")
    shares = shares_of(read_summary(document), winner)
    assert shares == {"queue.slots": 0.48, "prefill.compute": 0.1, "unexplained": 0.42}
    assert shares_of(read_summary(make_summary()), None) == {"unexplained": 1.0}
