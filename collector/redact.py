"""What people wrote and what models answered is not kept, and neither are credentials: rows are cleaned before the journal.

The default policy is metadata only. A key is content when it is one of `content_keys` or lies under one (`gen_ai.prompt.0.content`
under `gen_ai.prompt`); it is a credential when its name holds one of `credential_words`. Its value is replaced by its length,
so that a page can say "6,300,000 bytes were here" and nothing more. Keys inside maps and lists are judged the same way, as are
the attributes of events, links and resources. Events that carry a message (`message_events`) lose every text in their
attributes except those of `safe_keys`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from phasewise.collector.attributes import Value, to_json, to_sorted_json, whole_length_bytes

CONTENT_KEYS = (
    # OpenTelemetry GenAI conventions, past and present
    "gen_ai.prompt",
    "gen_ai.completion",
    "gen_ai.content",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.system_instructions",
    "gen_ai.system.message",
    "gen_ai.tool.definitions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    "gen_ai.tool.arguments",
    "gen_ai.tool.result",
    "gen_ai.tool.message",
    "gen_ai.retrieval.documents",
    "gen_ai.retrieval.query.text",
    "gen_ai.event.content",
    # OpenInference
    "input.value",
    "output.value",
    "llm.prompts",
    "llm.completions",
    "llm.input_messages",
    "llm.output_messages",
    "llm.prompt_template",
    "llm.function_call",
    "llm.tools",
    "retrieval.documents",
    "embedding.embeddings",
    "embedding.text",
    "document.content",
    "tool.parameters",
    # OpenLLMetry
    "traceloop.entity.input",
    "traceloop.entity.output",
    "llm.request.functions",
    # Vercel's AI SDK, Langfuse, MLflow, Pydantic AI, LiveKit
    "ai.prompt",
    "ai.response.text",
    "ai.response.object",
    "ai.response.toolcalls",
    "ai.toolcall.args",
    "ai.toolcall.result",
    "ai.value",
    "ai.values",
    "langfuse.observation.input",
    "langfuse.observation.output",
    "langfuse.trace.input",
    "langfuse.trace.output",
    "mlflow.spaninputs",
    "mlflow.spanoutputs",
    "pydantic_ai.all_messages",
    "all_messages_events",
    "final_result",
    "lk.user_input",
    "lk.user_transcript",
    "lk.response.text",
    "lk.chat_ctx",
    # gateways and engines: LiteLLM, Dynamo, Text Generation Inference (its debug text holds stop sequences and templates)
    "llm.request.messages",
    "llm.response.content",
    "request_payload",
    "response_payload",
    "payload",
    "parameters",
    "inputs",
    "prompt",
    "completion",
    "messages",
    "message.content",
    "content",
    "body",
    "instructions",
    "system_prompt",
    "user_prompt",
    "user_input",
    "user_message",
    "request.body",
    "response.body",
    "rawrequest",
    "rawresponse",
    "query",
    "text",
    "db.statement",
    "db.query.text",
    # HTTP
    "http.request.body",
    "http.response.body",
    "url.query",
)
CREDENTIAL_WORDS = ("authorization", "cookie", "api_key", "api-key", "apikey", "password", "passwd", "secret", "bearer")
# The last part of a name, and ends of names, that say the same; "token" alone is none: most names with it count tokens.
CREDENTIAL_PARTS = ("token", "jwt", "pwd", "passphrase", "auth")
CREDENTIAL_ENDS = (
    "access_token", "api_token", "auth_token", "bearer_token", "hf_token", "id_token", "refresh_token", "session_token",
    "access_key", "anthropic_key", "aws_key", "encryption_key", "openai_key", "private_key", "signing_key",
)  # fmt: skip
# What a process was started with, as the resource detectors of the SDKs tell it: keys are often given so.
CREDENTIAL_KEYS = ("process.command_args", "process.command_line")
# Under a content key, but telling nothing of the content.
SAFE_KEYS = ("role", "finish_reason", "finish_reasons", "id", "index", "type")
# Sizes of bodies are numbers worth keeping.
SIZE_KEYS = ("http.request.body.size", "http.response.body.size")
# URLs keep their path; what follows the question mark may be anything.
URL_KEYS = ("url.full", "http.url", "http.target")
MESSAGE_EVENTS = (
    "gen_ai.system.message",
    "gen_ai.user.message",
    "gen_ai.assistant.message",
    "gen_ai.tool.message",
    "gen_ai.choice",
    "gen_ai.content.prompt",
    "gen_ai.content.completion",
    "gen_ai.client.inference.operation.details",
)


@dataclass(frozen=True)  # no slots: the regular expression is made once and kept beside the fields
class RedactionPolicy:
    """What is removed. `content`: keep prompts and answers; credentials are removed all the same.

    Judged are names, not values: a key in a text under a name that says nothing of it stays. Not judged either: span names, status messages and `exception.*`, which tell why something failed; they are only cut in length.
    """

    content: bool = False
    content_keys: tuple[str, ...] = CONTENT_KEYS
    credential_words: tuple[str, ...] = CREDENTIAL_WORDS
    safe_keys: tuple[str, ...] = SAFE_KEYS
    size_keys: tuple[str, ...] = SIZE_KEYS
    url_keys: tuple[str, ...] = URL_KEYS
    message_events: tuple[str, ...] = field(default=MESSAGE_EVENTS)

    @cached_property
    def suspects(self) -> str:
        """Regular expression (RE2) of JSON text that needs a closer look: most spans of an engine need none."""
        words = "|".join(re.escape(word) for word in self.credential_words)
        names = [*self.url_keys, *(() if self.content else (*self.content_keys, *self.message_events))]
        keys = "|".join(re.escape(name) for name in names)
        ends = "|".join(re.escape(end) for end in (*CREDENTIAL_ENDS, *CREDENTIAL_KEYS))
        parts = "|".join(CREDENTIAL_PARTS)
        return rf'(?i)"[^"]*(?:{words})[^"]*":|"(?:[^"]*\.)?(?:{parts})":|"[^"]*(?:{ends})":|"(?:{keys})[".]'

    @cached_property
    def _passing(self) -> set[str]:
        return set()

    def passes(self, names: Iterable[str]) -> bool:
        """Whether nothing has to be removed from attributes and events that bear only these names, whatever their values are."""
        passing = self._passing
        for name in names:
            if name in passing:
                continue
            lowered = name.lower()
            if self.reason(name) is not None or lowered in self.url_keys or lowered in self.message_events:
                return False
            if len(passing) < _PASSING:
                passing.add(name)
        return True

    def reason(self, key: str) -> str | None:
        """Why a value under this key must go: content, credential; None where it may stay."""
        lowered = key.lower()
        if (
            any(word in lowered for word in self.credential_words)
            or lowered.rpartition(".")[2] in CREDENTIAL_PARTS
            or lowered.endswith(CREDENTIAL_ENDS)
            or lowered in CREDENTIAL_KEYS
        ):
            return "credential"
        if self.content or lowered in self.size_keys:
            return None
        if any(lowered == name or lowered.startswith(f"{name}.") for name in self.content_keys):
            return (
                None if lowered.rpartition(".")[2] in self.safe_keys and lowered not in self.content_keys else "content"
            )
        return None


_PASSING = 4096  # names known to pass that are remembered, each of up to limits.key_bytes

DEFAULT_POLICY = RedactionPolicy()


def redact_spans(
    rows: pa.Table, policy: RedactionPolicy = DEFAULT_POLICY, names: frozenset[str] | None = None
) -> tuple[pa.Table, dict[str, int]]:
    """The rows with content and credentials replaced by their length; counts of values: content, credential, url_query.

    names: all attribute keys and event names in the rows, where they are known: mostly they alone tell that nothing goes.
    """
    counts: dict[str, int] = {}
    if names is not None and policy.passes(names):
        return rows, counts
    for column, redact in (
        ("attributes", _object_text),
        ("resource", _sorted_object_text),
        ("events", _list_text),
        ("links", _list_text),
    ):
        rows = _redacted_column(rows, column, redact, policy, counts)
    return rows, counts


def redact_metrics(rows: pa.Table, policy: RedactionPolicy = DEFAULT_POLICY) -> tuple[pa.Table, dict[str, int]]:
    """The same for metric points."""
    counts: dict[str, int] = {}
    for column, redact in (("attributes", _object_text), ("resource", _sorted_object_text)):
        rows = _redacted_column(rows, column, redact, policy, counts)
    return rows, counts


_Redact = Callable[[str, RedactionPolicy, dict[str, int]], str]


def _redacted_column(
    rows: pa.Table, name: str, redact: _Redact, policy: RedactionPolicy, counts: dict[str, int]
) -> pa.Table:
    column = rows[name]
    if column.null_count == len(column):
        return rows
    suspicious = pc.match_substring_regex(column, policy.suspects)
    if not pc.any(suspicious).as_py():
        return rows
    seen: dict[str, tuple[str, dict[str, int]]] = {}  # a resource comes with every span of its request
    cleaned: list[str | None] = []
    for text, suspect in zip(column.to_pylist(), suspicious.to_pylist(), strict=True):
        if not suspect or text is None:
            cleaned.append(text)
            continue
        if text not in seen:
            own: dict[str, int] = {}
            seen[text] = (redact(text, policy, own), own)
        clean, own = seen[text]
        cleaned.append(clean)
        for reason, count in own.items():
            counts[reason] = counts.get(reason, 0) + count
    return rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), pa.array(cleaned, pa.string()))


def _object_text(text: str, policy: RedactionPolicy, counts: dict[str, int]) -> str:
    return to_json(_members(json.loads(text), policy, counts))


def _sorted_object_text(text: str, policy: RedactionPolicy, counts: dict[str, int]) -> str:
    return to_sorted_json(_members(json.loads(text), policy, counts))


def _list_text(text: str, policy: RedactionPolicy, counts: dict[str, int]) -> str:
    """Events and links: lists of objects with an `attributes` object in them."""
    items = json.loads(text)
    for item in items:
        bears_message = not policy.content and str(item.get("name", "")).lower() in policy.message_events
        attributes = _members(item["attributes"], policy, counts)
        if bears_message:
            attributes = {key: _message_value(key, value, policy, counts) for key, value in attributes.items()}
        item["attributes"] = attributes
    return to_json(items)


def _members(found: dict[str, Value], policy: RedactionPolicy, counts: dict[str, int]) -> dict[str, Value]:
    return {key: _value(key, value, policy, counts) for key, value in found.items()}


def _value(key: str, value: Value, policy: RedactionPolicy, counts: dict[str, int]) -> Value:
    reason = policy.reason(key)
    if reason == "credential" or (reason == "content" and not _is_number(value)):
        return _replaced(value, reason, counts)
    if isinstance(value, dict):
        return _members(value, policy, counts)
    if isinstance(value, list):
        return [_value("", item, policy, counts) for item in value]
    if isinstance(value, str) and key.lower() in policy.url_keys:
        return _plain_url(value, counts)
    return value


def _plain_url(url: str, counts: dict[str, int]) -> str:
    """A URL without its question and without user and password."""
    told, question, _ = url.partition("?")
    if question:
        counts["url_query"] = counts.get("url_query", 0) + 1
    scheme, slashes, rest = told.partition("://")
    host, at, path = rest.partition("/")
    if slashes and "@" in host:
        counts["credential"] = counts.get("credential", 0) + 1
        return f"{scheme}://{host.rpartition('@')[2]}{at}{path}"
    return told


def _message_value(key: str, value: Value, policy: RedactionPolicy, counts: dict[str, int]) -> Value:
    """In a message event only numbers, truth values and the safe keys stay."""
    if _is_number(value) or key.lower().rpartition(".")[2] in policy.safe_keys:
        return value
    return _replaced(value, "content", counts)


def _is_number(value: Value) -> bool:
    """Counts and sizes tell no text; lists of numbers may (token ids, embeddings)."""
    return isinstance(value, int | float)


def _replaced(value: Value, reason: str, counts: dict[str, int]) -> Value:
    if value is None or _is_mark(value):
        return value
    counts[reason] = counts.get(reason, 0) + 1
    length = whole_length_bytes(value) if isinstance(value, str) else len(to_json(value).encode())
    return f"[{reason} removed: {length} bytes]"


_MARK = re.compile(r"\[(?:content|credential) removed: \d+ bytes\]")


def _is_mark(value: Value) -> bool:
    return isinstance(value, str) and _MARK.fullmatch(value) is not None
