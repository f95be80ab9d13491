"""Keys for the API and the pages: which route asks for which scope, and the login that turns a key into a session.

A route that stands in no rule asks for `admin`, so that a new one is closed until somebody thought about it; a test compares the
rules with the routes. Keys come in the Authorization header, or as a session cookie that a script cannot read; never in an address.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.routing import compile_path

from phasewise.collector.access import ANYBODY, Caller, Door, Refused
from phasewise.collector.audit import audit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COOKIE = "phasewise-session"
SESSION_S = 12 * 3600.0
_SESSIONS = 1000
PUBLIC: tuple[str, ...] = ()
_READ, _SEND, _ADMIN = ("read",), ("ingest",), ("admin",)
# (method, path as the route says it) to the scopes of which one is enough. HEAD is as GET.
RULES: Mapping[tuple[str, str], tuple[str, ...]] = {
    # Probes of orchestrators, which tell nothing of the data; the login itself.
    ("GET", "/livez"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/login"): PUBLIC,
    ("GET", "/login.js"): PUBLIC,
    ("POST", "/api/v1/session"): PUBLIC,
    ("DELETE", "/api/v1/session"): PUBLIC,
    ("GET", "/metrics"): _READ,
    ("GET", "/api/v1/health"): _READ,
    ("GET", "/api/v1/pulse"): _READ,
    ("GET", "/api/v1/work"): _READ,
    ("DELETE", "/api/v1/work"): _READ,
    ("GET", "/api/v1/verdict"): _READ,
    ("GET", "/api/v1/requests"): _READ,
    ("GET", "/api/v1/requests/{identifier:path}"): _READ,
    ("GET", "/api/v1/interference"): _READ,
    ("GET", "/api/v1/interference/{identifier:path}"): _READ,
    ("GET", "/api/v1/turns"): _READ,
    ("GET", "/api/v1/slices"): _READ,
    ("GET", "/api/v1/differences"): _READ,
    ("GET", "/api/v1/timeline"): _READ,
    ("GET", "/api/v1/data-health"): _READ,
    ("GET", "/api/v1/annotations"): _READ,
    ("POST", "/api/v1/explain-summary"): _READ,  # computes from its body alone
    ("POST", "/api/v1/outcomes"): _READ,  # a reader's word on a verdict, from the page
    ("POST", "/api/v1/annotations"): _SEND,
    ("POST", "/api/v1/ingest"): _SEND,
    ("GET", "/api/v1/imports/{file}"): _SEND,
    ("GET", "/api/v1/export/{table}"): _READ,
    ("POST", "/api/v1/db/snapshot"): _ADMIN,
    ("POST", "/api/v1/db/purge"): _ADMIN,
    # The pages: files, layout, and callbacks, which only read.
    ("GET", "/"): _READ,
    ("GET", "/assets/{path:path}"): _READ,
    ("GET", "/_dash-component-suites/{package_name}/{fingerprinted_path:path}"): _READ,
    ("GET", "/_dash-layout"): _READ,
    ("GET", "/_dash-dependencies"): _READ,
    ("POST", "/_dash-update-component"): _READ,
    ("GET", "/_reload-hash"): _READ,
    ("GET", "/_favicon.ico"): _READ,
    # Where there is nothing, nobody is told so without a key.
    **{
        (method, path): _READ
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        for path in ("/api", "/v1", *(f"/{name}/{{rest:path}}" for name in ("api", "v1", "metrics", "livez", "readyz")))
    },
    ("GET", "/{rest:path}"): _READ,
}
_UNKNOWN = ("admin",)
_COMPILED = [(method, compile_path(path)[0], scopes) for (method, path), scopes in RULES.items()]
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def scopes_of(method: str, path: str) -> tuple[str, ...]:
    """The scopes of which a request needs one; PUBLIC for none."""
    asked = "GET" if method in ("HEAD", "OPTIONS") else method
    return next((scopes for known, shape, scopes in _COMPILED if known == asked and shape.match(path)), _UNKNOWN)


def caller() -> Caller:
    """Who asks, in whatever thread the answer is made."""
    return _CALLER.get()


@dataclass(frozen=True, slots=True)
class Posture:
    """How open this server is. door: None where nothing is served, as in a report; host: as bound; content: prompts and answers
    are kept; encrypted: with certificates."""

    door: Door | None = None
    host: str = ""
    content: bool = False
    encrypted: bool = False

    @property
    def insecure(self) -> bool:
        """Other machines reach it, and nobody is asked for a key."""
        return bool(self.door) and not self.door_required and bool(self.host) and self.host not in _LOOPBACK

    @property
    def door_required(self) -> bool:
        return bool(self.door and self.door.required)

    def notices(self) -> list[str]:
        """What everybody who looks at a page must know of it."""
        found = []
        if self.insecure:
            found.append(
                "No access keys: whoever reaches this address can read and change everything (phasewise keys create)."
            )
        if self.content:
            found.append("This server stores prompts and answers.")
        if self.door and self.door.trouble:
            found.append(f"No key is accepted: {self.door.trouble}")
        return found


@dataclass(slots=True)
class Sessions:
    """Who is logged in, by the hash of their cookie. In memory only: after a restart one logs in again."""

    _open: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)

    def begin(self, key_id: str) -> str:
        token = secrets.token_urlsafe(32)
        self._open[_hashed(token)] = (key_id, time.monotonic() + SESSION_S)
        while len(self._open) > _SESSIONS:
            self._open.popitem(last=False)
        return token

    def key_id(self, token: str) -> str | None:
        found = self._open.get(_hashed(token))
        return found[0] if found and found[1] > time.monotonic() else None

    def end(self, token: str) -> None:
        self._open.pop(_hashed(token), None)


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Access:
    """The layer inside the gate: lets a request in by its key or session, and tells the rest who asks."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        door: Door,
        sessions: Sessions,
    ) -> None:
        self.app, self.door, self.sessions = app, door, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        found = self._admitted(scope)
        if isinstance(found, Refused):
            await self._refuse(found, scope, send)
            return
        before = _CALLER.set(found)
        try:
            await self.app(scope, receive, send)
        finally:
            _CALLER.reset(before)

    def _admitted(self, scope: Scope) -> Caller | Refused:
        scopes = scopes_of(scope["method"], scope["path"])
        if not scopes:
            return ANYBODY
        headers = headers_of(scope)
        cookie = session_cookie(headers)
        if "authorization" not in headers and cookie:
            key = self.door.in_force(self.sessions.key_id(cookie) or "")
            if key is not None and any(key.allows(one) for one in scopes):
                return Caller(key)
            if key is not None:
                return Refused("forbidden", f"key {key.key_id} has no scope {' or '.join(scopes)}")
        return self.door.admit(headers.get("authorization"), address_of(scope), *scopes)

    async def _refuse(self, refused: Refused, scope: Scope, send: Send) -> None:
        headers = headers_of(scope)
        wants_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        if refused.reason == "missing" and wants_page:
            asked = scope.get("asked_path", scope["path"])
            query = scope.get("query_string", b"").decode("latin-1")
            there = quote(asked + (f"?{query}" if query else ""), safe="")
            await _answer(send, 303, b"", [(b"location", f"/login?next={there}".encode())])
            return
        status = {"forbidden": 403, "too_many_wrong": 429}.get(refused.reason, 401)
        told = {"error": refused.message, "field": "Authorization", "remedy": "phasewise keys create makes a key"}
        more = [(b"content-type", b"application/json")]
        if status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        if refused.retry_after_s:
            more.append((b"retry-after", str(refused.retry_after_s).encode()))
        await _answer(send, status, json.dumps(told).encode(), more)


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    more = [length, (b"cache-control", b"no-store"), (b"connection", b"close"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": more})
    await send({"type": "http.response.body", "body": body})


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def session_cookie(headers: Mapping[str, str]) -> str:
    """The token of the session; empty without one."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def log_content_access(data: Path, unix_ns: int, request_key: str) -> None:
    """One line for a look at what a prompt or an answer said."""
    audit(data, "content_access", unix_ns, key_id=caller().key_id, detail=request_key)
