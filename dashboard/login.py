"""The login page and its two calls: a key in, a session cookie out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from phasewise.collector.access import Door, Refused
from phasewise.collector.audit import audit
from phasewise.dashboard.access import COOKIE, SESSION_S, Sessions, address_of, headers_of, session_cookie

_MINUTE_NS = 60 * 10**9
_NOTED = 100  # refused logins a minute that the audit log holds, besides wrong keys, which the door counts and stops
_PAGE = """<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="dark light">
    <link rel="icon" href="data:,">
    <title>Phasewise: log in</title>
    <style>
      /* The colours of assets/1-base.css, which nobody is given before the login. */
      :root { --page: #0e1217; --panel: #151b23; --inset: #10161d; --line: #364457; --text: #e6ebf2; --soft: #a9b4c4;
        --accent: #8ab4ff; --fill: #2c5fb3; --bad: #ff7b72; }
      @media (prefers-color-scheme: light) {
        :root { --page: #f3f5f8; --panel: #ffffff; --inset: #f7f9fb; --line: #c3cdd9; --text: #17202c; --soft: #46546a;
          --accent: #1f5fbf; --fill: #1f5fbf; --bad: #b3261e; }
      }
      body { font: 15px/1.5 system-ui, sans-serif; display: grid; place-items: center; align-content: center; gap: 16px;
        min-height: 100vh; margin: 0; padding: 0 16px; box-sizing: border-box; background: var(--page); color: var(--text); }
      form { display: grid; gap: 12px; width: min(420px, 100%); padding: 28px; box-sizing: border-box;
        background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
      h1 { font-size: 20px; margin: 0; }
      label, .hint { color: var(--soft); }
      .hint { font-size: 13px; margin: 0; }
      code { font-size: 12px; white-space: nowrap; }
      input, button { font: inherit; padding: 9px 12px; border-radius: 6px; border: 1px solid var(--line); }
      input { background: var(--inset); color: var(--text); }
      button { background: var(--fill); border-color: var(--fill); color: #ffffff; font-weight: 600; cursor: pointer; }
      :focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
      #problem { margin: 0; color: var(--bad); }
      #problem:empty { display: none; }
    </style>
    <script src="/login.js" defer></script>
  </head>
  <body>
    <form id="login">
      <h1>Phasewise</h1>
      <label for="key">Access key with the scope read</label>
      <input id="key" name="key" type="password" autocomplete="current-password" spellcheck="false" required autofocus>
      <button type="submit">Log in</button>
      <p id="problem" role="alert"></p>
      <p class="hint">Made on the server with <code>phasewise keys create --scope read</code></p>
    </form>
    <noscript>The pages need JavaScript.</noscript>
  </body>
</html>
"""
# Only an address of this server is gone to: a link from elsewhere must not choose where a login ends.
_SCRIPT = """(function () {
  "use strict";
  document.getElementById("login").addEventListener("submit", function (event) {
    event.preventDefault();
    var problem = document.getElementById("problem");
    problem.textContent = "";
    fetch("/api/v1/session", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ key: document.getElementById("key").value.trim() }),
    })
      .then(function (answer) {
        return answer.json().then(function (told) {
          if (!answer.ok) {
            problem.textContent = told.error;
            return;
          }
          var next = new URLSearchParams(location.search).get("next") || "/triage";
          location.assign(/^\\/(?![\\/\\\\])/.test(next) ? next : "/triage");
        });
      })
      .catch(function () {
        problem.textContent = "The server does not answer.";
      });
  });
})();
"""


class _Noted:
    """Logins without a key, or too many of them, could be sent without end: they must not fill the disk."""

    def __init__(self) -> None:
        self._minute = -1
        self._count = 0

    def allows(self, reason: str, now_unix_ns: int) -> bool:
        if reason in ("wrong", "forbidden"):
            return True
        minute = now_unix_ns // _MINUTE_NS
        self._count = self._count + 1 if minute == self._minute else 1
        self._minute = minute
        return self._count <= _NOTED


def add_login(app: FastAPI, door: Door, sessions: Sessions, data: Path, clock: Callable[[], int]) -> None:
    """Adds /login, and what it calls."""

    @app.get("/login", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers={"cache-control": "no-store"})

    @app.get("/login.js", include_in_schema=False)
    def script() -> Response:
        return Response(_SCRIPT, media_type="text/javascript")

    noted = _Noted()

    @app.post("/api/v1/session")
    async def log_in(request: Request) -> JSONResponse:
        token = await _key(request)
        address = address_of(request.scope)
        found = door.admit(f"Bearer {token}", address, "read", "content", "admin")
        if isinstance(found, Refused):
            now = clock()
            if noted.allows(found.reason, now):
                audit(data, "login_refused", now, address=address, detail=found.reason)
            status = {"forbidden": 403, "too_many_wrong": 429}.get(found.reason, 401)
            again = {"retry-after": str(found.retry_after_s)} if found.retry_after_s else None
            return JSONResponse({"error": found.message, "field": "key", "remedy": ""}, status, headers=again)
        answer = JSONResponse({"key_id": found.key_id, "scopes": list(found.key.scopes) if found.key else []}, 201)
        if found.key is not None:
            audit(data, "login", clock(), key_id=found.key_id, address=address)
            answer.set_cookie(
                COOKIE,
                sessions.begin(found.key_id),
                max_age=int(SESSION_S),
                httponly=True,
                samesite="lax",
                secure=request.url.scheme == "https",
            )
        return answer

    @app.delete("/api/v1/session")
    def log_out(request: Request) -> JSONResponse:
        sessions.end(session_cookie(headers_of(request.scope)))
        answer = JSONResponse({"ended": True})
        answer.delete_cookie(COOKIE)
        return answer


async def _key(request: Request) -> str:
    from phasewise.dashboard.api import json_body

    told: Any = await json_body(request)
    key = told.get("key") if isinstance(told, dict) else None
    return key if isinstance(key, str) else ""
