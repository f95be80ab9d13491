"""Traces out of Tempo, for `importers/tempo_json`: a search names the traces of a window, then each is read by its id."""

from __future__ import annotations

import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phasewise.collector.backfill.pages import Page, TooMuch
from phasewise.collector.backfill.remote import ANSWER_BYTES, Missing, Remote
from phasewise.rules.errors import InputError

LIMIT = 500  # traces of one search
LAST_LIMIT = 10_000  # in one second, which is as narrow as Tempo searches
AT_ONCE = 4  # traces read at the same time
_REMEMBERED = 100_000  # ids read already: a trace is found in every page it reaches into


class Tempo:
    """query: TraceQL; "" finds all traces."""

    least_ms = 1000
    remedy = "ask for fewer traces: --match with TraceQL"

    def __init__(self, remote: Remote, query: str = "", limit: int = LIMIT) -> None:
        self._remote = remote
        self._query = query or "{}"
        self._limit = limit
        self._read: OrderedDict[str, None] = OrderedDict()

    @property
    def url(self) -> str:
        return self._remote.url

    def page(self, from_ms: int, to_ms: int) -> Page:
        from_s, to_s = from_ms // 1000, max(-(-to_ms // 1000), from_ms // 1000 + 1)
        limit = self._limit if to_ms - from_ms > self.least_ms else max(LAST_LIMIT, self._limit)
        names = [name for name in self._search(from_s, to_s, limit) if name not in self._read]
        lines: list[bytes] = []
        problems: list[str] = []
        with ThreadPoolExecutor(AT_ONCE) as readers:
            for name, trace in zip(names, readers.map(self._trace, names), strict=True):
                if trace is None:
                    problems.append(f"{self.url}: trace {name} is found but not there any more")
                else:
                    lines.append(trace)
        if sum(map(len, lines)) > ANSWER_BYTES and to_ms - from_ms > self.least_ms:
            raise TooMuch("holds too much")
        for name in names:
            self._read[name] = None
        while len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)
        return Page(from_ms, to_ms, b"\n".join(lines) if lines else None, problems)

    def _search(self, from_s: int, to_s: int, limit: int) -> list[str]:
        path = "/api/search"
        asked = [("q", self._query), ("start", str(from_s)), ("end", str(to_s)), ("limit", str(limit))]
        try:
            answer = self._remote.ask(path, asked)
        except Missing:
            remedy = "name what stands before /api/search, by default http://HOST:3200"
            raise InputError(self.url, "", "has no Tempo API there: 404", remedy) from None
        found = answer.get("traces") if isinstance(answer, dict) else False
        found = [] if found is None else found
        if not isinstance(found, list) or not {"traces", "metrics"} & set(answer):
            raise self._remote.strange(path, "no list called traces")
        names = [str(trace["traceID"]) for trace in found if isinstance(trace, dict) and trace.get("traceID")]
        if len(found) >= limit:
            raise TooMuch(f"finds {limit:,} or more traces in a second")
        return [name for name in dict.fromkeys(names) if name.isalnum()]  # it becomes a part of an address

    def _trace(self, name: str) -> bytes | None:
        path = f"/api/traces/{name}"
        try:
            trace: Any = self._remote.ask(path)
        except Missing:
            return None
        if not isinstance(trace, dict):
            raise self._remote.strange(path, "no trace")
        known = {"batches": trace["resourceSpans"]} if "resourceSpans" in trace else trace
        return json.dumps(known, separators=(",", ":")).encode()
