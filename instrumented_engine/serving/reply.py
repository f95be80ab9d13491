"""The HTTP answer of one call, written to the ASGI server: one document, or a stream of events."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from phasewise.instrumented_engine.sequence import Refusal
from phasewise.instrumented_engine.serving.openai_api import error_document

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Mapping[str, str]


class Reply:
    """started: the status line is out, so that nothing else can be answered any more."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._headers = headers
        self.started = False

    async def stream(self) -> None:
        """Opens a stream of server-sent events."""
        await self._start(200, "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"})

    async def write(self, piece: bytes, *, last: bool = False) -> None:
        """Returns when the bytes were handed to the socket."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": not last})

    async def document(self, status: int, document: dict[str, Any], headers: Headers | None = None) -> None:
        body = json.dumps(document, ensure_ascii=False).encode()
        await self._start(status, "application/json", {"Content-Length": str(len(body)), **(headers or {})})
        await self.write(body, last=True)

    async def error(self, status: int, message: str, kind: str, field: str | None = None) -> None:
        await self.document(status, error_document(message, kind, field))

    async def refusal(self, refusal: Refusal, field: str) -> None:
        """429 with when to come again, or 400 for what can never be served. field: where the request is too large."""
        if refusal.never:
            await self.error(400, f"{field}: {refusal.reason}", "invalid_request_error", field)
            return
        wait_s = max(1, math.ceil(refusal.retry_after_s))
        told = f"the engine is busy: {refusal.reason} (try again in {wait_s} s)"
        document = error_document(told, "rate_limit_error", code="engine_overloaded")
        await self.document(429, document, {"Retry-After": str(wait_s)})

    async def _start(self, status: int, kind: str, headers: Headers) -> None:
        self.started = True
        named = {"Content-Type": kind, **self._headers, **headers}
        encoded = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
