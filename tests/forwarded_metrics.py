"""Pages of an engine's /metrics as the OpenTelemetry Collector passes them on (its Prometheus receiver), and what the page itself says.

The Collector keeps the names (with `_total`, `_info`, `_created`), makes counters cumulative monotonic sums and histograms explicit ones
with per-bucket counts, and gives all points of a page one time; the resource tells job and address (service.name, service.instance.id).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
    Summary,
    SummaryDataPoint,
)
from otlp_messages import key_values
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

SCOPE = "github.com/open-telemetry/opentelemetry-collector-contrib/receiver/prometheusreceiver"
CUMULATIVE = AGGREGATION_TEMPORALITY_CUMULATIVE
Labels = dict[str, str]


def forwarded_page(text: str, unix_ns: int, start_unix_ns: int, instance: str) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    address, _, port = instance.rpartition(":")
    told = {"service.name": "engines", "service.instance.id": instance, "server.address": address, "server.port": port}
    group.resource.attributes.extend(key_values({**told, "url.scheme": "http"}))
    scope = group.scope_metrics.add()
    scope.scope.name, scope.scope.version = SCOPE, "0.140.0"
    for family in text_string_to_metric_families(text):
        scope.metrics.extend(_metrics(family, unix_ns, start_unix_ns))
    return request


def _metrics(family: Family, unix_ns: int, start_unix_ns: int) -> Iterator[Metric]:
    if family.type == "histogram":
        yield Metric(
            name=family.name,
            description=family.documentation,
            histogram=Histogram(
                data_points=_histogram_points(family, unix_ns, start_unix_ns), aggregation_temporality=CUMULATIVE
            ),
        )
    elif family.type == "summary":
        yield Metric(name=family.name, summary=Summary(data_points=_summary_points(family, unix_ns, start_unix_ns)))
    for name in dict.fromkeys(one.name for one in family.samples if not _of_histogram(family, one.name)):
        points = [
            NumberDataPoint(
                as_double=one.value,
                time_unix_nano=unix_ns,
                start_time_unix_nano=start_unix_ns if name.endswith("_total") else 0,
                attributes=key_values(one.labels),
            )
            for one in family.samples
            if one.name == name
        ]
        if family.type == "counter" and name.endswith("_total"):
            yield Metric(name=name, sum=Sum(data_points=points, aggregation_temporality=CUMULATIVE, is_monotonic=True))
        else:
            yield Metric(name=name, gauge=Gauge(data_points=points))


def _of_histogram(family: Family, name: str) -> bool:
    parts = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("", "_count", "_sum")}.get(family.type, ())
    return name.removeprefix(family.name) in parts


def _by_labels(family: Family) -> dict[tuple[tuple[str, str], ...], dict[str, float]]:
    """Labels without the edge -> part (`_count`, `_sum`, or the edge's text) -> value."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for one in family.samples:
        if _of_histogram(family, one.name):
            edge = one.labels.get("le", one.labels.get("quantile", ""))
            key = tuple(sorted(item for item in one.labels.items() if item[0] not in ("le", "quantile")))
            found.setdefault(key, {})[edge or one.name.removeprefix(family.name)] = one.value
    return found


def _histogram_points(family: Family, unix_ns: int, start_unix_ns: int) -> list[HistogramDataPoint]:
    points = []
    for labels, parts in _by_labels(family).items():
        edges = sorted((float(edge), count) for edge, count in parts.items() if not edge.startswith("_"))
        counts = [round(count) for _, count in edges]
        points.append(
            HistogramDataPoint(
                time_unix_nano=unix_ns,
                start_time_unix_nano=start_unix_ns,
                count=round(parts["_count"]),
                sum=parts["_sum"],
                explicit_bounds=[edge for edge, _ in edges if math.isfinite(edge)],
                bucket_counts=[now - before for before, now in zip([0, *counts], counts, strict=False)],
                attributes=key_values(dict(labels)),
            )
        )
    return points


def _summary_points(family: Family, unix_ns: int, start_unix_ns: int) -> list[SummaryDataPoint]:
    return [
        SummaryDataPoint(
            time_unix_nano=unix_ns,
            start_time_unix_nano=start_unix_ns,
            count=round(parts["_count"]),
            sum=parts["_sum"],
            attributes=key_values(dict(labels)),
        )
        for labels, parts in _by_labels(family).items()
    ]


def told_by_page(text: str) -> dict[str, list[tuple[Labels, float]]]:
    """Series of a page by the name of their samples, as another parser than ours reads them."""
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    return found
