"""Documents that are not phasewise-summary/1 are refused with the field and what to do about it."""

from __future__ import annotations

import json

import pytest
from shared_data import shared_path
from summary_documents import make_summary

from phasewise.analyzer.summary import validate_summary
from phasewise.analyzer.summary.document import SCHEMA_PATH
from phasewise.rules.errors import InputError


@pytest.mark.parametrize(
    ("document", "field", "hint"),
    [
        (make_summary(observed={"ttft_ms": 5}), "observed.ttft_ms", "ttft_"),
        (make_summary(observed={"tfft_p50_ms": 5}), "observed.tfft_p50_ms", "did you mean 'ttft_p50_ms'"),
        (make_summary(engine={"max_num_seq": 5}), "engine.max_num_seq", "did you mean 'max_num_seqs'"),
        (make_summary(surprise={}), "surprise", "is no field"),
        (make_summary(observed={"kv_cache_usage_ratio": 93}), "observed.kv_cache_usage_ratio", "unit"),
        (make_summary(observed={"ttft_p50_ms": -1}), "observed.ttft_p50_ms", "below 0"),
        (make_summary(observed={"ttft_p50_ms": "fast"}), "observed.ttft_p50_ms", "not of type number"),
        (make_summary(observed={"ttft_p50_ms": float("inf")}), "observed.ttft_p50_ms", "finite"),
        (make_summary(sweep=[{"ttft_p50_ms": float("nan")}]), "sweep[0].ttft_p50_ms", "finite"),
        (make_summary(workload={"arrival": "sometimes"}), "workload.arrival", "closed_loop"),
        (make_summary(baseline={"ttft_p50_ms": 3}), "baseline.differs", "is missing"),
        (make_summary(arms=[{"differs": {}}]), "arms[0].name", "is missing"),
        (make_summary(baseline={"differs": {"concurrency": 4}}), "baseline.differs", "workload.concurrency"),
        (make_summary(stages=[{"name": "a", "kind": "waiting"}]), "stages[0].kind", "queue"),
        ({**make_summary(), "schema": "phasewise-summary/2"}, "schema", "phasewise-summary/1"),
        ({"id": "no schema"}, "schema", "phasewise-summary/1"),
        ({k: v for k, v in make_summary().items() if k != "observed"}, "observed", "is missing"),
        ({k: v for k, v in make_summary().items() if k != "id"}, "id", "is missing"),
    ],
)
def test_a_wrong_document_is_refused_by_field(document: dict[str, object], field: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_summary(document)
    assert caught.value.field == field
    assert hint in str(caught.value)


@pytest.mark.parametrize("document", [[], "text", None, 3])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(InputError, match="not a JSON object"):
        validate_summary(document)


def test_the_message_names_the_place_it_came_from() -> None:
    with pytest.raises(InputError, match=r"runs.jsonl:3: observed.nope"):
        validate_summary(make_summary(observed={"nope": 1}), "runs.jsonl:3")


def test_the_packaged_schema_is_the_published_one() -> None:
    published = json.loads(shared_path("cases", "summary.schema.json").read_text(encoding="utf-8"))
    assert json.loads(SCHEMA_PATH.read_text(encoding="utf-8")) == published
