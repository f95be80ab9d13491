"""Bodies of the OpenAI API: what is understood, and that nothing else gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.instrumented_engine.serving.openai_answers import Answer, Usage
from phasewise.instrumented_engine.serving.openai_api import Generation, parse, parse_body
from phasewise.instrumented_engine.serving.tools import ToolAsk
from phasewise.rules.errors import InputError

FIELDS = [
    "model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream",
    "stream_options", "user", "metadata", "priority", "ignore_eos", "external_tools", "request_class", "logprobs", "best_of",
    "tools", "logit_bias", "response_format",
]  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "role", "content", "name", "when"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=8), st.booleans())
def test_any_body_is_understood_or_refused_by_name(document: dict[str, Any], chat: bool) -> None:
    document = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], **document}
    try:
        generation = parse_body(json.dumps(document).encode(), chat=chat)
    except InputError as refusal:
        assert refusal.field.split(".")[0].split("[")[0] in FIELDS or "surrogate" in str(refusal)
    else:
        assert generation.sequences >= 1
        assert 0 <= generation.temperature <= 2
        assert generation.max_tokens is None or generation.max_tokens >= 1


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_and_raise_nothing_else(body: bytes) -> None:
    with pytest.raises(InputError):
        parse_body(body, chat=True)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        parse_body(b'{"model": "m", "prompt": "\\uD83D"}', chat=False)
    assert parse_body(b'{"model": "m", "prompt": "\\uD83D\\uDE00"}', chat=False).prompts == ("\U0001f600",)


def chat(**more: Any) -> Generation:
    return parse({"model": "m", "messages": [{"role": "user", "content": "x"}], **more}, chat=True)


def completion(**more: Any) -> Generation:
    return parse({"model": "m", "prompt": "x", **more}, chat=False)


def test_defaults_are_those_of_openai() -> None:
    assert completion().max_tokens == 16
    assert chat().max_tokens is None
    assert (chat().temperature, chat().top_p, chat().n, chat().stream) == (1.0, 1.0, 1, False)


def test_the_newer_limit_of_a_chat_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    generation = parse({"model": "m", "messages": [{"role": "user", "content": parts}]}, chat=True)
    assert generation.messages[0]["content"] == "a\nb"
    with pytest.raises(InputError, match="not text"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "harmless", [{"logprobs": None}, {"tools": []}, {"repetition_penalty": 1.0}, {"unheard_of": 5}]
)
def test_what_changes_nothing_is_let_through(harmless: dict[str, Any]) -> None:
    assert completion(**harmless) == completion()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"logprobs": 0}, "logprobs: 0 is not supported"),  # of completions: one log probability a token
        ({"echo": 1}, "echo: 1 is not supported"),
        ({"seed": 2**63}, "is above 9223372036854775807"),
        ({"max_tokens": 0}, "max_tokens: 0 is below 1 (give 1 or more)"),
        ({"max_tokens": "9"}, "max_tokens: '9' is not a whole number"),
        ({"priority": "high"}, "priority: 'high' is not a whole number (leave it out"),
        ({"user": 5}, "user: 5 is not a text"),
        ({"user": "u" * 513}, "513 characters are too many (give up to 512"),
    ],
)
def test_the_refusal_says_what_is_wrong_and_what_helps(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as refusal:
        completion(**asked)
    assert says in str(refusal.value)


def test_calls_to_tools() -> None:
    asked = completion(
        external_tools=[
            {"name": "a"},
            {"name": "b", "when": "inside", "after_tokens": 3},
            {"name": "c", "when": "inside", "marker": "?"},
        ]
    )
    assert asked.tools == (ToolAsk("a", "before"), ToolAsk("b", "inside", 3), ToolAsk("c", "inside", None, "?"))
    with pytest.raises(InputError, match="says not when"):
        completion(external_tools=[{"name": "a", "when": "inside"}])
    with pytest.raises(InputError, match="one sequence only"):
        completion(n=2, external_tools=[{"name": "a"}])


def test_a_conversation_is_named_in_the_metadata() -> None:
    assert chat(metadata={"conversation_id": "c", "other": "x"}).conversation_id == "c"
    assert chat(metadata={"other": "x"}).conversation_id is None


def test_pieces_and_the_whole_have_openais_shape() -> None:
    answer = Answer("chatcmpl-1", True, "m", 7)
    piece = json.loads(answer.piece(0, "hi", first=True).removeprefix(b"data: "))
    assert piece["choices"][0]["delta"] == {"role": "assistant", "content": "hi"}
    assert piece["object"] == "chat.completion.chunk"
    last = json.loads(answer.piece(1, None, "stop").removeprefix(b"data: "))
    assert last["choices"][0] == {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    whole = answer.whole(["a"], ["length"], Usage(3, 4, 2))
    assert whole["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    text = json.loads(Answer("cmpl-1", False, "m", 7).piece(0, "hi").removeprefix(b"data: "))
    assert text["choices"][0]["text"] == "hi"
