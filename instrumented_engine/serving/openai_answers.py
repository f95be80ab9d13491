"""What the OpenAI API answers: whole answers, pieces of a stream, usage. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The documents of one call. id: of the response, also what the engine's span calls the request."""

    id: str
    chat: bool
    model: str
    created_s: int

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return self._document(kind, choices, usage.document())

    def piece(self, index: int, text: str | None, reason: str | None = None, *, first: bool = False) -> bytes:
        """One event of a stream. text: None with the last piece, which only says why it ended."""
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": text or ""}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._document(kind, [{"index": index, **said, "logprobs": None, "finish_reason": reason}]))

    def usage(self, usage: Usage) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._document(kind, [], usage.document()))

    def _document(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        document = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model, "choices": choices}
        return document if usage is None else {**document, "usage": usage}


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
