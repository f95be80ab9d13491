"""What may not be said: causes that do not explain the wait, confidence that the numbers do not carry, shares beside the measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from summary_documents import make_summary

from phasewise.analyzer.summary import explain_summary
from phasewise.analyzer.summary.boundary import outside_s, outside_share
from phasewise.analyzer.summary.hypothesis import Evidence, nothing_waits, supported
from phasewise.analyzer.summary.reader import read_summary
from phasewise.rules.load import Rulebook, load_rulebook

CARD = {"kind": "gpu", "count": 1, "memory_bandwidth_gb_per_s": 1500, "peak_bf16_dense_tflops": 300}
DENSE = {"params_b": 9, "weight_dtype": "bf16"}  # 18 GB: 12 ms a step at the roof
AT_THE_ROOF = {"ttft_p50_ms": 60, "tpot_p50_ms": 16, "e2e_p50_ms": 4800}


@cache
def rules() -> Rulebook:
    return load_rulebook()


def explain(**sections: object) -> dict[str, object]:
    return explain_summary(make_summary("made", **sections), rules())


def level(verdict: Mapping[str, object]) -> object:
    confidence = verdict["confidence"]
    assert isinstance(confidence, dict)
    return confidence["level"]


def share(verdict: Mapping[str, object], cause: str) -> float:
    shares = verdict["shares"]
    assert isinstance(shares, dict)
    return float(shares.get(cause, 0.0))


def missing(verdict: Mapping[str, object]) -> list[str]:
    told = verdict["missing"]
    assert isinstance(told, list)
    return [str(one["signal"]) for one in told]


# --- views of one run that disagree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["observed", "server"])
@pytest.mark.parametrize("times", [3, 10, 40])
def test_what_the_engine_does_not_hold_is_not_the_engine(inside: str, times: float) -> None:
    """Decode at the memory roof explains the engine's 4.8 s, not what the client waits beyond them."""
    views: dict[str, object] = {"observed": AT_THE_ROOF} if inside == "observed" else {
        "observed": {"tpot_p50_ms": 16},
        "server": AT_THE_ROOF,
    }  # fmt: skip
    verdict = explain(
        hardware=CARD,
        model=DENSE,
        workload={"concurrency": 1, "input_tokens": 250, "output_tokens": 297},
        client={"e2e_p50_ms": 4800 * times},
        **views,
    )
    assert verdict["primary"] in ("external", "inconclusive")
    assert verdict["status"] != "healthy"
    assert "the boundaries between client and server" in missing(verdict)


def test_views_that_agree_leave_the_engine_its_cause() -> None:
    verdict = explain(
        hardware=CARD,
        model=DENSE,
        workload={"concurrency": 1, "input_tokens": 250, "output_tokens": 297},
        observed=AT_THE_ROOF,
        client={"e2e_p50_ms": 4900},
    )
    assert verdict["primary"] == "bandwidth"


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ({"ttft_p50_ms": 6200, "e2e_p50_ms": 9100}, {"ttft_p50_ms": 50, "e2e_p50_ms": 2900}),
        ({"e2e_p50_ms": 9100}, {"ttft_p50_ms": 18, "e2e_p50_ms": 2900}),
        ({"ttft_p50_ms": 6200}, {"ttft_p50_ms": 18}),
    ],
)
def test_preparation_that_is_shorter_than_the_gap_is_not_the_cause(
    client: dict[str, float], server: dict[str, float]
) -> None:
    verdict = explain(
        workload={"concurrency": 6},
        observed={"frontend_p50_ms": 9, "queue_p50_ms": 1, "requests_waiting": 0},
        client=client,
        server=server,
    )
    assert verdict["primary"] in ("external", "inconclusive")
    assert "the boundaries between client and server" in missing(verdict)


def test_preparation_that_explains_the_gap_is() -> None:
    verdict = explain(
        workload={"concurrency": 6},
        observed={"frontend_p50_ms": 5600, "requests_waiting": 0},
        client={"ttft_p50_ms": 6200},
        server={"ttft_p50_ms": 400},
    )
    assert verdict["primary"] == "context"


def test_the_gap_between_two_views_is_a_share_of_what_the_client_waits() -> None:
    summary = read_summary(make_summary(client={"e2e_p50_ms": 8000}, server={"e2e_p50_ms": 2000}))
    assert outside_share(summary) == 0.75
    assert outside_s(summary) == 6.0
    alone = read_summary(make_summary(observed={"e2e_p50_ms": 8000}))
    assert outside_share(alone) is None and outside_s(alone) == 0.0


# --- nothing, or little, was measured --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [90, 300, 2000])
def test_settings_alone_make_nothing_slow(load: int) -> None:
    verdict = explain(engine={"name": "vllm", "max_num_seqs": 48}, workload={"concurrency": load}, observed={})
    assert verdict["status"] == "unknown"
    assert level(verdict) in ("low", "insufficient")


QUEUED = {"queue_p50_ms": 5400, "e2e_p50_ms": 7200, "requests_running": 16, "requests_waiting": 40, "kv_cache_usage_ratio": 0.3}  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "levels"),
    [(1, {"low", "insufficient"}), (2, {"low", "insufficient"}), (6, {"low", "medium"}), (50, {"high"}), (None, {"high"})],
)  # fmt: skip
def test_confidence_needs_requests(samples: int | None, levels: set[str]) -> None:
    verdict = explain(
        engine={"max_num_seqs": 16}, workload={"concurrency": 56}, observed={**QUEUED, "samples_count": samples}
    )
    assert verdict["primary"] == "queueing"
    assert level(verdict) in levels


@pytest.mark.parametrize("queue_ms", [3800.0, 5400.0, 6500.0])
@pytest.mark.parametrize("ttft_ms", [None, 6900.0])
def test_a_measured_share_is_the_share(queue_ms: float, ttft_ms: float | None) -> None:
    verdict = explain(
        engine={"max_num_seqs": 16},
        workload={"concurrency": 20, "arrival": "closed_loop"},
        observed={**QUEUED, "queue_p50_ms": queue_ms, "ttft_p50_ms": ttft_ms},
    )
    assert share(verdict, str(verdict["cause"])) == pytest.approx(queue_ms / 7200, abs=1e-5)


# --- an explanation must hold the time -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttft_ms", "primary"), [(70, "bandwidth"), (5200, "inconclusive")])
def test_decode_at_the_roof_does_not_explain_a_late_start(ttft_ms: float, primary: str) -> None:
    """300 tokens of prompt take 18 ms of arithmetic; five seconds before the first token are something else."""
    verdict = explain(
        hardware=CARD,
        model=DENSE,
        workload={"concurrency": 4, "input_tokens": 300, "output_tokens": 300},
        observed={"ttft_p50_ms": ttft_ms, "tpot_p50_ms": 16},
    )
    assert verdict["primary"] == primary


def test_a_pace_without_the_rest_of_the_request_is_named_with_low_confidence() -> None:
    verdict = explain(hardware=CARD, model=DENSE, workload={"concurrency": 1}, observed={"tpot_p50_ms": 14})
    assert verdict["primary"] == "bandwidth"
    assert level(verdict) == "low"


@pytest.mark.parametrize(
    ("usage", "primary"), [(None, "inconclusive"), (0.4, "queueing"), (0.97, "kv")], ids=["unknown", "free", "full"]
)
def test_requests_that_wait_beside_free_slots_wait_for_something_else(usage: float | None, primary: str) -> None:
    verdict = explain(
        engine={"max_num_seqs": 200},
        observed={"requests_running": 14, "requests_waiting": 33, "kv_cache_usage_ratio": usage},
    )
    assert verdict["primary"] == primary


@pytest.mark.parametrize(
    ("longest", "primary"), [(2048, "queueing"), (60000, "kv")], ids=["empty pool", "reserved contexts"]
)
def test_a_lowered_slot_limit_is_memory_only_where_memory_made_it(longest: int, primary: str) -> None:
    verdict = explain(
        engine={"max_num_seqs": 96, "effective_max_num_seqs": 2, "kv_pool_tokens": 120000, "max_model_len": longest},
        workload={"concurrency": 40, "arrival": "burst"},
        observed={"requests_running": 2, "requests_waiting": 38, "kv_cache_usage_ratio": 0.05, "ttft_p50_ms": 30000},
    )
    assert verdict["primary"] == primary


def test_a_queue_time_needs_no_time_to_first_token() -> None:
    verdict = explain(engine={"name": "tgi"}, observed={"queue_p50_ms": 7000, "e2e_p50_ms": 11000})
    assert verdict["primary"] == "queueing"


# --- signs -----------------------------------------------------------------------------------------------------------


def test_a_sign_that_is_absent_changes_nothing() -> None:
    evidence: list[Evidence] = []
    busy = read_summary(make_summary(observed={"requests_waiting": 3}))
    assert supported(0.5, evidence, 0.4, nothing_waits(busy)) == 0.5 and not evidence
    unknown = read_summary(make_summary(observed={}))
    assert supported(0.5, evidence, 0.4, nothing_waits(unknown)) == 0.5 and not evidence
    idle = read_summary(make_summary(observed={"requests_waiting": 0}))
    assert supported(0.5, evidence, 0.4, nothing_waits(idle)) == pytest.approx(0.7) and len(evidence) == 1
