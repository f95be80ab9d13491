"""Tools that a request calls: timed apart from its phases, and what a failing one leaves behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from live_engine import MODEL, Engine, Received, attributes, engine, failed, seconds, sending, tree, until

from phasewise.instrumented_engine.serving.tools import Tool

pytestmark = pytest.mark.live


def slow_tool(text: str) -> str:
    time.sleep(0.2)
    return "found it"


def broken_tool(text: str) -> str:
    raise LookupError("nothing there")


TOOLS = (
    Tool(name="search", function=slow_tool),
    Tool(name="broken", function=broken_tool),
    Tool(name="hangs", function=lambda text: str(threading.Event().wait(3)), timeout_s=0.2),
)


def with_tool(running: Engine, name: str, when: str, **more: Any) -> httpx.Response:
    ask = {"name": name, "when": when, **more}
    return running.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 20, "external_tools": [ask], "stream": True, "seed": 3}
    )


@pytest.mark.parametrize(
    ("when", "phase", "more"),
    [("before", "context", {}), ("inside", "decode", {"after_tokens": 5}), ("after", "decode", {})],
)
def test_a_tool_is_timed_inside_the_phase_it_interrupts(receiver: Received, when: str, phase: str, more: Any) -> None:
    with sending(receiver, tools=TOOLS) as running:
        assert with_tool(running, "search", when, **more).text.count("data: {") >= 20
        spans = tree(receiver)
    tool = spans["external_tool"]
    assert 0.2 <= seconds(tool) < 1.0
    assert attributes(tool)["gen_ai.tool.name"] == "search"
    assert spans[phase].start_time_unix_nano <= tool.start_time_unix_nano
    assert tool.end_time_unix_nano <= spans[phase].end_time_unix_nano
    assert not failed(spans)


def test_a_sequence_makes_no_tokens_while_its_tool_works_and_keeps_its_seat(receiver: Received) -> None:
    with sending(receiver, tools=TOOLS) as running:
        with_tool(running, "search", "inside", after_tokens=5)
        spans = tree(receiver)
        until(lambda: bool(receiver.named("engine.steps")))
    tool = spans["external_tool"]
    starts = [at for span in receiver.named("engine.steps") for at in attributes(span)["phasewise.step.start_unix_ns"]]
    inside = [at for at in starts if tool.start_time_unix_nano + 5_000_000 < at < tool.end_time_unix_nano]
    assert not inside
    assert sum(at < tool.start_time_unix_nano for at in starts) == 5
    assert attributes(spans["llm_request"])["gen_ai.usage.output_tokens"] == 20


def test_a_marker_in_the_text_calls_its_tool(receiver: Received) -> None:
    with sending(receiver, tools=TOOLS, time_scale=1.0) as running:
        body = {"prompt": "x", "max_tokens": 20, "seed": 3}
        words = running.post("/v1/completions", body).json()["choices"][0]["text"].split()
        tree(receiver)
        receiver.bodies.clear()
        with_tool(running, "search", "inside", marker=words[4])
        spans = tree(receiver)
    assert seconds(spans["external_tool"]) >= 0.2
    assert spans["external_tool"].end_time_unix_nano < spans["decode"].end_time_unix_nano


@pytest.mark.parametrize(("name", "says"), [("broken", "nothing there"), ("hangs", "within 0.2 s")])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_failing_tool_marks_only_itself(receiver: Received, name: str, says: str, when: str) -> None:
    more = {"after_tokens": 3} if when == "inside" else {}
    with sending(receiver, tools=TOOLS) as running:
        answer = with_tool(running, name, when, **more)
        assert answer.status_code == 200
        assert '"finish_reason":"length"' in answer.text
        spans = tree(receiver)
    assert set(failed(spans)) == {"external_tool"}
    assert says in failed(spans)["external_tool"]


@pytest.mark.parametrize(("when", "phase"), [("before", "context"), ("inside", "decode"), ("after", "decode")])
def test_a_failing_tool_fails_its_request_where_it_is_told_to(receiver: Received, when: str, phase: str) -> None:
    more = {"after_tokens": 3} if when == "inside" else {}
    with sending(receiver, tools=TOOLS, fail_on_tool_error=True) as running:
        answer = with_tool(running, "broken", when, **more)
        assert "nothing there" in answer.text
        assert answer.status_code == (502 if when == "before" else 200)
        spans = tree(receiver)
        until(lambda: running.metric("vllm:kv_cache_usage_perc") == 0)
    assert set(failed(spans)) == {"external_tool", "llm_request", phase}
    assert ("queue" in spans) is (when != "before")


def test_a_client_that_leaves_while_a_tool_works(receiver: Received) -> None:
    slow = Tool(name="slow", command=("sleep", "30"), timeout_s=60)
    with sending(receiver, tools=(slow,)) as running:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "external_tools": [{"name": "slow"}]}
        with pytest.raises(httpx.ReadTimeout):
            running.client.post("/v1/completions", json=body, timeout=0.3)
        spans = tree(receiver)
        assert not running.server.desk.calls
    assert set(spans) == {"llm_request", "context", "external_tool"}
    assert failed(spans)["external_tool"] == "cancelled"
    assert seconds(spans["external_tool"]) > 0.1
    assert attributes(spans["llm_request"])["gen_ai.response.finish_reasons"] == ["abort"]


def test_what_a_tool_found_is_in_the_prompt() -> None:
    with engine(tools=TOOLS) as running:
        plain = running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()
        found = running.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 1, "external_tools": [{"name": "search"}]}
        ).json()
        assert found["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
