"""Questions to another system's HTTP API, and its refusals in words that say what to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from phasewise.collector.backfill.pages import TooMuch
from phasewise.rules.errors import InputError, MachineError

ANSWER_BYTES = 32 << 20  # parsed JSON takes about ten times its text
TIMEOUT_S = 60.0
CONNECT_S = 10.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # between tries while a server is busy
_LONGEST_PAUSE_S = 30.0
_BUSY = (429, 502, 503, 504)
_LONG_QUERY = 4000  # characters; longer ones go into a body
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_TOO_MUCH = re.compile(r"too many|too large|exceed|timed out|out of memory|maximum resolution", re.IGNORECASE)
Parameters = Sequence[tuple[str, str]]


class Missing(Exception):
    """There is nothing at this path: 404, 405 or 501."""


class Remote:
    """One server. kind: what it should be ("Prometheus"); headers: for its keys and tenants, never shown in errors."""

    def __init__(
        self, url: str, kind: str, headers: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise InputError(url, "", "names no host", "write http://HOST:PORT")
        self._address = url.rstrip("/").removesuffix("/api/v1").removesuffix("/api")
        self.url = self._address.replace(
            f"{parts.netloc.rpartition('@')[0]}@", ""
        )  # shown and kept: without a password
        self.kind = kind
        self._sleep = sleep
        self._client = httpx.Client(
            headers=dict(headers) | {"Accept": "application/json"},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=parts.hostname not in _LOOPBACK,  # loopback is never asked through a proxy
        )

    def close(self) -> None:
        self._client.close()

    def ask(self, path: str, parameters: Parameters = ()) -> Any:
        """The JSON answer. Raises Missing, TooMuch, InputError for what the caller can change, else MachineError."""
        for pause_s in (*PAUSES_S, None):
            status, headers, body = self._answer(path, parameters)
            if status not in _BUSY or _TOO_MUCH.search(_words(body)) or pause_s is None:
                break
            self._sleep(max(pause_s, _retry_after_s(headers)))
        if status == 200:
            return self._json(path, body)
        raise self._refusal(path, status, headers, _words(body))

    def strange(self, path: str, found: str) -> InputError:
        """An answer that this kind of server would not give."""
        what = f"does not answer like {self.kind} at {path}: {found}"
        return InputError(self.url, "", what, f"name the address of {self.kind}'s API; is another server there?")

    def _answer(self, path: str, parameters: Parameters) -> tuple[int, httpx.Headers, bytes]:
        query = httpx.QueryParams(list(parameters))
        long = len(str(query)) > _LONG_QUERY
        options: dict[str, Any] = {"data": dict(parameters)} if long else {"params": query}
        try:
            with self._client.stream("POST" if long else "GET", self._address + path, **options) as answer:
                parts, size = [], 0
                for chunk in answer.iter_bytes():
                    size += len(chunk)
                    if size > ANSWER_BYTES:
                        raise TooMuch(f"answers with more than {ANSWER_BYTES >> 20} MiB for the shortest time")
                    parts.append(chunk)
                return answer.status_code, answer.headers, b"".join(parts)
        except httpx.ReadTimeout:
            raise TooMuch(f"takes longer than {TIMEOUT_S:.0f} s to answer for the shortest time") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise MachineError(f"no answer from {self.url}: {_reason(error)}") from None

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            start = body[:60].decode("utf-8", "replace").strip()
            raise self.strange(path, f"not JSON but {_clean(start)!r}") from None

    def _refusal(self, path: str, status: int, headers: httpx.Headers, words: str) -> Exception:
        said = f"{status}" + (f": {words}" if words else "")
        if status in (401, 403):
            remedy = "give --header 'Authorization: Bearer TOKEN'; a tenant is --header 'X-Scope-OrgID: NAME'"
            return InputError(self.url, "", f"refuses with {said}", remedy)
        if status in (404, 405, 501):
            return Missing(words)
        if 300 <= status < 400:
            to = _clean(headers.get("location", "?"))[:200]
            return InputError(self.url, "", f"redirects to {to}", "name that address, or give --header for a login")
        if status == 413 or _TOO_MUCH.search(words):
            return TooMuch(f"answers {said}")
        if 400 <= status < 500 and status != 429:
            return InputError(self.url, path, f"answers {said}", "check the address, --match and the window")
        return MachineError(
            f"{self.url} answers {said} (run it again later: what is stored already is not asked again)"
        )


def _words(body: bytes) -> str:
    """What a refusal says, in a line."""
    text = body[:4096].decode("utf-8", "replace").strip()
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        errors = told.get("errors")
        first = errors[0] if isinstance(errors, list) and errors else None
        found = told.get("error") or told.get("message") or (first.get("msg") if isinstance(first, dict) else first)
        text = str(found or "")
    elif text.startswith("<"):
        text = ""
    return _clean(text)[:200]


def _clean(text: str) -> str:
    return _CONTROL.sub(" ", text).strip()


def _reason(error: Exception) -> str:
    told = _clean(str(error)) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        return f"{told[:200]} (name the authority's certificate in SSL_CERT_FILE)"
    return f"{told[:200]} (does it run there, and can this machine reach it?)"


def _retry_after_s(headers: httpx.Headers) -> float:
    told = headers.get("retry-after", "")
    return min(float(told), _LONGEST_PAUSE_S) if told.isdecimal() else 0.0
