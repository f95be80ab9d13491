"""What requests are sliced by: a column as it is, or a number in fixed buckets.

The buckets are fixed so that two windows, two deployments and two pages can be compared cell by cell. A missing value is
the label ``unknown`` and never the first bucket: engines that do not send cached tokens have no cache hit of 0 %.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from phasewise.analyzer.window import Filter
from phasewise.rules.errors import InputError

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Dimension:
    """edges: lower ends of the buckets after the first, None for a column taken as it is. ``[edge, next edge)``."""

    name: str
    title: str
    key: str  # the key of analyzer.filters that narrows to one of its values
    column: str
    edges: tuple[float, ...] | None = None
    labels: tuple[str, ...] = ()

    def order(self, label: str) -> tuple[int, str]:
        """Where a label stands on an axis: buckets by size, words by alphabet, `unknown` last."""
        if label == UNKNOWN:
            return (1_000, "")
        return (self.labels.index(label), "") if label in self.labels else (0, label)

    def filters(self, label: str) -> tuple[Filter, ...]:
        """The filters that keep exactly the requests under `label`."""
        if label == UNKNOWN:
            return (Filter(self.key, "exists", "false"),)
        if self.edges is None:
            return (Filter(self.key, "eq", label),)
        index = self.labels.index(label)
        found = []
        if index > 0:
            found.append(Filter(self.key, "ge", f"{self.edges[index - 1]:g}"))
        if index < len(self.edges):
            found.append(Filter(self.key, "lt", f"{self.edges[index]:g}"))
        return tuple(found)


def _count_text(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _bucketed(name: str, title: str, key: str, column: str, edges: Sequence[int], unit: str) -> Dimension:
    ends = [_count_text(edge) for edge in edges]
    labels = [f"under {ends[0]}", *(f"{a}–{b}" for a, b in itertools.pairwise(ends)), f"{ends[-1]} and more"]
    return Dimension(
        name, title, key, column, tuple(float(edge) for edge in edges), tuple(f"{label} {unit}" for label in labels)
    )


def _plain(name: str, title: str, column: str | None = None) -> Dimension:
    return Dimension(name, title, name, column or name)


_ALL = (
    _bucketed("input", "Prompt length", "input_tokens", "input_tokens", (128, 512, 2048, 8192, 32768), "tokens"),
    _bucketed("output", "Output length", "output_tokens", "output_tokens", (16, 64, 256, 1024, 4096), "tokens"),
    Dimension(
        "concurrency",
        "Requests in the engine at arrival",
        "concurrency",
        "concurrency_at_arrival",
        (2.0, 5.0, 9.0, 17.0, 33.0, 65.0, 129.0),
        ("0–1", "2–4", "5–8", "9–16", "17–32", "33–64", "65–128", "over 128"),
    ),
    Dimension(
        "cache",
        "Cached share of the prompt",
        "cached_ratio",
        "cached_ratio",
        (1e-9, 0.25, 0.5, 0.75, 0.95),
        ("0 %", "under 25 %", "25–50 %", "50–75 %", "75–95 %", "95 % and more"),
    ),
    _plain("model", "Model"),
    _plain("instance", "Instance"),
    _plain("engine", "Engine"),
    _plain("tenant", "Tenant"),
    _plain("route", "Route"),
    _plain("cause", "Cause"),
    Dimension("primary", "Class", "primary", "primary_class"),
    _plain("engine_version", "Engine version"),
    _plain("service", "Service"),
    _plain("request_class", "Request class"),
    _plain("finish_reason", "Finish reason"),
    _plain("dataset", "Data set"),
)
DIMENSIONS: Mapping[str, Dimension] = MappingProxyType({dimension.name: dimension for dimension in _ALL})


def dimension(name: str) -> Dimension:
    """The dimension by name; InputError with a suggestion for anything else."""
    if (found := DIMENSIONS.get(name.strip().lower())) is not None:
        return found
    close = difflib.get_close_matches(name.lower(), DIMENSIONS, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(DIMENSIONS)}"
    raise InputError("by", name, "is not a dimension to slice by", remedy)


@dataclass(frozen=True, slots=True)
class Metric:
    """A duration of a request that pages compare. boundary: whose clock it is on."""

    name: str
    title: str
    column: str
    boundary: str = "engine"


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric("ttft", "TTFT", "ttft_s"),
            Metric("tpot", "TPOT", "tpot_s"),
            Metric("itl", "ITL (p95 of the request)", "itl_p95_s"),
            Metric("e2e", "E2E", "e2e_s"),
            Metric("queue", "Queue time", "queue_s"),
            Metric("prefill", "Prefill time", "prefill_s"),
            Metric("decode", "Decode time", "decode_s"),
            Metric("client.ttft", "TTFT at the client", "entry_ttft_s", "client"),
            Metric("client.e2e", "E2E at the client", "entry_e2e_s", "client"),
        )
    }
)


def metric(name: str) -> Metric:
    """The metric by name; InputError with a suggestion for anything else."""
    if (found := METRICS.get(name.strip().lower())) is not None:
        return found
    close = difflib.get_close_matches(name.lower(), METRICS, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(METRICS)}"
    raise InputError("metric", name, "is not a metric", remedy)
