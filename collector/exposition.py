"""Engine metrics to samples and settings: Prometheus text as scraped, and OTLP metric points with the same names.

Tolerant: lines that cannot be read are counted and left out; values that are not finite are unknown. A metric that is absent
leaves its column null, and so does a counter that never moved while tokens flowed: not enabled is not zero.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

import polars as pl

from phasewise.collector.devices import DEVICES, device_rows
from phasewise.collector.devices import PREFIXES as DEVICE_PREFIXES
from phasewise.collector.histogram_shapes import Shape, merged_shapes
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import EngineSample
from phasewise.collector.schemas import polars_schema
from phasewise.rules.engine_parts import WEB_SERVER_METRICS, Info, Metrics, Series
from phasewise.rules.engine_profile import EngineProfile
from phasewise.rules.engine_settings import RANKS

SAMPLE_SCHEMA = polars_schema(EngineSample)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_.]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r'\\[\\"n]')
START_TIME = "process_start_time_seconds"
Setting = str | int | float | bool
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """One sample (a frame of one row, SAMPLE_SCHEMA; of none where the page tells of devices alone), the settings it shows, the
    devices it tells of (a frame, devices.GPU_SCHEMA), and how many lines could not be read. labels: of the target's resource.
    """

    engine: str
    samples: pl.DataFrame
    settings: dict[str, Setting]
    bad_lines: int = 0
    devices: pl.DataFrame | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def read_exposition(
    text: str,
    unix_ns: int,
    profiles: Profiles,
    *,
    instance: str | None = None,
    source: str = "scrape",
    labels: Mapping[str, str] | None = None,
) -> Exposition | None:
    """Sample, settings and devices of one scrape; None when it holds metrics of no known engine and of no device.

    Without `instance` the sample is named after engine and process start: `unnamed:vllm_v1@1795973375`.
    """
    points, bad = parse_text(text, metric_prefixes(profiles))
    return sample_of(points, unix_ns, profiles, instance=instance, source=source, bad_lines=bad, labels=labels)


def metric_prefixes(profiles: Profiles) -> tuple[str, ...]:
    """What the names of metrics begin with that are read: engines' and devices'."""
    return (
        *(prefix for p in profiles.for_metrics() if p.metrics for prefix in p.metrics.prefixes),
        *DEVICE_PREFIXES,
        *WEB_SERVER_METRICS,
    )


def parse_text(text: str, prefixes: tuple[str, ...]) -> tuple[list[Point], int]:
    """Series whose name begins with one of the prefixes, and process_start_time_seconds; lines that cannot be read are counted."""
    wanted = (*prefixes, START_TIME)
    points: list[Point] = []
    bad = 0
    for line in text.splitlines():
        if line.startswith(wanted):
            point = _parse_line(line)
            if point is None:
                bad += 1
            else:
                points.append(point)
    return points, bad


def _parse_line(line: str) -> Point | None:
    name, brace, rest = line.partition("{")
    labels: dict[str, str] = {}
    if brace:
        at = 0
        while match := _LABEL.match(rest, at):
            labels[match[1]] = _ESCAPE.sub(lambda m: _ESCAPES[m[0]], match[2])
            at = match.end()
        if rest[at : at + 1] != "}":
            return None
        value = rest[at + 1 :].split()
    else:
        name, *value = line.split()
    try:
        return Point(name, labels, float(value[0]))
    except (IndexError, ValueError):
        return None


def sample_of(
    points: Iterable[Point],
    unix_ns: int,
    profiles: Profiles,
    *,
    instance: str | None,
    source: str,
    bad_lines: int = 0,
    labels: Mapping[str, str] | None = None,
) -> Exposition | None:
    """The sample that some points make; an engine before its wrapper, then the profile with most series. labels: of the target's resource."""
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.name, []).append(point)
    place = labels or {}
    devices = _devices(families, unix_ns, instance, source, place)
    profile = _profile_of(families, profiles)
    if profile is None or profile.metrics is None:
        if devices is None:
            return None
        return Exposition(DEVICES, pl.DataFrame(schema=SAMPLE_SCHEMA), {}, bad_lines, devices, place)
    metrics = profile.metrics
    started = next((p.value for p in families.get(START_TIME, []) if math.isfinite(p.value)), None)
    row: dict[str, object] = dict.fromkeys(SAMPLE_SCHEMA)
    row |= {name: _combined(series, families, metrics) for name, series in metrics.gauges.items()}
    row |= {name: _combined(series, families, metrics) for name, series in metrics.counters.items()}
    row |= _histogram_columns(metrics, families)
    _drop_what_is_off(row, metrics)
    row |= {
        "instance": instance or f"unnamed:{profile.id}" + (f"@{started:.0f}" if started else ""),
        "unix_ns": unix_ns,
        "engine": profile.id,
        "model": _model(metrics, families),
        "source": source,
        "joined": True,
        "process_start_unix_s": started,
    }
    frame = pl.DataFrame([row], schema=SAMPLE_SCHEMA, orient="row")
    return Exposition(profile.id, frame, _settings(metrics, families), bad_lines, devices, place)


def _devices(
    families: Mapping[str, list[Point]], unix_ns: int, instance: str | None, source: str, place: Mapping[str, str]
) -> pl.DataFrame | None:
    told = [
        (point.name, point.labels, point.value)
        for name, points in families.items()
        if name.startswith(DEVICE_PREFIXES)
        for point in points
    ]
    if not told:  # as on most engines' pages: no frame is made for nothing
        return None
    rows = device_rows(told, unix_ns, instance, source, place)
    return None if rows.is_empty() else rows


def _profile_of(families: Mapping[str, list[Point]], profiles: Profiles) -> EngineProfile | None:
    """An engine before what stands around it and passes its metrics on (Triton, Dynamo); then the one with most series."""
    best, most = None, (False, 0)
    for profile in profiles.for_metrics():
        assert profile.metrics is not None
        prefixes = profile.metrics.prefixes
        count = sum(len(points) for name, points in families.items() if name.startswith(prefixes))
        rank = (profile.role == "engine", count)
        if count and rank > most:
            best, most = profile, rank
    return best


def _family(names: Iterable[str], suffixes: tuple[str, ...], families: Mapping[str, list[Point]]) -> list[Point]:
    """The first name that is there, as it stands or with one of the suffixes exporters add."""
    for name in names:
        for suffix in suffixes:
            if found := families.get(name + suffix):
                return found
    return []


def _kept(series: Series, points: Iterable[Point]) -> list[Point]:
    return [
        point
        for point in points
        if math.isfinite(point.value)
        and all(point.labels.get(label) in values for label, values in series.where.items())
        and all(point.labels.get(label) not in values for label, values in series.without.items())
    ]


def _combined(series: Series, families: Mapping[str, list[Point]], metrics: Metrics) -> float | None:
    """One number of all series of a name: copies over ranks count once (the largest), the rest by `combine`."""
    suffixes = (f"_{series.part}",) if series.part else ("", "_total")
    points = _kept(series, _family(series.names, suffixes, families))
    if not points:
        return None
    by_replica: dict[tuple[tuple[str, str], ...], float] = {}
    for point in points:
        key = tuple(sorted(item for item in point.labels.items() if item[0] not in metrics.rank_labels))
        by_replica[key] = max(by_replica.get(key, -math.inf), point.value)
    values = list(by_replica.values())
    if series.combine == "mean":
        return sum(values) / len(values)
    if series.combine == "sum":
        return sum(values)
    return max(values) if series.combine == "max" else min(values)


def _histogram_columns(metrics: Metrics, families: Mapping[str, list[Point]]) -> dict[str, object]:
    columns: dict[str, object] = {}
    shapes: dict[str, object] = {}
    for name, series in metrics.histograms.items():
        for part, column in (("count", f"{name}_count"), ("sum", f"{name}_sum_s")):
            one = Series(names=series.names, where=series.where, without=series.without, part=part)
            columns[column] = _combined(one, families, metrics)
        buckets = _buckets(_kept(series, _family(series.names, ("_bucket",), families)), metrics)
        if buckets:
            shapes[name] = buckets
    columns["histograms"] = json.dumps(shapes, separators=(",", ":")) if shapes else None
    return columns


def _buckets(points: list[Point], metrics: Metrics) -> dict[str, list[float | str]] | None:
    """Cumulative counts by upper edge; `+Inf` as text, since JSON has no infinity. Copies over ranks count once (the largest)."""
    replicas: dict[Labels, dict[Labels, Shape]] = {}
    for point in points:
        try:
            edge = float(point.labels["le"])
        except (KeyError, ValueError):
            continue
        own = tuple(sorted(item for item in point.labels.items() if item[0] != "le"))
        key = tuple(item for item in own if item[0] not in metrics.rank_labels)
        replicas.setdefault(key, {}).setdefault(own, {})[edge] = point.value
    found: Shape | None = None
    for copies in replicas.values():
        one = merged_shapes(copies.values(), max)
        found = one if found is None else merged_shapes((found, one), add)
    if not found:
        return None
    edges = sorted(found)
    return {"le": [edge if math.isfinite(edge) else "+Inf" for edge in edges], "count": [found[edge] for edge in edges]}


def _drop_what_is_off(row: dict[str, object], metrics: Metrics) -> None:
    for name, series in metrics.counters.items():
        moving = row.get(series.moves_with) if series.moves_with else None
        if row[name] == 0 and isinstance(moving, float) and moving > 0:
            row[name] = None
    for name, series in metrics.counters.items():
        if series.needs and row[series.needs] is None:
            row[name] = None


def _model(metrics: Metrics, families: Mapping[str, list[Point]]) -> str | None:
    for name, points in families.items():
        if name.startswith(metrics.prefixes):
            for point in points:
                for label in metrics.model_labels:
                    if point.labels.get(label):
                        return point.labels[label]
    return None


def _settings(metrics: Metrics, families: Mapping[str, list[Point]]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    ranks = _ranks(metrics, families)
    for name, infos in metrics.settings.items():
        for info in infos:
            value = _of_ranks(info, families, metrics.data_parallel_label, ranks)
            if value is not None:
                found[name] = value
                break
    if len(ranks) > 1:
        found[RANKS] = len(ranks)
    return found


def _ranks(metrics: Metrics, families: Mapping[str, list[Point]]) -> list[str]:
    """Data-parallel ranks that the load gauges tell of."""
    label = metrics.data_parallel_label
    running = metrics.gauges.get("running")
    if not label or running is None:
        return []
    return sorted({point.labels[label] for point in _family(running.names, ("",), families) if label in point.labels})


def _of_ranks(info: Info, families: Mapping[str, list[Point]], label: str, ranks: list[str]) -> Setting | None:
    """A setting; one that each rank has for itself is the sum over the ranks, unknown where one of them does not tell."""
    if not info.each_rank or len(ranks) < 2:
        return _setting(info, families)
    values = []
    for rank in ranks:
        own = {name: [one for one in points if one.labels.get(label) == rank] for name, points in families.items()}
        values.append(_setting(info, own))
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return sum(numbers) if len(numbers) == len(ranks) else None


def _setting(info: Info, families: Mapping[str, list[Point]]) -> Setting | None:
    for point in _family([info.metric], ("", "_info", "_total"), families):
        if not all(point.labels.get(label) in values for label, values in info.where.items()):
            continue
        text = point.labels.get(info.label) if info.label else f"{point.value!r}"
        if text is None:
            continue
        if text in ("None", "null", ""):
            return info.unset or None
        factor = point.labels.get(info.times) if info.times else None
        return _typed(text, info, 1.0 if factor is None else _float(factor))
    return None


def _typed(text: str, info: Info, factor: float | None) -> Setting | None:
    if info.kind == "truth":
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if info.kind == "text":
        return text
    number = _float(text)
    if number is None or factor is None:
        return None
    number *= info.scale * factor
    return round(number) if info.kind == "integer" else number


def _float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def samples_of_points(
    points: pl.DataFrame, instances: Mapping[str, str], profiles: Profiles
) -> tuple[list[Exposition], int]:
    """Samples out of OTLP metric points (records.METRIC_SCHEMA) that carry engine metrics, and how many points were none.

    instances: resource text -> instance name. Points of one resource and time make one sample.
    """
    prefixes = metric_prefixes(profiles)
    wanted = (*prefixes, START_TIME)
    known = points.filter(pl.any_horizontal(pl.col("name").str.starts_with(prefix) for prefix in wanted))
    found = []
    for (resource, unix_ns), rows in known.group_by(["resource", "unix_ns"], maintain_order=True):
        flat = [point for row in rows.iter_rows(named=True) for point in _flat(row)]
        name, place = instances[str(resource)], _place(str(resource))
        one = sample_of(flat, int(str(unix_ns)), profiles, instance=name, source="otlp", labels=place)
        if one is not None:
            found.append(one)
    return found, points.height - known.height


def _place(resource: str) -> dict[str, str]:
    """The texts among resource attributes, and numbers as texts."""
    facts = json.loads(resource)
    return {key: str(value) for key, value in facts.items() if isinstance(value, str | int)}


def _flat(row: dict[str, object]) -> list[Point]:
    """An OTLP point as the series its exposition would have."""
    labels = {key: str(value) for key, value in json.loads(str(row["attributes"])).items()}
    name = str(row["name"])
    if row["count"] is None:
        value = row["value"]
        return [Point(name, labels, float(value))] if isinstance(value, int | float) else []
    parts = [(f"{name}_count", row["count"]), (f"{name}_sum", row["sum"])]
    flat = [Point(part, labels, float(value)) for part, value in parts if isinstance(value, int | float)]
    buckets = json.loads(str(row["buckets"])) if row["buckets"] else {}
    for edge, count in zip(buckets.get("le", ()), buckets.get("count", ()), strict=False):
        flat.append(Point(f"{name}_bucket", {**labels, "le": str(edge)}, float(count)))
    return flat
