"""Engine metrics out of Prometheus, Mimir, Thanos or VictoriaMetrics, for `importers/prometheus_json`.

Read as they were scraped: a range selector gives every stored value with its own time, where `query_range` would repeat the last
one for five minutes over gaps and restarts. Only with a step, or where a server lacks /api/v1/query, `query_range` is used, and
then over `last_over_time`, so that a value stands for no more than its step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from phasewise.collector.backfill.pages import Page, TooMuch
from phasewise.collector.backfill.remote import Missing, Remote
from phasewise.collector.exposition import START_TIME
from phasewise.collector.importers.prometheus_json import target_name
from phasewise.rules.engine_parts import WEB_SERVER_METRICS
from phasewise.rules.errors import InputError

FALLBACK_STEP_S = 15.0
_MOST_POINTS = 10_000  # of a series in one answer; Prometheus refuses more than 11,000
_MOST_TARGETS = 100  # named in a selector
Series = list[dict[str, Any]]


class Prometheus:
    """prefixes: of the metric names to ask for; match: more label matchers, as between braces; step_s: None reads every
    stored value."""

    least_ms = 10_000
    remedy = """ask for fewer series: --match 'job="NAME"'"""

    def __init__(self, remote: Remote, prefixes: Iterable[str], match: str = "", step_s: float | None = None) -> None:
        self._remote = remote
        self._match = match.strip().removeprefix("{").removesuffix("}").strip().strip(",")
        self._step_s = step_s
        self._names = "(" + "|".join(_quoted(prefix) for prefix in sorted(set(prefixes))) + ").+"

    @property
    def url(self) -> str:
        return self._remote.url

    def page(self, from_ms: int, to_ms: int) -> Page:
        wanted = [f'__name__=~"{self._names}"', '__name__!~".+_created"', *([self._match] if self._match else [])]
        found = self._series("{" + ",".join(wanted) + "}", from_ms, to_ms)
        found = [
            series for series in found if target_name(_labels(series)) is not None
        ]  # else a sum of a recording rule
        if not found:
            return Page(from_ms, to_ms, None)
        targets = {target_name(_labels(series)) for series in found}
        starts = self._series(_start_selector(found), from_ms, to_ms)
        found += [series for series in starts if target_name(_labels(series)) in targets]
        body = {"status": "success", "data": {"resultType": "matrix", "result": found}}
        return Page(from_ms, to_ms, json.dumps(body, separators=(",", ":")).encode())

    def _series(self, selector: str, from_ms: int, to_ms: int) -> Series:
        """Series with the values of a window."""
        if self._step_s is None:
            try:
                return self._raw(selector, from_ms, to_ms)
            except Missing:
                self._step_s = FALLBACK_STEP_S
        try:
            return self._stepped(selector, from_ms, to_ms, self._step_s)
        except Missing:
            remedy = "name what stands before /api/v1/query; of Mimir that ends in /prometheus"
            raise InputError(self.url, "", "has no Prometheus API there: 404", remedy) from None

    def _raw(self, selector: str, from_ms: int, to_ms: int) -> Series:
        # whether the left end belongs to the range depends on the version: ask for one ms more and leave out what is outside
        query = f"{selector}[{to_ms - from_ms + 1}ms]"
        found = self._matrix("/api/v1/query", [("query", query), ("time", f"{(to_ms - 1) / 1000:.3f}")])
        kept = []
        for series in found:
            values = [v for v in series["values"] if from_ms <= round(float(v[0]) * 1000) < to_ms]
            if values:
                kept.append(series | {"values": values})
        return kept

    def _stepped(self, selector: str, from_ms: int, to_ms: int, step_s: float) -> Series:
        """At whole multiples of the step, so that asking again gives the same times."""
        step_ms = max(round(step_s * 1000), 1)
        first, last = -(-from_ms // step_ms), (to_ms - 1) // step_ms
        if last - first >= _MOST_POINTS:
            raise TooMuch(f"would be asked for more than {_MOST_POINTS:,} values a series")
        if last < first:
            return []
        step = f"{step_ms / 1000:.3f}"
        times = [("start", f"{first * step_ms / 1000:.3f}"), ("end", f"{last * step_ms / 1000:.3f}"), ("step", step)]
        return self._matrix("/api/v1/query_range", [("query", f"last_over_time({selector}[{step_ms}ms])"), *times])

    def _matrix(self, path: str, parameters: list[tuple[str, str]]) -> Series:
        answer = self._remote.ask(path, parameters)
        data = answer.get("data") if isinstance(answer, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(result, list):
            raise self._remote.strange(path, "no matrix of series")
        found = [series for series in result if isinstance(series, dict) and isinstance(series.get("values"), list)]
        if len(found) < len(result):
            found = [series for series in found if series.get("metric")]
        return found


def _labels(series: Mapping[str, Any]) -> dict[str, str]:
    labels = series.get("metric")
    return {str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {}


def _start_selector(found: Series) -> str:
    """The start times and web servers of the processes that some series come from; with many targets those of their jobs."""
    wanted = []
    for label in ("job", "instance", "pod"):
        values = sorted({_labels(series).get(label, "") for series in found} - {""})
        if values and len(values) <= _MOST_TARGETS:
            wanted.append(f'{label}=~"{"|".join(_quoted(value) for value in values)}"')
    names = "|".join((START_TIME, *WEB_SERVER_METRICS))
    return "{" + ",".join([f'__name__=~"{names}"', *wanted]) + "}"


def _quoted(text: str) -> str:
    """A text as a part of a regular expression inside a quoted string."""
    return re.escape(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
