"""The parts of an engine profile: detectors, keys, slices, moments, derivations, metric series; and the columns they may fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ROLES = ("engine", "client", "wrapper", "tool", "startup", "steps")
SUFFIX = "suffix"  # a time as text that names its own unit: 12.3ms, 845µs, 1.2s
UNIT_SECONDS: Mapping[str, float] = MappingProxyType({"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})
COMBINE = ("sum", "max", "mean", "min")
PHASES = ("Q", "C", "P", "F", "D", "X")

# Columns of `requests` a profile may fill; tests/collector compares them with collector/records.py.
TIME_FIELDS = frozenset({
    "e2e_s", "ttft_s", "queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s",
    "decode_wait_s", "itl_p95_s", "longest_gap_s", "queue_slot_s", "queue_kv_s", "queue_budget_s", "queue_window_s",
    "queue_policy_s", "queue_upstream_s", "kv_load_s",
})  # fmt: skip
COUNT_FIELDS = frozenset({
    "input_tokens", "cached_tokens", "output_tokens", "preemptions", "priority", "drafted_tokens", "accepted_tokens",
})  # fmt: skip
TEXT_FIELDS = frozenset({
    "request_id", "client_request_id", "model", "finish_reason", "tenant", "route", "request_class", "engine_version",
    "segments",
})  # fmt: skip
MOMENT_FIELDS = frozenset({"queued_unix_ns", "scheduled_unix_ns", "first_token_unix_ns"})
SAMPLE_GAUGES = frozenset({"running", "waiting", "kv_usage_ratio", "retracted", "prefix_hit_ratio"})
SAMPLE_COUNTERS = frozenset({
    "preemptions", "prefix_queries_tokens", "prefix_hits_tokens", "prompt_tokens", "output_tokens", "finished",
    "aborted", "refused", "answered", "steps", "step_tokens", "drafted_tokens", "accepted_tokens", "modelled_flops",
    "modelled_read_bytes", "modelled_write_bytes",
})  # fmt: skip
# Metrics of the web server that an engine runs in: read only beside the engine's own, whatever runs in such a server has them.
WEB_SERVER_METRICS = ("http_requests_total",)
SAMPLE_HISTOGRAMS = frozenset({"ttft", "itl", "e2e", "queue"})


@dataclass(frozen=True, slots=True)
class Detector:
    """One way to recognise a span: every part that is not empty must hold."""

    names: tuple[str, ...] = ()
    name_prefixes: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    scope_prefixes: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()
    attributes_any: tuple[str, ...] = ()
    attributes_all: tuple[str, ...] = ()
    attributes_none: tuple[str, ...] = ()
    resource_any: tuple[str, ...] = ()
    not_names: tuple[str, ...] = ()
    attribute_values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # equal; a final * matches any rest
    attributes_contain: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: bool = False  # only spans whose sender says that it dropped attributes


@dataclass(frozen=True, slots=True)
class Key:
    """A quantity on the span: the first attribute present wins; scale turns its unit into ours.

    suffixed: text that names its own unit; events: names of span events; the earliest tells the time since the start of the span, where it comes before what the
    attribute says.
    """

    attributes: tuple[str, ...]
    resource: tuple[str, ...] = ()
    scale: float = 1.0
    events: tuple[str, ...] = ()
    suffixed: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """A phase made of child spans.

    extent: per name max end - min start over all ranks, names added (a rank's repetition is never summed);
    union: the union of all intervals; first: the earliest interval alone.
    """

    names: tuple[str, ...]
    how: str = "extent"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: the start or end of child spans, a span event of the request or its parts, or another moment plus and
    minus durations.

    sole: an event that came more than once (one a step of an ensemble) tells nothing; else the earliest counts.
    """

    start_of: tuple[str, ...] = ()
    end_of: tuple[str, ...] = ()
    event: tuple[str, ...] = ()
    sole: bool = False
    at: str = ""
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Derivation:
    """field = sum(plus) - sum(minus), or the time between two moments, or a mean time between tokens times their gaps; only
    where the field is still unknown.

    unless: fields that must be unknown; needs: fields that must be known; close_*: sums that must agree within the larger
    tolerance;
    covers: the phases a combined value covers; quality: flag set on rows that use it.
    scopes, before: only for spans of these instrumentation scopes, or whose engine says that its release is older ("0.17").
    """

    field: str
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    per_gap: str = ""
    unless: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    close_left: tuple[str, ...] = ()
    close_right: tuple[str, ...] = ()
    close_tolerance_s: float = 0.0
    close_tolerance_ratio: float = 0.0
    covers: str = ""
    quality: str = ""
    scopes: tuple[str, ...] = ()
    before: str = ""


def release_numbers(text: str) -> tuple[int, ...]:
    """A release ("0.9.2") as numbers that compare."""
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True, slots=True)
class Release:
    """What an engine tells otherwise in some of its releases. since, before: "0.9.2", the first with it and the first without;
    either may be missing. source: the release and the file it was read in."""

    since: str
    before: str
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """field is set aside (null) where field / of > above although more than `tokens` tokens came."""

    field: str
    of: str
    above: float
    tokens: int
    quality: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two sums that the engine's own figures must keep; rows where they differ by more get the flag `quality`."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    tolerance_s: float
    quality: str


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """The two halves of a request that one process prefills and another decodes.

    key: attribute that the engine's spans of both halves carry; without one, prefill and decode are spans of a router above them.
    """

    prefill: Detector
    decode: Detector
    key: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A Prometheus family as a sample column. where / without: label values kept or left out."""

    names: tuple[str, ...]
    combine: str = "sum"
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    moves_with: str = ""  # a counter: while it moves and this one never did, this one is not enabled (null)
    needs: str = ""  # null where that column is null
    part: str = ""  # count or sum, of a histogram


@dataclass(frozen=True, slots=True)
class Info:
    """A setting read from a label of an info metric, or from the value of a gauge."""

    metric: str
    label: str = ""
    times: str = ""  # label whose value multiplies it
    unset: str = ""  # what an unset value ("None") means; else such a value is left out
    kind: str = "text"  # text, integer, number, truth
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: float = 1.0
    each_rank: bool = False  # of each data-parallel rank: the deployment's is their sum


@dataclass(frozen=True, slots=True)
class Metrics:
    """How the engine's exposition maps to samples and settings. rank_labels: copies of one value over ranks (max taken);
    data_parallel_label: names ranks that serve requests of their own, all of one deployment."""

    prefixes: tuple[str, ...]
    model_labels: tuple[str, ...]
    rank_labels: tuple[str, ...]
    data_parallel_label: str
    gauges: Mapping[str, Series]
    counters: Mapping[str, Series]
    histograms: Mapping[str, Series]
    settings: Mapping[str, tuple[Info, ...]]


@dataclass(frozen=True, slots=True)
class Example:
    """spans: a whole trace in short form; request: columns and their expected values; absent: columns that must be null.
    source: the release and the file that its shape was read in."""

    name: str
    spans: tuple[Mapping[str, Any], ...]
    request: Mapping[str, Any] | None
    absent: tuple[str, ...]
    requests_count: int
    scrape: str = ""
    sample: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
