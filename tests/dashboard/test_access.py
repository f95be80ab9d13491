"""Which key may do what: every route against every scope, the login, and what the pages say of a server that asks nobody."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_client import Client
from fastapi.routing import APIRoute
from starlette.routing import Mount
from stocked import NOW_UNIX_NS, Served, make_served

from phasewise.collector.access import WRONG_KEYS, Door
from phasewise.collector.access_keys import SCOPES, KeyFile, new_key
from phasewise.dashboard.access import COOKIE, PUBLIC, RULES, Posture, scopes_of
from phasewise.rules.load import Rulebook

IMPLIED = {"admin": {"admin", "ingest", "read"}}
PLACEHOLDERS = {
    "identifier": "abc",
    "rest": "nothing",
    "path": "phasewise.js",
    "package_name": "dash",
    "fingerprinted_path": "x.js",
    "file": "0123456789abcdef",
    "table": "requests",
}


@dataclass
class Guarded:
    """An application that asks for keys, one key a scope, and its directory."""

    served: Served
    data: Path
    tokens: dict[str, str]
    door: Door

    def ask(self, method: str, path: str, scope: str | None, **more: Any) -> httpx.Response:
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        if scope:
            headers["authorization"] = f"Bearer {self.tokens.get(scope, scope)}"
        return asyncio.run(self.served.client._ask(method, path, {"headers": headers, **more}))

    def lines(self, action: str) -> list[dict[str, Any]]:
        path = self.data / "audit.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [one for one in told if one["action"] == action]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, rulebook: Rulebook) -> Iterator[Guarded]:
    data = tmp_path_factory.mktemp("guarded") / "data"
    data.mkdir()
    tokens = {}
    for scope in SCOPES:
        key, tokens[scope] = new_key((scope,), now_unix_ns=NOW_UNIX_NS)
        KeyFile(data).add(key)
    door = Door(data, "test", clock=lambda: NOW_UNIX_NS)
    served = make_served(data, rulebook, posture=Posture(door, "127.0.0.1"))
    yield Guarded(served, data, tokens, door)
    served.store.close()


def routes(served: Served) -> list[tuple[str, str]]:
    """(method, path) of everything that can be asked, after start-up as a server has it."""
    started = Client(served.app, started=True)
    started.get("/livez")
    found = []
    for route in served.app.routes:
        if isinstance(route, APIRoute):
            found += [(method, route.path) for method in route.methods or ()]
        elif isinstance(route, Mount):
            found.append(("GET", f"{route.path}/{{path:path}}"))
    return sorted(set(found))


def address(path: str) -> str:
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: PLACEHOLDERS[match[1]], path)


def test_every_route_has_a_rule_and_every_rule_a_route(guarded: Guarded) -> None:
    found = {("GET" if method == "HEAD" else method, path) for method, path in routes(guarded.served)}
    assert found == set(RULES), "a new route needs its line in dashboard/access.py"


def test_a_route_without_a_rule_asks_for_admin() -> None:
    assert scopes_of("POST", "/api/v2/new") == ("read",), "nothing is there: the answer is a 404"
    assert scopes_of("POST", "/new") == ("admin",)
    assert scopes_of("TRACE", "/api/v1/health") == ("admin",)


@pytest.mark.parametrize("scope", [None, *SCOPES])
def test_every_route_lets_in_those_its_rule_names_and_nobody_else(guarded: Guarded, scope: str | None) -> None:
    for (method, path), wanted in RULES.items():
        own = IMPLIED.get(scope or "", {scope})
        answer = guarded.ask(method, address(path), scope, content=b"" if method in ("GET", "HEAD") else b"[")
        if wanted == PUBLIC or own & set(wanted):
            expected = {401} if path == "/api/v1/session" and method == "POST" else set()
            assert answer.status_code not in {401, 403} - expected, (method, path, answer.text)
        else:
            assert answer.status_code == (401 if scope is None else 403), (method, path)
            assert "phw_" not in answer.text or "phw_..." in answer.text


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_methods_that_read_are_as_closed(guarded: Guarded, method: str) -> None:
    assert guarded.ask(method, "/api/v1/verdict", None).status_code == 401


def test_a_page_without_a_key_leads_to_the_login_and_back(guarded: Guarded) -> None:
    answer = guarded.ask("GET", "/requests/a%20b?from=now-1h&f=x", None, headers={"accept": "text/html"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=%2Frequests%2Fa%20b%3Ffrom%3Dnow-1h%26f%3Dx"
    page = guarded.ask("GET", "/login", None)
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text and '<script src="/login.js"' in page.text
    assert "javascript" in guarded.ask("GET", "/login.js", None).headers["content-type"]


def test_a_login_is_a_cookie_that_no_script_reads_and_ends(guarded: Guarded) -> None:
    answer = guarded.ask("POST", "/api/v1/session", None, content=json.dumps({"key": guarded.tokens["read"]}))
    assert answer.status_code == 201 and answer.json()["scopes"] == ["read"]
    told = answer.headers["set-cookie"]
    assert "HttpOnly" in told and "samesite=lax" in told.lower() and guarded.tokens["read"] not in told
    cookie = {"cookie": told.partition(";")[0]}
    assert guarded.ask("GET", "/api/v1/health", None, headers=cookie).status_code == 200
    assert guarded.ask("GET", "/triage", None, headers=cookie).status_code == 200
    assert guarded.ask("POST", "/api/v1/annotations", None, headers=cookie, content=b"{}").status_code == 403
    assert guarded.ask("DELETE", "/api/v1/session", None, headers=cookie).status_code == 200
    assert guarded.ask("GET", "/api/v1/health", None, headers=cookie).status_code == 401
    assert len(guarded.lines("login")) == 1


def test_a_session_over_https_is_never_sent_in_plain_text(guarded: Guarded) -> None:
    secure = Client(guarded.served.app, "https://127.0.0.1:8080")
    answer = secure.post("/api/v1/session", json={"key": guarded.tokens["read"]})
    assert "secure" in answer.headers["set-cookie"].lower()


def test_a_session_ends_with_its_key(guarded: Guarded) -> None:
    key, token = new_key(("read",), now_unix_ns=NOW_UNIX_NS)
    KeyFile(guarded.data).add(key)
    guarded.door.reload()
    told = guarded.ask("POST", "/api/v1/session", None, content=json.dumps({"key": token})).headers["set-cookie"]
    cookie = {"cookie": told.partition(";")[0]}
    assert guarded.ask("GET", "/api/v1/health", None, headers=cookie).status_code == 200
    KeyFile(guarded.data).revoke(key.key_id, NOW_UNIX_NS)
    guarded.door.reload()
    assert guarded.ask("GET", "/api/v1/health", None, headers=cookie).status_code == 401


@pytest.mark.parametrize("cookie", [f"{COOKIE}=guess", f"{COOKIE}=", "a=b; =; \x01", f"{COOKIE}={'x' * 5000}"])
def test_a_made_up_cookie_is_none(guarded: Guarded, cookie: str) -> None:
    assert guarded.ask("GET", "/api/v1/health", None, headers={"cookie": cookie}).status_code == 401


@pytest.mark.parametrize("body", ['{"key": "phw_no"}', '{"key": 7}', "[]", '{"key": "ünïcode"}'])
def test_a_wrong_key_logs_nobody_in_and_is_noted(guarded: Guarded, body: str) -> None:
    before = len(guarded.lines("login_refused"))
    answer = guarded.ask("POST", "/api/v1/session", None, content=body.encode())
    assert answer.status_code == 401 and "set-cookie" not in answer.headers
    assert len(guarded.lines("login_refused")) == before + 1


def test_logins_without_a_key_do_not_fill_the_disk(guarded: Guarded) -> None:
    for _ in range(150):
        assert guarded.ask("POST", "/api/v1/session", None, content=b"{}").status_code == 401
    assert 90 <= len(guarded.lines("login_refused")) <= 110


def test_a_login_from_another_site_is_refused(guarded: Guarded) -> None:
    body = json.dumps({"key": guarded.tokens["read"]})
    for headers, status in (({"origin": "http://evil.example"}, 403), ({"content-type": "text/plain"}, 415)):
        assert guarded.ask("POST", "/api/v1/session", None, content=body, headers=headers).status_code == status


def test_guessing_is_told_to_stop(guarded: Guarded) -> None:
    door = Door(guarded.data, "test", clock=lambda: NOW_UNIX_NS)
    for _ in range(WRONG_KEYS):
        door.admit("Bearer phw_none_x", "127.0.0.1", "read")
    from phasewise.dashboard.access import Access, Sessions

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "method": "GET", "path": "/api/v1/health", "client": ("127.0.0.1", 1)}
    access = Access(guarded.served.app, door=door, sessions=Sessions())
    headers = [(b"authorization", b"Bearer phw_none_x")]
    asyncio.run(access({**scope, "headers": headers}, lambda: None, send))  # type: ignore[arg-type,return-value]
    assert told[0]["status"] == 429 and b"retry-after" in dict(told[0]["headers"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_asks_nobody_says_so_loudly(serve: Callable[..., Served], tmp_path: Path, host: str) -> None:
    (tmp_path / "data-0").mkdir()
    door = Door(tmp_path / "data-0", "test", clock=lambda: NOW_UNIX_NS)
    served = serve(posture=Posture(door, host))
    (notice,) = served.client.get("/api/v1/pulse").json()["notices"]
    assert "whoever reaches this address can read and change everything" in notice
    assert "phasewise_insecure_no_auth 1.0" in served.client.get("/metrics").text
    key, token = new_key(("read",), now_unix_ns=NOW_UNIX_NS)
    KeyFile(tmp_path / "data-0").add(key)
    door.reload()
    assert served.client.get("/api/v1/pulse").status_code == 401
    headers = {"Authorization": f"Bearer {token}"}
    assert served.client.get("/api/v1/pulse", headers=headers).json()["notices"] == []
    told = served.client.get("/metrics", headers=headers).text
    assert "phasewise_insecure_no_auth 0.0" in told and "phasewise_keys_required 1.0" in told


def test_a_server_on_loopback_without_keys_is_no_news(served: Served) -> None:
    assert served.client.get("/api/v1/pulse").json()["notices"] == []
    assert "phasewise_insecure_no_auth 0.0" in served.client.get("/metrics").text


def test_probes_tell_no_paths_to_strangers(guarded: Guarded) -> None:
    assert guarded.ask("GET", "/readyz", None).json() == {"status": "ok", "error": None}
