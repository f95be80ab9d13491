"""No word of a prompt, an answer or a credential passes; lengths, roles and counts do."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from compiled_scanner import compiled_scan
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_messages import RECEIVED_UNIX_NS, START_UNIX_NS, key_values, span_message, trace_request

from phasewise.collector.redact import CONTENT_KEYS, DEFAULT_POLICY, MESSAGE_EVENTS, RedactionPolicy, redact_spans
from phasewise.collector.scan import scan_traces

CANARY = "the quick brown canary"


def redacted(
    span: Span, policy: RedactionPolicy = DEFAULT_POLICY, **request: Any
) -> tuple[dict[str, Any], dict[str, int]]:
    rows = scan_traces(trace_request(span, **request).SerializeToString(), RECEIVED_UNIX_NS).rows
    clean, counts = redact_spans(rows, policy)
    assert clean.schema.equals(rows.schema)
    (row,) = clean.to_pylist()
    return row, counts


SENSITIVE = [
    *CONTENT_KEYS,
    "gen_ai.prompt.0.content",
    "gen_ai.completion.3.tool_calls.0.arguments",
    "GEN_AI.PROMPT.0.CONTENT",
    "llm.input_messages.0.message.content",
    "http.request.header.authorization",
    "http.request.header.cookie",
    "http.response.header.set-cookie",
    "my_api_key",
    "x-api-key",
    "db.password",
    "client_secret",
    'odd"quote.api_key',
    "token",
    "app.jwt",
    "my.openai_key",
    "session.access_token",
    "process.command_args",
    "process.command_line",
    "ai.prompt.messages",
    "ai.response.text",
    "langfuse.observation.input",
    "mlflow.spanInputs",
    "pydantic_ai.all_messages",
    "request.body",
    "rawRequest",
    "user_message",
    "db.statement",
]


@pytest.mark.parametrize("key", SENSITIVE)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"parts": [{"text": v}]}])
def test_text_under_a_sensitive_key_is_replaced_by_its_length(key: str, wrap: Any) -> None:
    row, counts = redacted(span_message({"before": 1, key: wrap(CANARY), "gen_ai.usage.input_tokens": 9}))
    assert CANARY not in str(row)
    kept = json.loads(row["attributes"])
    assert list(kept) == ["before", key, "gen_ai.usage.input_tokens"]
    assert kept["gen_ai.usage.input_tokens"] == 9
    assert "removed: " in kept[key]
    assert sum(counts.values()) == 1


def test_the_length_is_that_of_the_whole_text() -> None:
    row, counts = redacted(span_message({"gen_ai.input.messages": "lorem ipsum dolor " * 350_000}))
    assert json.loads(row["attributes"]) == {"gen_ai.input.messages": "[content removed: 6300000 bytes]"}
    assert counts == {"content": 1}


@pytest.mark.parametrize("key", SENSITIVE)
def test_sensitive_keys_are_found_wherever_attributes_stand(key: str) -> None:
    secret = {key: CANARY}
    span = span_message(
        {"list": [{"inner": secret}], "map": secret},
        events=[Span.Event(name="e", time_unix_nano=START_UNIX_NS, attributes=key_values(secret))],
        links=[Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, attributes=key_values(secret))],
    )
    row, counts = redacted(span, resource={"service.name": "s", **secret})
    assert CANARY not in str(row)
    assert sum(counts.values()) == 5
    assert json.loads(row["resource"])["service.name"] == "s"


@pytest.mark.parametrize("name", MESSAGE_EVENTS)
def test_message_events_keep_only_what_tells_nothing(name: str) -> None:
    attributes = {"content": CANARY, "anything": {"deep": CANARY}, "role": "user", "index": 3, "finish_reason": "stop"}
    event = Span.Event(name=name, time_unix_nano=START_UNIX_NS, attributes=key_values(attributes))
    row, counts = redacted(span_message(events=[event]))
    assert CANARY not in str(row)
    (kept,) = json.loads(row["events"])
    assert {k: kept["attributes"][k] for k in ("role", "index", "finish_reason")} == {
        "role": "user",
        "index": 3,
        "finish_reason": "stop",
    }
    assert counts == {"content": 2}


def test_what_engines_send_about_a_request_stays() -> None:
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.completion.0.finish_reason": "stop",
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.system": "vllm",
        "http.request.body.size": 77,
        "prompt.length": 12,
        "url.full": "http://h/v1/chat/completions",
    }
    row, counts = redacted(span_message(attributes))
    assert json.loads(row["attributes"]) == attributes
    assert counts == {}


def test_names_that_count_tokens_stay() -> None:
    attributes = {
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.token.type": "input",
        "llm.token_count.prompt": 9,
        "phasewise.tokens": 3,
        "messaging.kafka.message.key": "k",
        "text_length": 4,
        "query_count": 2,
    }
    row, counts = redacted(span_message(attributes))
    assert (json.loads(row["attributes"]), counts) == (attributes, {})


def test_urls_lose_user_and_password() -> None:
    row, counts = redacted(
        span_message({"http.url": f"https://user:{CANARY}@host:8000/v1/chat?q=1", "url.full": "https://h/a@b"})
    )
    assert json.loads(row["attributes"]) == {"http.url": "https://host:8000/v1/chat", "url.full": "https://h/a@b"}
    assert counts == {"url_query": 1, "credential": 1}


def test_urls_lose_their_query() -> None:
    row, counts = redacted(span_message({"url.full": f"https://h/path?q={CANARY}", "http.target": f"/p?{CANARY}"}))
    assert json.loads(row["attributes"]) == {"url.full": "https://h/path", "http.target": "/p"}
    assert counts == {"url_query": 2}


def test_content_may_be_kept_by_choice_but_never_credentials() -> None:
    span = span_message({"gen_ai.input.messages": CANARY, "authorization": "Bearer x"})
    row, counts = redacted(span, RedactionPolicy(content=True))
    assert json.loads(row["attributes"]) == {
        "gen_ai.input.messages": CANARY,
        "authorization": "[credential removed: 8 bytes]",
    }
    assert counts == {"credential": 1}


def test_cleaning_twice_changes_nothing_more() -> None:
    rows = scan_traces(trace_request(span_message({"prompt": CANARY})).SerializeToString(), RECEIVED_UNIX_NS).rows
    once, _ = redact_spans(rows)
    twice, counts = redact_spans(once)
    assert twice.equals(once)
    assert counts == {}


def test_no_rows_are_no_problem() -> None:
    rows = scan_traces(b"", RECEIVED_UNIX_NS).rows
    assert redact_spans(rows)[0].num_rows == 0


def by_the_plain_rule(rows: pa.Table, content: bool) -> tuple[pa.Table, dict[str, int]]:
    """Every row looked at, whatever stands in it."""
    policy = RedactionPolicy(content=content)
    vars(policy)["suspects"] = "."
    return redact_spans(rows, policy)


NAMES = st.one_of(
    st.sampled_from(
        [*SENSITIVE, *MESSAGE_EVENTS, "url.full", "HTTP.URL", "role", "my.prompt", "prompt.length", "COO\u212aIE"]
    ),
    st.sampled_from(["gen_ai.usage.input_tokens", "gen_ai.request.id", "site.extra", "phasewise.segments"]),
    st.text(max_size=12),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.binary(max_size=3), st.just("http://h/p?q=1")
    )
    | st.sampled_from([*CONTENT_KEYS[:3], "[content removed: 3 bytes]", 'say "prompt": no', "authorization"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ATTRIBUTES = st.dictionaries(NAMES, VALUES, max_size=4)


@settings(deadline=None)
@given(
    spans=st.lists(ATTRIBUTES, min_size=1, max_size=4),
    resource=st.dictionaries(NAMES, st.sampled_from(["a", 1, {"inner.secret": "x"}]), max_size=2),
    event=st.tuples(NAMES, ATTRIBUTES),
    link=ATTRIBUTES,
    content=st.booleans(),
)
def test_the_sieves_let_through_what_the_plain_rule_would_not_touch(
    spans: list[dict[str, Any]], resource: dict[str, Any], event: tuple[str, Any], link: dict[str, Any], content: bool
) -> None:
    name, attributes = event
    events = [Span.Event(name=name, time_unix_nano=START_UNIX_NS, attributes=key_values(attributes))]
    links = [Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, attributes=key_values(link))]
    messages = [span_message(found) for found in spans] + [span_message(events=events, links=links)]
    found = compiled_scan()(trace_request(*messages, resource=resource).SerializeToString(), RECEIVED_UNIX_NS)
    clean, counts = by_the_plain_rule(found.rows, content)
    for names in (found.names, None):
        fast, fast_counts = redact_spans(found.rows, RedactionPolicy(content=content), names)
        assert fast.equals(clean)
        assert fast_counts == counts


def test_names_alone_tell_that_an_engines_request_needs_no_look() -> None:
    """Else the test above would hold for a sieve that lets nothing through."""
    span = span_message({"gen_ai.usage.input_tokens": 5, "gen_ai.request.id": "prompt", "site": {"inner": "password"}})
    found = compiled_scan()(trace_request(span).SerializeToString(), RECEIVED_UNIX_NS)
    assert found.names == frozenset({"gen_ai.usage.input_tokens", "gen_ai.request.id", "site", "inner", "service.name"})
    assert DEFAULT_POLICY.passes(found.names)
    assert redact_spans(found.rows, DEFAULT_POLICY, found.names)[0] is found.rows


@pytest.mark.parametrize("name", [*SENSITIVE, *MESSAGE_EVENTS, "url.full", "HTTP.Target", "coo\u212aie"])
def test_names_that_may_bear_something_do_not_pass(name: str) -> None:
    policy = RedactionPolicy()
    assert policy.passes({"service.name"})
    assert not policy.passes({"service.name", name})
