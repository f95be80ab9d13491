"""Prompts that a server keeps: shown and exported to who may see them, and every look is in the audit log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import attributed, make_request, request_table
from plotly.utils import PlotlyJSONEncoder
from stocked import NOW_UNIX_NS, Served

from phasewise.collector.access import Caller, Door
from phasewise.collector.access_keys import KeyFile, new_key
from phasewise.collector.archive import SpanArchive
from phasewise.dashboard import access
from phasewise.dashboard.access import Posture
from phasewise.dashboard.exporting import of_bytes
from phasewise.dashboard.pages import trace

CANARY = "the quick brown canary"


@pytest.mark.parametrize(
    ("scopes", "seen", "kept"),
    [
        (None, True, True),
        (("read",), False, True),
        (("read",), False, False),  # kept by an earlier run, and there still
        (("admin",), False, True),
        (("read", "content"), True, True),
    ],
)
def test_kept_prompts_are_shown_to_few(
    serve: Callable[..., Served],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scopes: tuple[str, ...] | None,
    seen: bool,
    kept: bool,
) -> None:
    import pyarrow as pa
    from span_tables import span_table

    data = tmp_path / "data-0"
    data.mkdir()
    served = serve(filled=False, posture=Posture(Door(data, "test"), "127.0.0.1", content=kept))
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([attributed(make_request(at_s=1))]))
    attributes = json.dumps({"gen_ai.input.messages": CANARY, "kept": 1})
    spans = span_table([{"name": "llm_request", "start_s": 0, "end_s": 1}])
    index = spans.schema.get_field_index("attributes")
    spans = spans.set_column(index, spans.schema.field(index), pa.array([attributes], pa.string()))
    monkeypatch.setattr(SpanArchive, "trace", lambda *_: spans)
    key = new_key(scopes, now_unix_ns=NOW_UNIX_NS)[0] if scopes else None
    before = access._CALLER.set(Caller(key))
    try:
        row: Any = {"trace_id": "a" * 32, "request_key": "k1"}
        told = json.dumps(trace._raw(served.app.state.answers, row), cls=PlotlyJSONEncoder)
    finally:
        access._CALLER.reset(before)
    assert (CANARY in told) == seen and "kept" in told
    assert ("content removed: 22 bytes" in told) == (not seen)
    path = data / "audit.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    expected = [
        {"unix_ns": NOW_UNIX_NS, "action": "content_access", "detail": "k1"} | ({"key_id": key.key_id} if key else {})
    ]
    assert lines == (expected if seen else [])


@pytest.mark.parametrize(("scope", "seen"), [("read", False), ("admin", False), ("read,content", True)])
def test_kept_prompts_are_exported_to_few(serve: Callable[..., Served], tmp_path: Path, scope: str, seen: bool) -> None:
    import pyarrow as pa
    from span_tables import span_table

    data = tmp_path / "data-0"
    data.mkdir()
    key, token = new_key(tuple(scope.split(",")), now_unix_ns=NOW_UNIX_NS)
    KeyFile(data).add(key)
    door = Door(data, "test", clock=lambda: NOW_UNIX_NS)
    served = serve(filled=False, posture=Posture(door, "127.0.0.1", content=True))
    spans = span_table([{"name": "llm_request", "start_s": 0, "end_s": 1}])
    index = spans.schema.get_field_index("attributes")
    told = json.dumps({"gen_ai.input.messages": CANARY, "kept": 1})
    SpanArchive(data).write(
        spans.set_column(index, spans.schema.field(index), pa.array([told], pa.string())), "import-1"
    )
    answer = served.client.get("/api/v1/export/spans", headers={"authorization": f"Bearer {token}"})
    (row,) = of_bytes(answer.content).to_pylist()
    assert (CANARY in row["attributes"]) == seen and "kept" in row["attributes"]
    lines = (data / "audit.jsonl").read_text().splitlines() if (data / "audit.jsonl").exists() else []
    assert [(one["action"], one["key_id"]) for one in map(json.loads, lines)] == [("content_access", key.key_id)] * seen
