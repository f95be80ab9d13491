"""Prometheus' answer to a range query, written to a file: each moment of a target becomes the sample its scrape would have made.

Series of one target (labels `job`, `instance`, and `cluster` where there is one) and one time stand for one page of /metrics. Nothing
is carried over from one moment to the next: what a moment lacks is unknown there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from phasewise.collector.exposition import START_TIME, Exposition, Point, sample_of
from phasewise.collector.importers.lines import Lines
from phasewise.collector.profiles import Profiles

_INSTANCE_LABELS = ("instance", "pod")  # the second where relabelling took the first away
_REMEDY = "write the answer of query_range for the engine's series by name, without functions that drop it"
Moments = dict[int, list[Point]]


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether an object is an answer of the query API, its `data`, or one series of it."""
    data = document.get("data")
    if isinstance(data, dict) and "resultType" in data:
        return True
    return {"resultType", "result"} <= set(document) or isinstance(document.get("metric"), dict)


def read(lines: Lines, profiles: Profiles) -> list[Exposition]:
    """Samples of all targets in order of target and time. Targets that no engine profile knows count as bad."""
    targets: dict[str | None, Moments] = {}
    for place, series in _series(lines):
        _add(targets, lines, place, series)
    found: list[Exposition] = []
    for name, moments in targets.items():
        own = (_sample(moments[unix_ns], unix_ns, profiles, name) for unix_ns in sorted(moments))
        known = [one for one in own if one is not None]
        found += known
        lines.good(len(known))
        if not known and any(point.name != START_TIME for points in moments.values() for point in points):
            lines.bad(f"target {name or 'without labels'}", "", "holds metrics of no known engine", _REMEDY)
    lines.require_some(_REMEDY)
    return found


def _sample(points: list[Point], unix_ns: int, profiles: Profiles, instance: str | None) -> Exposition | None:
    return sample_of(points, unix_ns, profiles, instance=instance, source="import")


def _series(lines: Lines) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each series with its place; an answer of another shape is named."""
    for place, document in lines:
        if "metric" in document:
            yield place, document
            continue
        data = document.get("data", document)
        kind = data.get("resultType") if isinstance(data, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if kind not in ("matrix", "vector") or not isinstance(result, list):
            lines.bad(place, "data.resultType", f"is {kind!r}, not matrix", _REMEDY)
            continue
        for number, series in enumerate(result, 1):
            yield f"series {number}" if place == "item 1" else f"{place}, series {number}", series


def _add(targets: dict[str | None, Moments], lines: Lines, place: str, series: object) -> None:
    labels = series.get("metric") if isinstance(series, dict) else None
    if not isinstance(series, dict) or not isinstance(labels, dict):
        lines.bad(place, "metric", "is no object of labels", _REMEDY)
        return
    name = labels.get("__name__")
    if not isinstance(name, str) or not name:
        lines.bad(place, "metric.__name__", "is missing", _REMEDY)
        return
    values = series.get("values", [series["value"]] if "value" in series else None)
    if not isinstance(values, list):
        lines.bad(place, "values", "is no list of [time, value]", "ask for classic histograms and plain numbers")
        return
    texts = {key: str(value) for key, value in labels.items() if key != "__name__"}
    moments = targets.setdefault(target_name(texts), {})
    bad = 0
    for value in values:
        read_value = _value(value)
        if read_value is None:
            bad += 1
        else:
            moments.setdefault(read_value[0], []).append(Point(name, texts, read_value[1]))
    if bad:
        lines.bad(place, "values", f"holds {bad} items that are not [Unix seconds, number]", _REMEDY)


def target_name(labels: Mapping[str, str]) -> str | None:
    """`job/instance` as for scrapes in a file, with the cluster in front where series name one; None without an instance."""
    instance = next((labels[label] for label in _INSTANCE_LABELS if labels.get(label)), None)
    if instance is None:
        return None
    return "/".join([*(labels[label] for label in ("cluster", "job") if labels.get(label)), instance])


def _value(item: object) -> tuple[int, float] | None:
    """Time in nanoseconds (Prometheus keeps milliseconds) and number; None where it is no such pair."""
    if not isinstance(item, list) or len(item) != 2 or isinstance(item[0], bool):
        return None
    try:
        at_s, number = float(item[0]), float(item[1])
    except (TypeError, ValueError):
        return None
    if not math.isfinite(at_s) or not 0 < at_s < 9e9:
        return None
    return round(at_s * 1000) * 1_000_000, number
