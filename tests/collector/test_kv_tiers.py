"""LMCache's traces and the engine's: one request, of which the time of its KV's load is context, whoever is heard first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from writing import Bench, bench, engine_span

SERVER = {"service.instance.id": "lmcache-0", "service.name": "lmcache"}


def request(name: str = "chatcmpl-1", start_s: float = 0.0, trace: str = "b" * 32, **changes: Any) -> dict[str, Any]:
    """vLLM's span: 0.25 s before the queue, 1 s in it, 0.75 s prefill, 2 s decode."""
    attributes = {
        "gen_ai.request.id": name, "gen_ai.latency.e2e": 4.0, "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.time_in_queue": 1.0, "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
    }  # fmt: skip
    return engine_span(start_s, 4.0, trace=trace, attributes=attributes | changes.pop("attributes", {}), **changes)


def session(
    name: str = "chatcmpl-1-0a1b2c3d", at_s: float = 0.25, load_s: float = 0.5, resource: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """A lookup of an eighth of a second, and after another eighth a load by two ranks; the store ends long after the request."""
    common = {"scope": "lmcache_mp.server", "kind": 1, "resource": resource or SERVER, "parent": "root"}
    told = {"session_id": name}
    loads_s = at_s + 0.25
    return [
        {**common, "parent": None, "id": "root", "name": "request", "start_s": at_s, "end_s": at_s + 9, "attributes": told},
        {**common, "name": "mp.lookup_prefetch", "start_s": at_s, "end_s": at_s + 0.125, "attributes": told},
        {**common, "name": "mp.retrieve", "start_s": loads_s, "end_s": loads_s + load_s, "attributes": told},
        {**common, "name": "mp.retrieve", "start_s": loads_s, "end_s": loads_s + load_s / 2, "attributes": told},
        {**common, "name": "mp.store", "start_s": at_s + 2, "end_s": at_s + 9, "attributes": told},
    ]  # fmt: skip


def phases(opened: Bench) -> list[tuple[float | None, ...]]:
    columns = ("queue_s", "context_s", "prefill_s", "combined_s", "decode_s", "residual_s")
    return [tuple(row[name] for name in columns) for row in opened.rows()]


LOADED = (0.375, 0.625, 0.75, 0.25, 2.0, 0.0)
ALONE = (1.0, None, 0.75, 0.25, 2.0, 0.0)


@pytest.mark.parametrize("first", ["engine", "tier", "together", "much later"])
def test_a_load_is_context_out_of_the_queue_whoever_comes_first(tmp_path: Path, first: str) -> None:
    with bench(tmp_path) as b:
        if first != "tier":
            b.receive([request()])
        if first in ("tier", "together"):
            b.receive(session(), "a" * 32)
        b.run(1.5)
        assert phases(b) == ([LOADED] if first == "together" else [ALONE] if first != "tier" else [])
        if first == "much later":
            b.run(1800.0)
            b.reopen()
        b.receive([request()] if first == "tier" else session(), "a" * 32)
        b.run(1.5)
        assert phases(b) == [LOADED]
        (row,) = b.rows()
        assert (row["engine"], row["request_id"], row["e2e_s"]) == ("vllm_v1", "chatcmpl-1", 4.0)
        assert '"context_s":"measured:span"' in row["provenance"]
        assert row["kv_load_s"] == 0.625
        assert b.rows("SELECT * FROM supplements") == []
        assert b.counter("requests") == 1


def test_a_late_span_of_the_trace_keeps_the_load(tmp_path: Path) -> None:
    """The client's span of the same trace comes after the row was told its load: the engine's own word on the queue is older."""
    client = {
        "name": "chat m", "id": "client", "span_id": "c" * 16, "scope": "app", "kind": 3, "start_s": -0.5, "end_s": 4.5,
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, "trace": "b" * 32,
        "resource": {"service.name": "app"},
    }  # fmt: skip
    with bench(tmp_path) as b:
        b.receive([request(parent="c" * 16)])
        b.receive(session(), "a" * 32)
        b.run(1.5)
        assert phases(b) == [LOADED]
        b.receive([client], "b" * 32)
        b.run(1.5)
        assert phases(b) == [LOADED]
        (row,) = b.rows()
        assert (row["entry_e2e_s"], row["model"]) == (5.0, "m")


def test_each_load_is_taken_out_of_what_it_lies_in(tmp_path: Path) -> None:
    """By the identifier of the request span, as releases of the engine make it; a load outside of queue and prefill tells nothing."""
    told = [
        ("cmpl-1-0", "cmpl-1-0-0a1b2c3d", 0.25, 0.5, LOADED),  # vLLM since 0.15
        ("cmpl-2-0", "cmpl-2-0", 0.25, 0.5, LOADED),  # until 0.13
        ("7f-deadbeef", "7f-deadbeef", 0.25, 0.5, LOADED),  # its own end is like a random one
        ("cmpl-4", "cmpl-4-0a1b2c3d", 1.125, 0.25, (0.875, 0.375, 0.5, 0.25, 2.0, 0.0)),  # loaded after the queue
        ("cmpl-5", "cmpl-5-0a1b2c3d", -30.0, 0.5, ALONE),
        ("cmpl-6", "cmpl-6-0a1b2c3d", 2.5, 0.5, ALONE),  # while it decodes
    ]
    with bench(tmp_path) as b:
        for number, (engine_id, session_id, at_s, load_s, _) in enumerate(told):
            start_s = 10.0 * number
            b.receive([request(engine_id, start_s, trace=f"{number + 1:032x}")])
            b.receive(session(session_id, start_s + at_s, load_s), f"{number + 100:032x}")
        b.run(1.5)
        assert phases(b) == [expected for *_, expected in told]
        assert {row["instance"] for row in b.rows("SELECT * FROM instances")} == {"i-1"}
        assert b.counter("unmapped_spans") == 0


def test_an_identifier_that_several_share_joins_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([request(), request(trace="d" * 32)])
        b.receive(session(), "a" * 32)
        b.run(1.5)
        assert phases(b) == [ALONE, ALONE]
        assert len(b.rows("SELECT * FROM supplements")) == 1


def test_a_session_that_no_request_comes_for_is_counted_after_an_hour(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(session(), "a" * 32)
        b.run(1.5)
        assert (len(b.rows("SELECT * FROM supplements")), b.rows()) == (1, [])
        b.run(3700.0)
        b.receive([request("chatcmpl-2", 3800.0)])
        b.run(70.0)
        assert b.rows("SELECT * FROM supplements") == []
        assert b.counter("supplements_without_request") == 1
        assert phases(b) == [ALONE]
