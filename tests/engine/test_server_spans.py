"""What a live server sends: real OTLP receivers, the caller's trace, context, tools and failures in their phases, and rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_engine import MODEL, Engine, Received, attributes, engine, grpc_receiver, http_receiver, until
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from writing import bench

from phasewise.collector.scan import scan_traces
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.export import ExportSettings
from phasewise.instrumented_engine.serving.tools import Tool
from phasewise.rules.errors import MachineError

pytestmark = pytest.mark.live

PHASES = ("context_s", "queue_s", "prefill_s", "first_token_s", "decode_s", "external_s")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def receiver() -> Iterator[Received]:
    with grpc_receiver() as received:
        yield received


def sending(received: Received, **settings: Any) -> Any:
    return engine(export=ExportSettings(endpoint=received.endpoint, delay_s=0.05), **settings)


def tree(received: Received) -> dict[str, Span]:
    """Spans of the only request, by name; the last of each name."""
    until(lambda: bool(received.named("llm_request")))
    assert len(received.named("llm_request")) == 1
    root = received.named("llm_request")[0]
    return {span.name: span for span in received.spans if span.trace_id == root.trace_id}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def failed(spans: dict[str, Span]) -> dict[str, str]:
    return {name: span.status.message for name, span in spans.items() if span.status.code == Status.STATUS_CODE_ERROR}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_arrive_and_become_rows_whose_phases_sum(protocol: str, tmp_path: Path) -> None:
    opened = grpc_receiver() if protocol == "grpc" else http_receiver()
    with opened as received:
        settings = ExportSettings(endpoint=received.endpoint, protocol=protocol, delay_s=0.05)  # type: ignore[arg-type]
        with engine(export=settings) as running:
            for n in range(6):
                body: dict[str, Any] = {
                    "prompt": f"word {n} " * 60,
                    "max_tokens": 12,
                    "stream": n % 2 == 0,
                    "user": "acme",
                    "priority": n,
                }
                running.post("/v1/completions", body, {"x-request-id": f"r-{n}"})
            instance = running.client.get("/health").json()["instance"]
            until(lambda: running.metric("phasewise_engine_spans_sent_total") >= 6 * 6)
            assert running.metric("phasewise_engine_spans_dropped_total") == 0
        resource = received.resource
        assert resource["service.instance.id"] == instance
        assert resource["phasewise.executor"] == "simulated"
        with bench(tmp_path) as store:
            for message in received.bodies:
                store.journal.append("spans", scan_traces(message, store.clock.now).rows)
            store.journal.sync()
            store.run(600)
            rows = store.rows()
            assert len(rows) == 6
            assert {row["engine"] for row in rows} == {"phasewise"}
            for row in rows:
                assert abs(row["residual_s"]) < 1e-6
                assert abs(sum(row[name] or 0.0 for name in PHASES) - row["e2e_s"]) < 1e-6
                assert row["output_tokens"] == 12
                assert row["tenant"] == "acme"
                assert row["model"] == MODEL
                assert row["outcome"] == "ok"
                assert row["finish_reason"] == "length"
                assert row["instance"] == instance
                assert row["client_request_id"] == f"r-{row['priority']}"
                assert row["segments"]
            steps = store.rows("SELECT * FROM engine_steps ORDER BY step")
            assert [row["step"] for row in steps] == list(range(len(steps)))
            assert sum(row["decode_sequences"] for row in steps) == 6 * 11


def test_a_preempted_request_is_told_whole(tmp_path: Path) -> None:
    config = EngineConfig(
        max_num_seqs=8, kv_blocks=24, max_model_tokens=256, step_token_budget=512, prefix_sharing=False
    )
    with grpc_receiver() as received:
        with sending(received, config=config) as running:
            body = {"prompt": ["x"] * 8, "max_tokens": 100}
            answer = running.post("/v1/completions", body).json()
            assert answer["usage"]["completion_tokens"] == 800
            assert running.metric("vllm:num_preemptions_total") > 0
            assert running.metric("vllm:kv_cache_usage_perc") == 0
        with bench(tmp_path) as store:
            for message in received.bodies:
                store.journal.append("spans", scan_traces(message, store.clock.now).rows)
            store.journal.sync()
            store.run(600)
            rows = store.rows()
    assert len(rows) == 8
    assert len({row["call_key"] for row in rows}) == 1
    assert sum(row["preemptions"] for row in rows) > 0
    assert max(abs(row["residual_s"]) for row in rows) < 1e-6
    assert any("[3," in row["segments"] for row in rows)  # computed again


def test_the_first_token_is_when_the_client_could_have_it(receiver: Received) -> None:
    with sending(receiver, time_scale=1.0) as running:
        began = time.time_ns()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 30, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line)
            first = time.time_ns()
            list(lines)
        ended = time.time_ns()
        spans = tree(receiver)
    root = spans["llm_request"]
    assert began <= root.start_time_unix_nano <= root.end_time_unix_nano <= ended + 5_000_000
    told_first = spans["decode"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano <= told_first <= first + 5_000_000
    assert first - told_first < 50_000_000


def test_a_callers_trace_goes_on(receiver: Received) -> None:
    with sending(receiver) as running:
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"traceparent": PARENT})
        root = tree(receiver)["llm_request"]
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"traceparent": PARENT[:-1] + "0"})
    assert root.trace_id.hex() == PARENT[3:35]
    assert root.parent_span_id.hex() == PARENT[36:52]
    assert len(receiver.named("llm_request")) == 1  # its caller does not sample the second


def test_sequences_of_one_call_share_trace_and_request_id(receiver: Received) -> None:
    with sending(receiver) as running:
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "n": 3})
        until(lambda: len(receiver.named("llm_request")) == 3)
    roots = receiver.named("llm_request")
    assert len({root.trace_id for root in roots}) == 1
    assert len({attributes(root)["gen_ai.request.id"] for root in roots}) == 1
    assert len({root.span_id for root in roots}) == 3


def test_a_refused_call_sends_no_span(receiver: Received) -> None:
    config = EngineConfig(max_num_seqs=4, kv_blocks=8, max_model_tokens=1024, step_token_budget=512)
    with sending(receiver, config=config) as running:
        answer = running.post("/v1/completions", {"prompt": "word " * 300, "max_tokens": 5})
        assert answer.status_code == 400
        assert "KV blocks" in answer.json()["error"]["message"]
        assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        tree(receiver)


# --- context ---------------------------------------------------------------------------------------------------------


def test_history_is_loaded_in_the_context_phase_and_the_turn_added(receiver: Received, tmp_path: Path) -> None:
    with sending(receiver, context_folder=tmp_path, context_delay_s=0.4) as running:
        body = {"metadata": {"conversation_id": "c-1"}, "max_tokens": 4}
        usages = []
        for said in ("first words", "second words"):
            answer = running.post(
                "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": said}]}
            ).json()
            usages.append(answer["usage"]["prompt_tokens"])
        alone = running.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "second words"}], "max_tokens": 4}
        )
        until(lambda: len(receiver.named("llm_request")) == 3)
        store = running.server.desk.store
        assert store is not None
        history = store.load("c-1")
    assert usages[1] > usages[0]
    assert alone.json()["usage"]["prompt_tokens"] < usages[1]
    assert [message["role"] for message in history] == ["user", "assistant"] * 2
    assert history[3]["content"] == answer["choices"][0]["message"]["content"]
    spent = [seconds(span) for span in receiver.named("context")]
    assert spent[0] >= 0.4
    assert spent[1] >= 0.4
    assert spent[2] < 0.2


def test_a_store_that_breaks_fails_the_context_phase_only(receiver: Received, tmp_path: Path) -> None:
    with sending(receiver, context_folder=tmp_path) as running:
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / "conversations.sqlite").write_bytes(b"rubbish" * 1000)
        body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"conversation_id": "c"}}
        answer = running.post("/v1/chat/completions", body)
        assert answer.status_code == 502
        assert "conversations.sqlite" in answer.json()["error"]["message"]
        spans = tree(receiver)
    assert set(spans) == {"llm_request", "context"}  # a phase that did not begin has no span
    assert set(failed(spans)) == {"llm_request", "context"}


def test_a_turn_that_cannot_be_kept_is_logged_and_the_answer_stands(
    receiver: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise MachineError("no space left")

    body = {"metadata": {"conversation_id": "c"}, "max_tokens": 4, "prompt": "x"}
    with sending(receiver, context_folder=tmp_path) as running:
        monkeypatch.setattr(running.server.desk.store, "append", full)
        for _ in range(2):
            assert running.post("/v1/completions", body).status_code == 200
        until(lambda: caplog.text.count("a turn was not kept: no space left") == 2)


@pytest.mark.parametrize("prompt", [[1, 2, 3], ["one", "two"]])
def test_a_conversation_goes_on_with_one_text(receiver: Received, tmp_path: Path, prompt: list[Any]) -> None:
    body = {"metadata": {"conversation_id": "c"}, "max_tokens": 4, "prompt": prompt}
    with sending(receiver, context_folder=tmp_path) as running:
        refused = running.post("/v1/completions", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("prompt: a conversation goes on with one text")
        assert running.post("/v1/completions", {**body, "metadata": {}}).status_code == 200


# --- tools -----------------------------------------------------------------------------------------------------------


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


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_is_told_of_as_cancelled(receiver: Received) -> None:
    with sending(receiver, time_scale=1.0) as running:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 900, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as answer:
            texts = answer.iter_text()
            next(texts)
        spans = tree(receiver)
    assert attributes(spans["llm_request"])["gen_ai.response.finish_reasons"] == ["abort"]
    assert failed(spans) == {"llm_request": "cancelled by the client", "decode": "cancelled by the client"}


def test_a_client_that_leaves_the_queue_had_no_prefill(receiver: Received) -> None:
    config = EngineConfig(max_num_seqs=1, kv_blocks=256, max_model_tokens=1024, step_token_budget=512)
    with sending(receiver, config=config, time_scale=1.0) as running:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 900}
        with running.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
            texts = first.iter_text()  # an iterator nobody holds closes its stream
            next(texts)
            with pytest.raises(httpx.ReadTimeout):
                running.client.post("/v1/completions", json=body, timeout=0.2)
            spans = tree(receiver)
    assert set(spans) == {"llm_request", "context", "queue"}
    assert set(failed(spans)) == {"llm_request", "queue"}
    assert "phasewise.queue.slot_s" in attributes(spans["llm_request"])


def test_a_step_that_raises_fails_the_phase_it_was_in(receiver: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(receiver) as running:

        def broken(plan: object) -> object:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(running.server.launched.service._core._executor, "execute", broken)
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        spans = tree(receiver)
    assert failed(spans) == dict.fromkeys(("llm_request", "prefill"), "RuntimeError: the device is lost")
    assert "decode" not in spans


def test_a_receiver_that_is_not_there_holds_nothing_up() -> None:
    with engine(export=ExportSettings(endpoint="http://127.0.0.1:9", delay_s=0.05)) as running:
        began = time.monotonic()
        for _ in range(5):
            assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).status_code == 200
        assert time.monotonic() - began < 3
        began = time.monotonic()
    assert time.monotonic() - began < 12
