from __future__ import annotations

from pathlib import Path

import captures
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from shared_data import shared_path

from phasewise.dashboard.commands.recording import (
    DATASET,
    NAMES,
    Scrape,
    Traces,
    instance_of,
    load,
    moved_page,
    replayed,
    scrape_line,
)

SALT = bytes(range(16))


def spans(body: bytes) -> list[object]:
    request = ExportTraceServiceRequest.FromString(body)
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_the_recordings_unchanged(name: str) -> None:
    folder = shared_path("captures", name)
    recording = load(name)
    bodies = [event.body for event in recording.events if isinstance(event, Traces)]
    pages = [(event.unix_ns, event.text) for event in recording.events if isinstance(event, Scrape)]
    assert bodies == [body for _, body in captures.bodies(folder)]
    assert pages == list(captures.scrapes(folder))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_holds_as_many_requests_as_its_facts_say(name: str) -> None:
    recording = load(name)
    found = [span for event in recording.events if isinstance(event, Traces) for span in spans(event.body)]
    assert len(found) == recording.facts.requests
    assert list(recording.events) == sorted(recording.events, key=lambda event: event.unix_ns)
    assert "expect" not in recording.facts.text


def test_a_replay_moves_times_keeps_durations_and_gives_new_ids() -> None:
    body = next(event.body for event in load(NAMES[0]).events if isinstance(event, Traces))
    moved = replayed(body, 10**12, SALT, {DATASET: "x", "service.instance.id": "replay-1"})
    for before, after in zip(spans(body), spans(moved), strict=True):
        assert isinstance(before, type(after))
        assert after.start_time_unix_nano - before.start_time_unix_nano == 10**12  # type: ignore[attr-defined]
        assert after.end_time_unix_nano - before.end_time_unix_nano == 10**12  # type: ignore[attr-defined]
        assert after.trace_id != before.trace_id and len(after.trace_id) == 16  # type: ignore[attr-defined]
        assert after.span_id != before.span_id and len(after.span_id) == 8  # type: ignore[attr-defined]
        assert after.parent_span_id == before.parent_span_id == b""  # type: ignore[attr-defined]
        assert after.attributes == before.attributes  # type: ignore[attr-defined]
    assert instance_of(moved) == "replay-1"


def test_a_child_keeps_its_parent_under_the_new_ids() -> None:
    request = ExportTraceServiceRequest()
    added = request.resource_spans.add().scope_spans.add().spans
    added.add(trace_id=b"t" * 16, span_id=b"p" * 8, name="parent")
    added.add(trace_id=b"t" * 16, span_id=b"c" * 8, parent_span_id=b"p" * 8, name="child")
    parent, child = spans(replayed(request.SerializeToString(), 0, SALT, {}))
    assert child.parent_span_id == parent.span_id  # type: ignore[attr-defined]
    assert child.trace_id == parent.trace_id  # type: ignore[attr-defined]


def test_a_page_moves_its_own_times_and_nothing_else() -> None:
    page = (
        'process_start_time_seconds 1000.5\nx_created{a="b"} 2000.0\nx_total{a="b"} 3000.0\n# HELP x_created text 5\n'
    )
    moved = moved_page(page, 100 * 10**9)
    assert moved.splitlines() == [
        "process_start_time_seconds 1100.5",
        'x_created{a="b"} 2100.0',
        'x_total{a="b"} 3000.0',
        "# HELP x_created text 5",
    ]


def test_a_scrape_line_is_one_line() -> None:
    assert scrape_line(1, "a 1\nb 2\n", "i").count(b"\n") == 1


def test_samples_stay_small() -> None:
    from importlib import resources

    folder = resources.files("phasewise.dashboard.samples")
    assert sum(len(path.read_bytes()) for path in folder.iterdir() if path.is_file()) < 400_000
    assert {Path(str(path)).name for path in folder.iterdir()} >= {f"{name}.json" for name in NAMES}
