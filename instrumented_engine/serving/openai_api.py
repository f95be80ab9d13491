"""What a client of the OpenAI API asks for: the body of /v1/completions or /v1/chat/completions, checked. Pure.

A field that would change the answer and is not supported is refused by name; fields nobody knows are ignored, as OpenAI does.
Extensions are those of vLLM (`ignore_eos`, `priority`) and our own `external_tools` and `request_class`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.instrumented_engine.serving.tools import ToolAsk
from phasewise.rules.errors import InputError

Document = Mapping[str, Any]
Prompt = str | tuple[int, ...]
DEFAULT_COMPLETION_TOKENS = 16
MOST_CHOICES = 128
MOST_NAME_CHARACTERS = 512
_MOST_WHOLE = 2**63 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields that change the answer and are not supported, with the values that change nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "prompt_logprobs": (None,), "echo": (None, False),
    "suffix": (None, ""), "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
    "function_call": (None, "none", "auto"), "logit_bias": (None, {}), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1), "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]),
    "audio": (None,), "use_beam_search": (None, False),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call. prompts: one for a chat (None: its messages are the prompt); max_tokens: None: as many as fit."""

    chat: bool
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Document, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
    user: str | None = None
    conversation_id: str | None = None
    request_class: str | None = None
    tools: tuple[ToolAsk, ...] = ()

    @property
    def sequences(self) -> int:
        return self.n * (1 if self.chat else len(self.prompts))


def parse_body(body: bytes, *, chat: bool) -> Generation:
    """Raises InputError naming the field and what to do."""
    try:
        document = json.loads(body)
    except ValueError as problem:  # also bytes that are no text
        raise refused("", f"the body is not JSON: {problem}", "send a JSON object") from problem
    except RecursionError as problem:
        raise refused("", "the body is nested too deeply", "send a flat JSON object") from problem
    if not isinstance(document, dict):
        raise refused("", "the body is not a JSON object", "send model and prompt or messages in an object")
    if b"\\ud" in body.lower():  # JSON may escape half a character, which no tokenizer can read
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            raise refused("", "the body holds half of a surrogate pair", "send whole characters") from problem
    return parse(document, chat=chat)


def parse(document: Document, *, chat: bool) -> Generation:
    """Raises InputError naming the field and what to do."""
    for name, harmless in _UNSUPPORTED.items():
        if name in document and not any(_same(document[name], value) for value in harmless):
            raise refused(name, f"{_short(document[name])} is not supported by this engine", "leave it out")
    n = _whole(document, "n", 1, least=1, most=MOST_CHOICES)
    best_of = _whole(document, "best_of", n, least=1, most=MOST_CHOICES)
    if best_of != n:
        raise refused("best_of", f"{best_of} differs from n, and choices are not ranked here", "leave it out")
    limit = _optional_whole(document, "max_completion_tokens") if chat else None
    if limit is None:
        limit = _optional_whole(document, "max_tokens")
    if limit is None and not chat:
        limit = DEFAULT_COMPLETION_TOKENS
    options = _object(document, "stream_options")
    metadata = _object(document, "metadata")
    generation = Generation(
        chat=chat,
        model=_text(document, "model") or "",
        prompts=() if chat else _prompts(document),
        messages=_messages(document) if chat else (),
        n=n,
        max_tokens=limit,
        temperature=_number(document, "temperature", 1.0, least=0.0, most=2.0),
        top_p=_number(document, "top_p", 1.0, least=0.0, most=1.0),
        seed=_optional_whole(document, "seed", least=-(2**63)),
        stop=_stops(document),
        ignore_eos=_truth(document, "ignore_eos"),
        stream=_truth(document, "stream"),
        include_usage=_truth(options, "include_usage", "stream_options."),
        priority=_whole(document, "priority", 0, least=-(2**31), most=2**31 - 1),
        user=_text(document, "user") or None,
        conversation_id=_text(metadata, "conversation_id", "metadata.") or None,
        request_class=_text(document, "request_class") or None,
        tools=_tools(document),
    )
    if not generation.model:
        raise refused("model", "is missing", "name the model, as GET /v1/models lists it")
    if generation.sequences > MOST_CHOICES:
        raise refused("prompt", f"{generation.sequences} sequences in one call", f"at most {MOST_CHOICES} together")
    if generation.sequences > 1 and generation.tools:
        raise refused("external_tools", "go with one sequence only", "leave n out and send one prompt")
    return generation


def refused(field: str, problem: str, remedy: str = "") -> InputError:
    return InputError("request", field, problem, remedy)


def error_document(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The shape in which OpenAI tells of errors."""
    return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}


# --- fields ----------------------------------------------------------------------------------------------------------


def _prompts(document: Document) -> tuple[Prompt, ...]:
    value = document.get("prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(_is_whole(item) for item in value):
            return (_tokens(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and item and all(_is_whole(token) for token in item) for item in value):
            return tuple(_tokens(item) for item in value)
    problem = "is missing" if value is None else f"{_short(value)} is no prompt"
    raise refused("prompt", problem, "give a text, a list of token ids, or a list of either")


def _tokens(values: list[int]) -> tuple[int, ...]:
    if min(values) < 0:
        raise refused("prompt", f"{min(values)} is no token id", "ids begin at 0")
    return tuple(values)


def _messages(document: Document) -> tuple[Document, ...]:
    value = document.get("messages")
    if not isinstance(value, list) or not value:
        raise refused("messages", "is missing or empty", "give a list of objects with role and content")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(item: object, field: str) -> Document:
    if not isinstance(item, dict):
        raise refused(field, f"{_short(item)} is not an object", "give role and content")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise refused(f"{field}.role", f"{_short(role)} is unknown", f"one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise refused(f"{field}.content", "holds parts that are not text", "this engine reads text only")
        content = "\n".join(str(part) for part in parts)
    if content is not None and not isinstance(content, str):
        raise refused(f"{field}.content", f"{_short(content)} is not text", "give a text or a list of text parts")
    return {"role": role, "content": content or ""}


def _stops(document: Document) -> tuple[str, ...]:
    value = document.get("stop")
    if value is None or value == "":
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 16:
        raise refused("stop", f"{_short(value)} is no stop text", "give a text or up to 16 of them, none empty")
    return tuple(stops)


def _tools(document: Document) -> tuple[ToolAsk, ...]:
    value = document.get("external_tools")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 16:
        raise refused(
            "external_tools", f"{_short(value)} is no list of calls", "give up to 16 objects with name and when"
        )
    return tuple(_tool(item, f"external_tools[{index}]") for index, item in enumerate(value))


def _tool(item: object, field: str) -> ToolAsk:
    if not isinstance(item, dict):
        raise refused(field, f"{_short(item)} is not an object", "give name and when")
    name, when, marker = (
        _text(item, "name", f"{field}."),
        item.get("when", "before"),
        _text(item, "marker", f"{field}."),
    )
    after = _optional_whole(item, "after_tokens", f"{field}.")
    if not name:
        raise refused(f"{field}.name", "is missing", "name a tool the server was started with")
    if when == "before" or when == "after":
        return ToolAsk(name, when)
    if when != "inside":
        raise refused(f"{field}.when", f"{_short(when)} is unknown", "before, inside or after")
    if (after is None) == (not marker):
        raise refused(field, "says not when in the stream", "give after_tokens or marker, one of them")
    return ToolAsk(name, "inside", after, marker or None)


# --- values ----------------------------------------------------------------------------------------------------------


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _optional_whole(document: Document, name: str, prefix: str = "", least: int = 1) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(f"{prefix}{name}", f"{_short(value)} is not a whole number", "leave it out for the default")
    if value < least:
        raise refused(f"{prefix}{name}", f"{_short(value)} is below {least}", f"give {least} or more")
    if value > _MOST_WHOLE:
        raise refused(f"{prefix}{name}", f"{_short(value)} is above {_MOST_WHOLE}", "give a smaller number")
    return value


def _whole(document: Document, name: str, default: int, *, least: int, most: int) -> int:
    value = _optional_whole(document, name, least=least)
    if value is None:
        return default
    if value > most:
        raise refused(name, f"{value} is above {most}", f"give {least} to {most}")
    return value


def _same(value: object, harmless: object) -> bool:
    """Equal, and no number for a truth value: `logprobs: 0` asks for something, `logprobs: false` does not."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _number(document: Document, name: str, default: float, *, least: float, most: float) -> float:
    value = document.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise refused(
            name, f"{_short(value)} is not a number from {least:g} to {most:g}", "leave it out for the default"
        )
    return float(value)


def _truth(document: Document, name: str, prefix: str = "") -> bool:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{prefix}{name}", f"{_short(value)} is not true or false", "leave it out for false")
    return bool(value)


def _text(document: Document, name: str, prefix: str = "") -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"{prefix}{name}", f"{_short(value)} is not a text", "put it in quotes or leave it out")
    if value is not None and len(value) > MOST_NAME_CHARACTERS:
        raise refused(
            f"{prefix}{name}", f"{len(value)} characters are too many", f"give up to {MOST_NAME_CHARACTERS} characters"
        )
    return value


def _object(document: Document, name: str) -> Document:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(name, f"{_short(value)} is not an object", "leave it out or give an object")
    return value


def _short(value: object) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
