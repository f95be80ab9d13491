"""Traces out of Jaeger's query API, for `importers/jaeger_json`: each service asked for the traces of a window."""

from __future__ import annotations

import json

from phasewise.collector.backfill.pages import Page, TooMuch
from phasewise.collector.backfill.remote import Missing, Remote
from phasewise.rules.errors import InputError

LIMIT = 1000  # traces of a service in one answer
_OWN = ("jaeger", "jaeger-query", "jaeger-all-in-one", "jaeger-collector")


class Jaeger:
    """service: only traces that pass through this one; "" asks for all."""

    least_ms = 1
    remedy = "ask for one service: --match NAME"

    def __init__(self, remote: Remote, service: str = "", limit: int = LIMIT) -> None:
        self._remote = remote
        self._service = service
        self._limit = limit
        self._services: list[str] | None = None

    @property
    def url(self) -> str:
        return self._remote.url

    def page(self, from_ms: int, to_ms: int) -> Page:
        found: dict[str, object] = {}
        for service in self._names():
            for trace in self._traces(service, from_ms, to_ms):
                if isinstance(trace, dict):
                    found.setdefault(str(trace.get("traceID")), trace)
        if not found:
            return Page(from_ms, to_ms, None)
        return Page(from_ms, to_ms, json.dumps({"data": list(found.values())}, separators=(",", ":")).encode())

    def _names(self) -> list[str]:
        """Asked once: all services it knows, but its own."""
        if self._services is None:
            told = [str(name) for name in self._list("/api/services", [])]
            if self._service and self._service not in told:
                known = ", ".join(sorted(told)[:8]) or "none"
                raise InputError("--match", self._service, f"is no service of {self.url}", f"it knows {known}")
            self._services = [self._service] if self._service else [name for name in told if name not in _OWN]
        return self._services

    def _traces(self, service: str, from_ms: int, to_ms: int) -> list[object]:
        times = [("start", str(from_ms * 1000)), ("end", str(to_ms * 1000 - 1))]
        found = self._list("/api/traces", [("service", service), *times, ("limit", str(self._limit))])
        if len(found) >= self._limit:
            raise TooMuch(f"holds {self._limit:,} or more traces of {service} in a millisecond")
        return found

    def _list(self, path: str, parameters: list[tuple[str, str]]) -> list[object]:
        try:
            answer = self._remote.ask(path, parameters)
        except Missing:
            remedy = "name what stands before /api/services, by default http://HOST:16686"
            raise InputError(self.url, "", "has no Jaeger query API there: 404", remedy) from None
        if not isinstance(answer, dict) or "data" not in answer:
            raise self._remote.strange(path, "no list called data")
        data = answer["data"]
        if data is None:
            return []
        if not isinstance(data, list):
            raise self._remote.strange(path, "data is no list")
        return data
