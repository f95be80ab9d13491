"""What a live server sends: real OTLP receivers, the caller's trace, context, tools and failures in their phases, and rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_engine import (
    MODEL,
    Received,
    attributes,
    engine,
    failed,
    grpc_receiver,
    http_receiver,
    seconds,
    sending,
    tree,
    until,
)
from machine_speed import slowness
from writing import bench

from phasewise.collector.scan import scan_traces
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.export import ExportSettings
from phasewise.rules.errors import MachineError

pytestmark = pytest.mark.live

PHASES = ("context_s", "queue_s", "prefill_s", "first_token_s", "decode_s", "external_s")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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


@pytest.mark.alone
@pytest.mark.slow
def test_a_receiver_that_is_not_there_holds_nothing_up() -> None:
    with engine(export=ExportSettings(endpoint="http://127.0.0.1:9", delay_s=0.05)) as running:
        began = time.monotonic()
        for _ in range(5):
            assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).status_code == 200
        assert time.monotonic() - began < 3 * slowness()
        began = time.monotonic()
    assert time.monotonic() - began < 12 * slowness()
