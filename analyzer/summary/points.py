"""A summary as the detectors see it: points with their numbers in seconds and bytes, settings, comparisons.

This is the edge of the summary format: milliseconds and gigabytes become seconds and bytes here and nowhere else.
Absent and null are both None. Absurd magnitudes are clipped so that arithmetic downstream stays finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from phasewise.analyzer.summary.document import metric_names

Scalar = float | str | bool | None
_LARGEST = 1e15
_SMALLEST = 1e-9
TYPICAL = ("p50", "mean")
TAIL = ("p99", "max", "p95", "p90")


def finite(value: object) -> float | None:
    """A number as float, clipped to a range in which products stay finite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    clipped = max(-_LARGEST, min(_LARGEST, value))
    return 0.0 if abs(clipped) < _SMALLEST else float(clipped)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator; None where one is unknown or the denominator is zero."""
    if numerator is None or denominator is None or abs(denominator) < _SMALLEST:
        return None
    return numerator / denominator


def near(value: float | None, other: float | None, tolerance: float) -> bool:
    """The two agree within the relative tolerance (of the larger); False where one is unknown or both are zero."""
    if value is None or other is None or max(abs(value), abs(other)) < _SMALLEST:
        return False
    return abs(value - other) <= tolerance * max(abs(value), abs(other))


def at_least(value: float | None, limit: float) -> bool:
    """Known and at least the limit."""
    return value is not None and value >= limit


def at_most(value: float | None, limit: float) -> bool:
    """Known and at most the limit."""
    return value is not None and value <= limit


def first(values: Iterable[float | None]) -> float | None:
    """The first value that is known."""
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The four sections of settings, read by dotted path; a point may override single paths (`differs`)."""

    sections: Mapping[str, Mapping[str, object]]

    def raw(self, path: str) -> object:
        section, _, rest = path.partition(".")
        node: object = self.sections.get(section)
        for key in rest.split("."):
            if not isinstance(node, Mapping):
                return None
            node = node.get(key)
        return node


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers measured at one place: a run, a view of it, a window, a request.

    place: path in the document, for evidence; differs: settings in which this run differs from the observed one, None
    where the point belongs to the observed run itself.
    """

    place: str
    values: Mapping[str, object]
    settings: Settings
    differs: Mapping[str, object] | None = None

    def number(self, metric: str) -> float | None:
        """The number as reported, in the unit of its name."""
        return finite(self.values.get(metric))

    def seconds(self, metric: str) -> float | None:
        """Seconds of a metric given in milliseconds; `metric` without `_ms`."""
        value = finite(self.values.get(f"{metric}_ms"))
        return None if value is None else value / 1000

    def word(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def typical_s(self, phase: str) -> float | None:
        """Median, else mean, of a phase (`ttft`, `tpot`, `e2e`, ...)."""
        return first(self.seconds(f"{phase}_{statistic}") for statistic in TYPICAL)

    def tail_s(self, phase: str) -> float | None:
        """The highest percentile given (p99, else the maximum, p95, p90)."""
        return first(self.seconds(f"{phase}_{statistic}") for statistic in TAIL)

    def source(self, metric: str) -> str:
        return f"{self.place}.{metric}"

    # --- settings of this run ----------------------------------------------------------------------------------------

    def setting(self, path: str) -> object:
        if self.differs is not None and path in self.differs:
            return self.differs[path]
        return self.settings.raw(path)

    def count(self, path: str) -> float | None:
        return finite(self.setting(path))

    def text(self, path: str) -> str | None:
        value = self.setting(path)
        return value if isinstance(value, str) and value.strip() else None

    def truth(self, path: str) -> bool | None:
        value = self.setting(path)
        return value if isinstance(value, bool) else None

    @property
    def group(self) -> str | None:
        return self.word("group")

    @property
    def view(self) -> str | None:
        return self.word("view")

    @property
    def name(self) -> str:
        return self.word("name") or self.group or self.place

    # --- derived -----------------------------------------------------------------------------------------------------

    def _lengths(self, key: str) -> float | None:
        own = finite(self.values.get(key))
        if own is not None:
            return own
        if self.group is not None:
            groups = self.setting("workload.groups")
            for entry in groups if isinstance(groups, list) else ():
                if isinstance(entry, Mapping) and entry.get("name") == self.group:
                    found = finite(entry.get(key))
                    if found is not None:
                        return found
        return self.count(f"workload.{key}")

    @property
    def input_tokens(self) -> float | None:
        return self._lengths("input_tokens")

    @property
    def output_tokens(self) -> float | None:
        return self._lengths("output_tokens")

    @property
    def token_s(self) -> float | None:
        """Seconds between two tokens of one stream: TPOT, else the inverse of the decode rate, else ITL."""
        direct = self.typical_s("tpot")
        if direct is not None:
            return direct
        inverse = ratio(
            1.0, first((self.number("decode_rate_p50_tok_per_s"), self.number("decode_rate_min_tok_per_s")))
        )
        return inverse if inverse is not None else self.seconds("itl_p50")

    @property
    def throughput(self) -> float | None:
        """Work finished per second, in the first unit that is given; compare only points of one summary."""
        return first(
            self.number(name)
            for name in (
                "output_throughput_tok_per_s",
                "total_throughput_tok_per_s",
                "output_throughput_per_gpu_tok_per_s",
                "total_throughput_per_gpu_tok_per_s",
                "request_throughput_per_s",
                "input_throughput_tok_per_s",
                "output_throughput_max_tok_per_s",
            )
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a request of an application. seconds: all its calls together; per_call_s: one of them."""

    name: str
    kind: Literal["own", "call", "queue", "transfer"]
    parent: str | None
    seconds: float | None
    least_s: float | None
    most_s: float | None
    calls: float | None
    parallel: bool | None
    place: str

    @property
    def per_call_s(self) -> float | None:
        if self.calls is None or self.calls <= 1 or self.parallel:
            return self.seconds
        return ratio(self.seconds, self.calls)


@dataclass(frozen=True, slots=True)
class Summary:
    """One deployment, told by its numbers."""

    id: str
    settings: Settings
    observed: Point
    client: Point | None
    server: Point | None
    baseline: Point | None
    sweep: tuple[Point, ...]
    arms: tuple[Point, ...]
    timeline: tuple[Point, ...]
    requests: tuple[Point, ...]
    stages: tuple[Stage, ...]

    # --- settings ----------------------------------------------------------------------------------------------------

    def count(self, path: str) -> float | None:
        return self.observed.count(path)

    def text(self, path: str) -> str | None:
        return self.observed.text(path)

    def truth(self, path: str) -> bool | None:
        return self.observed.truth(path)

    # --- numbers of the observed run ---------------------------------------------------------------------------------

    @property
    def views(self) -> tuple[Point, ...]:
        """The places that describe the observed run as a whole."""
        return tuple(p for p in (self.observed, self.server, self.client) if p is not None)

    def place_of(self, metric: str) -> Point | None:
        """The view, or else the window of the timeline, that holds a number of the observed run."""
        for point in (*self.views, *self.timeline):
            if point.number(metric) is not None:
                return point
        return None

    def number(self, metric: str) -> float | None:
        point = self.place_of(metric)
        return None if point is None else point.number(metric)

    def seconds(self, metric: str) -> float | None:
        value = self.number(f"{metric}_ms")
        return None if value is None else value / 1000

    def word(self, metric: str) -> str | None:
        return next((w for p in (*self.views, *self.timeline) if (w := p.word(metric)) is not None), None)

    def peak(self, metric: str) -> float | None:
        """Largest value over the views and the timeline of the observed run."""
        values = [v for p in (*self.views, *self.timeline) if (v := p.number(metric)) is not None]
        return max(values, default=None)

    def typical_s(self, phase: str) -> float | None:
        return first(point.typical_s(phase) for point in self.views)

    def tail_s(self, phase: str) -> float | None:
        return first(point.tail_s(phase) for point in self.views)

    def felt_s(self, phase: str) -> float | None:
        """The longest of what the views say: what the user waits, of which every other view sees a part."""
        return max((s for p in self.views if (s := p.typical_s(phase)) is not None), default=None)

    @property
    def measured(self) -> bool:
        """The document holds any number that was measured, not only settings."""
        points = (*self.views, *self.timeline, *self.requests, *self.comparators)
        names = metric_names()
        return any(p.values.get(name) is not None for p in points for name in names) or any(
            s.seconds is not None or s.most_s is not None for s in self.stages
        )

    @property
    def input_tokens(self) -> float | None:
        return self.observed.input_tokens

    @property
    def output_tokens(self) -> float | None:
        return self.observed.output_tokens

    @property
    def sequence_tokens(self) -> float | None:
        """Tokens of one sequence at its full length."""
        parts = self.input_tokens, self.output_tokens
        if parts[0] is not None:
            return parts[0] + (parts[1] or 0.0)
        return self.count("workload.total_tokens")

    @property
    def in_flight(self) -> float | None:
        """Requests in flight: the declared concurrency, else the sum over groups, else running and waiting."""
        declared = self.count("workload.concurrency")
        if declared is not None:
            return declared
        groups = self.settings.raw("workload.groups")
        if isinstance(groups, list):
            counts = [finite(g.get("concurrency")) for g in groups if isinstance(g, Mapping)]
            if counts and all(c is not None for c in counts):
                return sum(c for c in counts if c is not None)
        running, waiting = self.number("requests_running"), self.number("requests_waiting")
        return None if running is None or waiting is None else running + waiting

    @property
    def preemptions(self) -> float | None:
        return self.peak("preemptions_count")

    @property
    def waiting(self) -> float | None:
        return self.peak("requests_waiting")

    @property
    def kv_usage(self) -> float | None:
        return self.peak("kv_cache_usage_ratio")

    @property
    def ranks(self) -> float:
        """Devices that hold one copy of the model together."""
        return max(1.0, (self.count("engine.tensor_parallel") or 1.0) * (self.count("engine.pipeline_parallel") or 1.0))

    # --- other runs --------------------------------------------------------------------------------------------------

    @property
    def comparators(self) -> tuple[Point, ...]:
        """Runs that differ from the observed one: baseline, sweep, arms."""
        return tuple(p for p in (self.baseline, *self.sweep, *self.arms) if p is not None)

    def differing_in(self, *paths: str) -> tuple[Point, ...]:
        """Runs that differ in exactly these settings, or some of them, and in nothing else."""
        wanted = set(paths)
        return tuple(p for p in self.comparators if p.differs and set(p.differs) <= wanted)

    def series(self, path: str, view: str | None = None) -> list[tuple[float, Point]]:
        """The observed run and those that differ in one number only, by that number; one point a value.

        A point of another workload group or another view than asked for does not belong to the series.
        """
        found: dict[float, Point] = {}
        for point in (self.observed, *self.sweep, *self.arms, *((self.baseline,) if self.baseline else ())):
            if point.differs is not None and not set(point.differs) <= {path}:
                continue
            if point.view != view or (point.group or self.observed.group) != self.observed.group:
                continue
            value = point.count(path)
            if value is None:
                continue
            known = found.get(value)
            if known is None or len(point.values) > len(known.values):
                found[value] = point
        return sorted(found.items())
