"""The server as clients meet it: the openai package and plain HTTP against a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import httpx2
import openai
import pytest
from live_engine import MODEL, SMALL, Engine, engine, pieces, until

from phasewise.instrumented_engine.config import EngineConfig

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine() as started:
        yield started


@pytest.fixture
def client(running: Engine) -> Iterator[openai.OpenAI]:
    with (
        httpx2.Client(trust_env=False) as own,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", http_client=own, max_retries=0) as made,
    ):
        yield made


def test_a_chat_as_a_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say something."}], max_completion_tokens=7
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert len((choice.message.content or "").split()) == 7  # an invented word a token
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.model == MODEL


def test_the_served_model_is_described_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here") as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


def test_an_address_that_is_not_there_is_told_in_openais_shape(running: Engine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses: no such address"):
        client.responses.create(model=MODEL, input="hi")
    wrong = running.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET /v1/completions: Method Not Allowed"


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1}])
def test_a_prompt_that_leaves_no_room_is_blamed_and_not_the_limit(running: Engine, limit: dict[str, int]) -> None:
    refused = running.post("/v1/completions", {"prompt": "word " * 1200, **limit})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "leave no room for an answer (shorten it" in refused.json()["error"]["message"]


def test_a_stream_brings_the_same_words_one_by_one(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 9, "seed": 5}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    said = [chunk.choices[0].text for chunk in chunks if chunk.choices and chunk.choices[0].text]
    assert len(said) == 9
    assert "".join(said) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_chat_stream_begins_with_its_role(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert len("".join(delta.content or "" for delta in deltas).split()) == 3


def test_several_choices_are_several_sequences(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_streamed_choices_arrive_mixed_and_whole(running: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "n": 3, "stream": True}
    parts = pieces(running.post("/v1/chat/completions", body))
    by_choice: dict[int, str] = {}
    for part in parts:
        choice = part["choices"][0]
        by_choice[choice["index"]] = by_choice.get(choice["index"], "") + choice["delta"].get("content", "")
    assert sorted(by_choice) == [0, 1, 2]
    assert all(len(text.split()) == 5 for text in by_choice.values())


def test_a_prefix_seen_before_is_told_in_the_usage(client: openai.OpenAI) -> None:
    prompt = "the same long beginning of a prompt " * 20
    first = client.completions.create(model=MODEL, prompt=prompt + "a", max_tokens=1).usage
    second = client.completions.create(model=MODEL, prompt=prompt + "b", max_tokens=1).usage
    assert first is not None and first.prompt_tokens_details is not None
    assert second is not None and second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens or 0
    assert 0 < cached < second.prompt_tokens
    assert cached % SMALL.block_tokens == 0


def test_a_stop_string_ends_the_sequence_in_the_engine_too(running: Engine) -> None:
    body = {"prompt": "x", "max_tokens": 400, "seed": 1}
    words = running.post("/v1/completions", {**body, "max_tokens": 6}).json()["choices"][0]["text"].split()
    answer = running.post("/v1/completions", {**body, "stop": words[4]}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"].split() == words[:4]
    assert answer["usage"]["completion_tokens"] == 5
    until(lambda: running.metric("vllm:num_requests_running") == 0)
    assert running.metric("vllm:generation_tokens_total") < 400


def test_token_ids_as_a_prompt(running: Engine) -> None:
    answer = running.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
    assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "give 1 or more"),
        ({"prompt": "x", "temperature": 3}, "temperature", "0 to 2"),
        ({"prompt": "x", "n": 1000}, "n", "give 1 to"),
        ({"prompt": {}}, "prompt", "list of token ids"),
        ({}, "prompt", "is missing"),
        ({"prompt": "x", "logprobs": 5}, "logprobs", "leave it out"),
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens", "more than 1024"),
        ({"prompt": "word " * 3000, "max_tokens": 5}, "prompt", "shorten it"),
        ({"prompt": ["x", "word " * 3000], "max_tokens": 5}, "prompt", "shorten it"),
        ({"prompt": [10**9], "max_tokens": 5}, "prompt", "no token id"),
        ({"prompt": "x", "stop": [1]}, "stop", "stop text"),
        ({"prompt": "x", "external_tools": [{"name": "nobody"}]}, "external_tools", "the server knows"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ],
)
def test_bad_input_names_field_and_remedy(running: Engine, body: dict[str, object], field: str, says: str) -> None:
    answer = running.post("/v1/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert says in error["message"]


def test_bytes_that_are_no_request(running: Engine) -> None:
    for body in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        answer = running.client.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"] or "nested" in answer.json()["error"]["message"]


def test_a_body_too_long_is_refused_before_it_is_read() -> None:
    with engine(max_body_bytes=1000) as small:
        assert small.post("/v1/completions", {"prompt": "x" * 2000}).status_code == 413


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="gpt-9", prompt="x")
    assert refusal.value.code == "model_not_found"
    assert MODEL in str(refusal.value)


def test_models_version_and_health(running: Engine, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert running.client.get("/version").json()["version"]
    health = running.client.get("/health")
    assert health.status_code == 200
    told = health.json()
    assert (told["status"], told["executor"], told["gpu"]) == ("ok", "simulated", "h100-sxm")


def test_a_request_id_is_echoed(running: Engine) -> None:
    answer = running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    bad = running.post("/v1/completions", {}, {"x-request-id": "mine-2"})
    assert bad.headers["x-request-id"] == "mine-2"
    assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).headers["x-request-id"]


def test_a_client_that_leaves_frees_its_seat_and_blocks() -> None:
    with engine(time_scale=1.0) as slow:
        body = {"model": MODEL, "prompt": "word " * 200, "max_tokens": 700, "stream": True}
        with slow.client.stream("POST", "/v1/completions", json=body) as answer:
            texts = answer.iter_text()  # an iterator nobody holds closes its stream
            next(texts)
            until(lambda: slow.metric("vllm:num_requests_running") == 1)
            assert slow.metric("vllm:kv_cache_usage_perc") > 0
        until(lambda: slow.metric("vllm:num_requests_running") == 0, 2)
        assert slow.metric("vllm:kv_cache_usage_perc") == 0
        until(lambda: slow.metric("vllm:request_success_total", finished_reason="abort") == 1)
        assert slow.metric("vllm:generation_tokens_total") < 700


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer() -> None:
    with engine(time_scale=1.0) as slow:
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 900}
            slow.client.post("/v1/completions", json=body, timeout=0.3)
        until(lambda: slow.metric("vllm:request_success_total", finished_reason="abort") == 1)
        assert slow.metric("vllm:num_requests_running") == 0


def test_a_full_queue_answers_429_with_when_to_come_again() -> None:
    config = EngineConfig(max_num_seqs=1, kv_blocks=256, max_model_tokens=1024, step_token_budget=512, max_waiting=1)
    with engine(config=config, time_scale=1.0) as busy:
        body = {"prompt": "x", "max_tokens": 60}
        threads = [threading.Thread(target=busy.post, args=("/v1/completions", body)) for _ in range(2)]
        threads[0].start()
        until(lambda: busy.metric("vllm:num_requests_running") == 1)
        threads[1].start()
        until(lambda: busy.metric("vllm:num_requests_waiting") == 1)
        refused = busy.post("/v1/completions", body)
        for thread in threads:
            thread.join()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        reasons = [
            line for line in busy.client.get("/metrics").text.splitlines() if "admission_rejections_total{" in line
        ]
        assert [float(line.rpartition(" ")[2]) for line in reasons if 'reason="queue_full"' in line] == [1]


def test_priorities_and_tenants_reach_the_scheduler() -> None:
    config = EngineConfig(max_num_seqs=1, kv_blocks=256, max_model_tokens=1024, step_token_budget=512, order="priority")
    with engine(config=config, time_scale=1.0) as ordered:
        ended: list[int] = []

        def send(priority: int) -> None:
            ordered.post("/v1/completions", {"prompt": "x", "max_tokens": 40, "priority": priority})
            ended.append(priority)

        threads = []
        for waiting, priority in enumerate((0, 9, 1)):
            threads.append(threading.Thread(target=send, args=(priority,)))
            threads[-1].start()
            until(lambda waiting=waiting: ordered.metric("vllm:num_requests_waiting") == waiting)  # type: ignore[misc]
            until(lambda: ordered.metric("vllm:num_requests_running") == 1)
        for thread in threads:
            thread.join()
        assert ended == [0, 1, 9]


def test_answers_end_by_themselves_where_the_setting_says_so() -> None:
    with engine(output_tokens=8) as ending:
        answers = [
            ending.post("/v1/completions", {"prompt": "x", "max_tokens": 500, "seed": n}).json() for n in range(12)
        ]
        lengths = [answer["usage"]["completion_tokens"] for answer in answers]
        assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
        assert len(set(lengths)) > 3
        forced = ending.post("/v1/completions", {"prompt": "x", "max_tokens": 80, "seed": 0, "ignore_eos": True}).json()
        assert forced["usage"]["completion_tokens"] == 80


def test_the_first_token_comes_before_the_last_is_computed() -> None:
    with engine(time_scale=1.0) as slow:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "stream": True}
        began = time.monotonic()
        with slow.client.stream("POST", "/v1/completions", json=body) as answer:
            moments = [time.monotonic() - began for line in answer.iter_lines() if line.startswith("data: {")]
        assert moments[0] < moments[-1] / 3
        slow_tokens = slow.metric("vllm:inter_token_latency_seconds_count")
        assert slow_tokens == 59
        assert slow.metric("vllm:time_to_first_token_seconds_count") == 1


def test_a_real_model_gives_the_same_text_streamed_and_whole() -> None:
    pytest.importorskip("torch", reason="needs the extra engine (torch)")
    with engine(executor="torch", model="random", time_scale=1.0) as real:
        assert real.client.get("/health").json()["executor"] == "torch"
        body = {"model": "random", "prompt": "Hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        whole = real.client.post("/v1/completions", json=body).json()
        streamed = pieces(real.client.post("/v1/completions", json={**body, "stream": True}))
        assert "".join(part["choices"][0]["text"] for part in streamed) == whole["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 12
        drawn = [
            real.client.post("/v1/completions", json={**body, "temperature": 1.5, "seed": seed}).json()["choices"][0][
                "text"
            ]
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]


def test_a_step_that_raises_ends_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as hurt:
        executor = hurt.server.launched.service._core._executor
        works = executor.execute

        def broken(plan: object) -> object:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(executor, "execute", broken)
        answer = hurt.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert answer.status_code == 500
        assert "the device is lost" in answer.json()["error"]["message"]
        stream = hurt.post("/v1/completions", {"prompt": "x", "max_tokens": 5, "stream": True})
        assert "the device is lost" in json.dumps(pieces(stream)[-1]["error"])
        monkeypatch.setattr(executor, "execute", works)
        assert hurt.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).status_code == 200
        assert hurt.metric("vllm:num_requests_running") == 0
        assert hurt.metric("vllm:kv_cache_usage_perc") == 0
        assert hurt.metric("phasewise_engine_step_failures_total") == 2
