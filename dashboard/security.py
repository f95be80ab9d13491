"""What stands between a browser and the pages: who may be asked as which host, who may change something, what a page may load.

A page on another site can make a browser send requests to a server on this machine. So the Host must be ours (DNS rebinding),
and whatever is not a plain read must come from our own pages and carry a content type that a form cannot send.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
# Content types that any page can make a browser send across sites without asking first.
_FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""})
_RAW_BODY_PATHS = ("/api/v1/ingest",)


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    error: str
    field: str
    remedy: str


def content_policy(script_hashes: Iterable[str]) -> str:
    """Scripts from here and the ones Dash writes into its page; styles inline, because Plotly and AG Grid write them."""
    return (
        f"default-src 'self'; script-src 'self' {' '.join(script_hashes)}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; font-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    )


def _host_name(host: str) -> str:
    return (urlsplit(f"//{host}").hostname or "").lower()


def allowed_hosts(bound_host: str | None) -> frozenset[str] | None:
    """Names the server answers to. None, for a server that other machines may reach: there its proxy knows the names."""
    if bound_host and bound_host not in _LOOPBACK:
        return None
    return frozenset(_LOOPBACK)


def refusal(
    method: str, path: str, headers: Sequence[tuple[bytes, bytes]], hosts: frozenset[str] | None
) -> Refusal | None:
    """Why a request is not answered, or None."""
    named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    host = named.get("host", "")
    if hosts is not None and _host_name(host) not in hosts:
        return Refusal(400, f"this server is not {host or 'a server without a name'}", "Host", "ask for 127.0.0.1")
    if method in _READS:
        return None
    origin = named.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return Refusal(403, "the request comes from another site", "Origin", "send it from this server's own pages")
    if named.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return Refusal(
            403, "the request comes from another site", "Sec-Fetch-Site", "send it from this server's own pages"
        )
    kind = named.get("content-type", "").partition(";")[0].strip().lower()
    if path in _RAW_BODY_PATHS:
        if kind in _FORM_TYPES:
            return Refusal(
                415, f"cannot take {kind or 'a body without a type'}", "Content-Type", "send application/octet-stream"
            )
    elif kind != "application/json":
        return Refusal(415, f"cannot take {kind or 'a body without a type'}", "Content-Type", "send application/json")
    return None


class Gate:
    """The outermost layer: refuses, rewrites page addresses to the one document they share, and adds the headers."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, hosts: frozenset[str] | None, state: Any
    ) -> None:
        self.app = app
        self.hosts = hosts
        self.state = state  # of the FastAPI app: `content_policy` and `page_paths` are set once Dash is attached

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # Dash opens a socket route for callbacks that these pages do not use.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = refusal(scope["method"], scope["path"], scope["headers"], self.hosts)
        policy = getattr(self.state, "content_policy", content_policy(()))
        added = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-frame-options", b"DENY"),
        ]

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if refused is not None:
            await _answer(refused, send_with_headers)
            return
        if scope["method"] in ("GET", "HEAD") and self._is_page(scope["path"]):
            # Dash serves its document at one path; the browser reads the page from the address.
            scope = {**scope, "path": "/", "raw_path": b"/", "asked_path": scope["path"]}
        await self.app(scope, receive, send_with_headers)

    def _is_page(self, path: str) -> bool:
        paths: tuple[str, ...] = getattr(self.state, "page_paths", ())
        return any(path == page or path.startswith(f"{page}/") for page in paths)


async def _answer(refused: Refusal, send: Send) -> None:
    body = json.dumps({"error": refused.error, "field": refused.field, "remedy": refused.remedy}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
