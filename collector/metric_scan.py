"""OTLP metrics to rows: one a data point.

Histograms are stored with cumulative buckets, as Prometheus counts them; an exponential histogram is written with the upper
bounds of its own buckets. Delta temporality is refused with the setting that changes it: a sum of deltas cannot be told from
a counter afterwards, and a lost request would bend it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_DELTA,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from phasewise.collector.attributes import Notes, Value, cut_text, read_attributes, to_json, to_sorted_json
from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.records import METRIC_SCHEMA, Scanned
from phasewise.collector.wire import Malformed, decoded, groups

_MAX_UNIX_NS = (1 << 63) - 1
_MAX_BUCKETS = 512
_BATCH_ROWS = 4096  # rows held as Python objects before they become columns
_REPLACED = "\ufffd"
_CUMULATIVE_SETTING = "set OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=cumulative"

Point = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint | SummaryDataPoint
Measured = tuple[float | None, float | None, float | None, str | None]  # value, count, sum, buckets


def scan_metrics(body: bytes, received_unix_ns: int) -> Scanned:
    """Rows of one ExportMetricsServiceRequest (protobuf), one a data point; columns of records.METRIC_SCHEMA.

    `buckets` is {"le": [..., "+Inf"], "count": [...]} (cumulative counts), for a summary {"quantile": [...], "value": [...]}.
    A point that says it has no value, or NaN, has NULL there. Raises Malformed.
    Rejected: undecodable (a metric), no_data, delta_temporality, time_missing, time_range, too_many_buckets.
    """
    rows: list[tuple[object, ...]] = []
    batches: list[pa.RecordBatch] = []
    rejected: dict[str, int] = {}
    warned: dict[str, int] = {}
    first_error = ""
    notes = Notes()
    for group in groups(body):
        resource = decoded(Resource, group.resource)
        if resource is None:
            raise Malformed("one of its resources cannot be decoded")
        resource_json = to_sorted_json(read_attributes(resource.attributes, notes, SPAN_LIMITS.resource_attributes))
        scope = decoded(InstrumentationScope, group.scope) or InstrumentationScope()
        scope_name = cut_text(scope.name, notes) or None
        for data in group.items:
            metric = decoded(Metric, data)
            for row, reason in _points(metric, notes):
                if row is None:
                    rejected[reason] = rejected.get(reason, 0) + 1
                    name = repr(metric.name[:60]) if metric is not None else "?"
                    first_error = first_error or f"metric {name}: {_PROBLEMS[reason]}"
                    continue
                rows.append((*row[:-1], scope_name, resource_json, row[-1], received_unix_ns))
                if len(rows) >= _BATCH_ROWS:
                    batches.append(_columns(rows))
                    rows = []
                if any(isinstance(text, str) and _REPLACED in text for text in (row[0], row[-1], resource_json)):
                    notes.add("sanitised")
                for flag in notes.take():
                    warned[flag] = warned.get(flag, 0) + 1
    if rows:
        batches.append(_columns(rows))
    if not batches and set(rejected) == {"undecodable"}:
        raise Malformed("none of its metrics can be decoded")
    return Scanned(pa.Table.from_batches(batches, schema=METRIC_SCHEMA), rejected, warned, first_error)


def _columns(rows: list[tuple[object, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, METRIC_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=METRIC_SCHEMA)


_PROBLEMS = {
    "undecodable": "cannot be decoded",
    "no_data": "has no data of a known kind",
    "delta_temporality": f"has delta temporality ({_CUMULATIVE_SETTING})",
    "time_missing": "has a point without timeUnixNano",
    "time_range": "has a point beyond the year 2262",
    "too_many_buckets": f"has more than {_MAX_BUCKETS} buckets",
}


def _points(metric: Metric | None, notes: Notes) -> Iterator[tuple[tuple[object, ...] | None, str]]:
    """Columns name, kind, unix_ns, value, count, sum, buckets, unit, monotonic, attributes; or None and the reason."""
    which = metric.WhichOneof("data") if metric is not None else None
    if metric is None or which is None:
        yield None, "undecodable" if metric is None else "no_data"
        return
    kind, measure = _KINDS[which]
    part = getattr(metric, which)
    name, unit = cut_text(metric.name, notes), metric.unit[: SPAN_LIMITS.key_bytes] or None
    monotonic = bool(part.is_monotonic) if which == "sum" else None
    delta = which not in ("gauge", "summary") and part.aggregation_temporality == AGGREGATION_TEMPORALITY_DELTA
    for point in part.data_points:
        reason = "delta_temporality" if delta else _fault(point)
        if reason:
            yield None, reason
            continue
        attributes = _attributes_json(point.attributes, notes)
        yield (name, kind, point.time_unix_nano, *measure(point), unit, monotonic, attributes), ""


def _attributes_json(pairs: list[KeyValue], notes: Notes) -> str:
    return to_json(read_attributes(pairs, notes)) if pairs else "{}"


def _fault(point: Point) -> str:
    if not point.time_unix_nano:
        return "time_missing"
    if point.time_unix_nano > _MAX_UNIX_NS:
        return "time_range"
    if isinstance(point, HistogramDataPoint):
        return "too_many_buckets" if len(point.bucket_counts) > _MAX_BUCKETS else ""
    if isinstance(point, ExponentialHistogramDataPoint):
        count = len(point.positive.bucket_counts) + len(point.negative.bucket_counts)
        return "too_many_buckets" if count > _MAX_BUCKETS else ""
    return ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(point: NumberDataPoint) -> Measured:
    if point.flags & 1:  # "no recorded value"
        return None, None, None, None
    return _finite(point.as_int if point.WhichOneof("value") == "as_int" else point.as_double), None, None, None


def _histogram(point: HistogramDataPoint) -> Measured:
    total = _finite(point.sum) if point.HasField("sum") else None
    bounds = list(point.explicit_bounds)
    counts = list(point.bucket_counts)
    if len(counts) != len(bounds) + 1:
        return None, float(point.count), total, None  # no buckets were sent, or they do not fit their bounds
    return None, float(point.count), total, _buckets_json([*bounds, math.inf], counts)


def _exponential(point: ExponentialHistogramDataPoint) -> Measured:
    """Bucket i of the positive range ends at base^(offset + i + 1), base = 2^(2^-scale); the negative range mirrors it.

    Each range begins with an edge of its own, at which nothing of it is counted yet: its first bucket is no wider than the others.
    """
    total = _finite(point.sum) if point.HasField("sum") else None
    positive, negative = point.positive, point.negative
    bounds: list[float] = []
    counts: list[int] = []
    if negative.bucket_counts:
        bounds.append(-_power(negative.offset + len(negative.bucket_counts), point.scale))
        counts.append(0)
    for i in reversed(range(len(negative.bucket_counts))):
        bounds.append(-_power(negative.offset + i, point.scale))
        counts.append(negative.bucket_counts[i])
    bounds.append(point.zero_threshold)
    counts.append(point.zero_count)
    if positive.bucket_counts and (low := _power(positive.offset, point.scale)) > point.zero_threshold:
        bounds.append(low)
        counts.append(0)
    for i, count in enumerate(positive.bucket_counts):
        bounds.append(_power(positive.offset + i + 1, point.scale))
        counts.append(count)
    return None, float(point.count), total, _buckets_json([*bounds, math.inf], [*counts, 0])


def _power(exponent: int, scale: int) -> float:
    try:
        return math.pow(2.0, exponent * math.pow(2.0, -scale))
    except OverflowError:
        return math.inf


def _summary(point: SummaryDataPoint) -> Measured:
    quantiles: list[Value] = [item.quantile for item in point.quantile_values]
    values: list[Value] = [_finite(item.value) for item in point.quantile_values]
    text = to_json({"quantile": quantiles, "value": values}) if quantiles else None
    return None, float(point.count), _finite(point.sum), text


def _buckets_json(bounds: list[float], counts: list[int]) -> str:
    """Cumulative counts; the last bound is written "+Inf", since JSON has no infinity."""
    running = 0
    cumulative: list[Value] = []
    for count in counts:
        running += count
        cumulative.append(running)
    return to_json({"le": [b if math.isfinite(b) else "+Inf" for b in bounds], "count": cumulative})


_KINDS: dict[str, tuple[str, Callable[..., Measured]]] = {
    "gauge": ("gauge", _number),
    "sum": ("sum", _number),
    "histogram": ("histogram", _histogram),
    "exponential_histogram": ("histogram", _exponential),
    "summary": ("summary", _summary),
}
