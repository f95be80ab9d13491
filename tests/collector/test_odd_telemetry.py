"""Payloads as odd senders make them (shared/cases/telemetry), through the HTTP front, journal and writer to rows and verdicts."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from odd_cases import Reply, has_links, in_pieces, outcome_of
from odd_expectations import avoids, read
from shared_data import shared_path, shared_root
from writing import NOW

from phasewise.collector.otlp_json import json_to_protobuf

CASES = sorted(shared_root().glob("cases/telemetry/T*.json"))
LEAST_CASES = 15
# What still differs, with the reason: (case, key of `expected`) -> why. A key listed here that comes right fails the test.
DIFFERS: dict[tuple[str, str], str] = {}


def load(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(tmp_path: Path, path: Path) -> None:
    told = outcome_of(load(path), tmp_path)
    wrong = {key: found for key, found in read(told).items() if found}
    known = {key for name, key in DIFFERS if name == path.stem}
    assert {key: found for key, found in wrong.items() if key not in known} == {}
    assert known <= set(wrong), f"come right: {sorted(known - set(wrong))}"
    assert told.unharmed and told.broken_traces == 0
    assert told.cut_reply.status == 400 and told.cut_reply.message


LINKED = [path for path in CASES if has_links(load(path))]


@pytest.mark.parametrize(
    "path",
    [*LINKED[:1], *(pytest.param(path, marks=pytest.mark.slow) for path in LINKED[1:])],
    ids=lambda path: path.stem,
)
def test_linked_spans_say_the_same_whenever_they_come(tmp_path: Path, path: Path) -> None:
    """Each alone, minutes apart, a child before its parent: long after the first was settled, and judged."""
    told = outcome_of(in_pieces(load(path)), tmp_path, pause_s=200.0)
    wrong = {key: found for key, found in read(told).items() if found}
    assert {key: found for key, found in wrong.items() if (path.stem, key) not in DIFFERS} == {}


def test_what_goes_wrong_is_seen(tmp_path: Path) -> None:
    told = outcome_of(load(shared_path("cases", "telemetry", "T007.json")), tmp_path)
    late = {name: {**span, "start_unix_ns": span["start_unix_ns"] + 1} for name, span in told.spans.items()}
    bad = {name: {**row, "queue_s": -0.28, "quality": None} for name, row in told.rows.items()}
    broken = replace(told, replies=(Reply(500, {}),), archived=1, spans=late, rows=bad)
    wrong = {key for key, found in read(broken).items() if found}
    assert wrong == {"http_status", "stored_spans", "flags", "normalized", "must_not"}
    lost = replace(broken, spans={})
    words = ("negative_queue", "adjust_raw_times_in_storage", "crash", "http_500")
    assert not any(avoids(broken, word) for word in words) and not avoids(lost, "drop_span")


def test_a_case_may_be_told_in_protobuf(tmp_path: Path) -> None:
    case = load(shared_path("cases", "telemetry", "T001.json"))
    body = base64.b64encode(json_to_protobuf(json.dumps(case["requests"][0]["body"]).encode(), "traces"))
    request = {"body_base64": body.decode(), "content_type": "application/x-protobuf"}
    told = outcome_of({**case, "requests": [request]}, tmp_path)
    assert [one.span_id for one in told.sent] == list(told.spans)
    assert not any(read(told).values()) and told.cut_reply.message


def test_the_cases_are_there() -> None:
    shared_path("cases", "telemetry")
    assert len(CASES) >= LEAST_CASES


def test_what_nobody_reads_is_an_error(tmp_path: Path) -> None:
    case = {
        "transport": {"content_type": "application/json"},
        "requests": [{"body": {}}],
        "expected": {"http_status": 200, "phase_of_the_moon": "full"},
    }
    told = outcome_of(case, tmp_path)
    with pytest.raises(KeyError, match="phase_of_the_moon"):
        read(told)
    with pytest.raises(KeyError, match="lose_the_cat"):
        avoids(told, "lose_the_cat")


def test_the_clock_of_these_tests_is_later_than_the_cases() -> None:
    assert NOW > 1_768_435_500 * 10**9
