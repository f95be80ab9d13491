"""Whatever document the schema allows: an answer, in the shape every reader expects, and the same one each time."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import HealthCheck, given, settings
from summary_documents import make_summary, summaries
from thorough import examples

from phasewise.analyzer.summary import explain_summary, validate_summary
from phasewise.rules.load import Rulebook, load_rulebook
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES

KEYS = {
    "id", "status", "objective", "window", "requests", "affected", "primary", "cause", "shares", "explained_ratio",
    "confidence", "evidence", "recommend", "will_not_help", "missing", "verify", "stage", "examples", "provenance",
}  # fmt: skip
WITHOUT_A_CAUSE = {"collect_missing_signals", "check_device_health"}


@cache
def rules() -> Rulebook:
    return load_rulebook()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(summaries())
def test_any_document_of_the_format_gets_a_whole_verdict(document: dict[str, object]) -> None:
    validate_summary(document)
    verdict = explain_summary(document, rules())
    json.dumps(verdict, allow_nan=False)
    assert verdict.keys() >= KEYS
    assert verdict["id"] == document["id"]
    primary, cause = verdict["primary"], verdict["cause"]
    assert primary in CLASSES
    assert (cause is None) == (primary == "inconclusive")
    assert cause is None or CLASS_OF_CAUSE[str(cause)] == primary
    shares = verdict["shares"]
    assert isinstance(shares, dict) and set(shares) <= set(CAUSES)
    assert abs(sum(shares.values()) - 1) < 1e-6 and min(shares.values()) >= 0
    recommend = verdict["recommend"]
    assert isinstance(recommend, list) and len(recommend) <= 3
    offered = {one["technique"] for one in recommend}
    assert primary != "inconclusive" or offered <= WITHOUT_A_CAUSE
    refused = verdict["will_not_help"]
    assert isinstance(refused, list) and not offered & {one["technique"] for one in refused}
    confidence = verdict["confidence"]
    assert isinstance(confidence, dict)
    assert confidence["level"] in ("high", "medium", "low", "insufficient")
    assert (confidence["level"] == "insufficient") == (primary == "inconclusive")


def test_a_whole_number_of_any_length_is_shown() -> None:
    point = {"ttft_p50_ms": 300.0, "e2e_p50_ms": 1300.0, "samples_count": 100}
    document = {
        "schema": "phasewise-summary/1",
        "id": "long",
        **{section: {} for section in ("hardware", "engine", "model")},
        "workload": {"input_tokens": 100, "output_tokens": 100},
        "observed": {"ttft_p50_ms": 9000.0, "e2e_p50_ms": 10_000.0, "samples_count": 100},
        "arms": [{"name": "long", "differs": {"engine.extra_flags.x": 10**400}, **point}],
    }
    validate_summary(document)
    assert explain_summary(document, rules())["id"] == "long"


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(summaries())
def test_the_same_document_gets_the_same_answer(document: dict[str, object]) -> None:
    again = json.loads(json.dumps(document))
    assert json.dumps(explain_summary(document, rules())) == json.dumps(explain_summary(again, rules()))


def test_nothing_known_is_no_verdict() -> None:
    verdict = explain_summary(make_summary("empty"), rules())
    assert (verdict["primary"], verdict["status"], verdict["shares"]) == (
        "inconclusive",
        "unknown",
        {"unexplained": 1.0},
    )
    assert verdict["missing"], "it names what to collect"


def test_null_is_unknown_and_not_zero() -> None:
    observed = {"requests_waiting": None, "ttft_p50_ms": None, "kv_cache_usage_ratio": None}
    with_nulls = explain_summary(make_summary("x", observed=observed, client={"ttft_p50_ms": None}), rules())
    without = explain_summary(make_summary("x", client={}), rules())
    assert with_nulls == without
