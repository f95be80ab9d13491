"""The vocabulary of rows. A field exists once, here; Arrow and DuckDB schemas are made from these classes.

``None`` is unknown, 0 is measured as zero. Times are Unix nanoseconds, durations seconds, identifiers lower-case hex text.
Over many rows the same columns flow as Arrow or Polars frames; objects are for one request on a page or in a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import get_type_hints

import pyarrow as pa

from phasewise.rules.vocabulary import CAUSE_COLUMNS

_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_(), bytes: pa.binary()}
_DUCKDB = {int: "BIGINT", float: "DOUBLE", str: "VARCHAR", bool: "BOOLEAN", bytes: "BLOB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence of one call: identity, lengths, phases, state of the engine around it, and its attribution.

    The attribution (seconds a cause) stands in the table beside these fields: ``CAUSE_COLUMNS``.
    """

    # identity
    request_key: str  # 128-bit hash (32 hex digits) of (trace id, id of the engine span, else of the client span)
    call_key: str | None = None  # groups the n > 1 sequences of one HTTP call
    turn_key: str | None = None  # the trace's root span, where it has calls below
    trace_id: str | None = None
    span_id: str | None = None  # of the engine span, else of the client span
    request_id: str | None = None  # gen_ai.request.id
    client_request_id: str | None = None  # x-request-id or response id as the client knows it
    engine: str | None = None  # profile id: a file of rules/engines
    engine_version: str | None = None
    service: str | None = None
    instance: str | None = None  # replica: resource identity of the engine process
    model: str | None = None
    tenant: str | None = None
    route: str | None = None
    priority: int | None = None
    request_class: str | None = None  # interactive or offline, where a rule declares it
    source: str | None = None  # otlp, import:<format>: where the row came from
    dataset: str | None = None  # name of an import or recording; NULL for live traffic
    # lengths
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    # when
    arrival_unix_ns: int
    finished_unix_ns: int
    received_unix_ns: int | None = None
    queued_unix_ns: int | None = None  # the engine marked it queued
    scheduled_unix_ns: int | None = None  # first scheduled
    first_token_unix_ns: int | None = None
    # phases, architecture section 1; engine boundary
    e2e_s: float | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    context_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    tpot_s: float | None = None
    external_s: float | None = None
    combined_s: float | None = None  # a span of time the engine cannot split, stored once
    combined_covers: str | None = None  # the phases it covers, e.g. "C,F"
    residual_s: float | None = None  # e2e less all phases: shown, never dropped, may be negative
    decode_wait_s: float | None = None  # inside decode: scheduled late after prefill (SGLang decode_waiting)
    # other boundaries
    entry_e2e_s: float | None = None  # outermost span of the same call, or the client's own record
    entry_side: str | None = None  # whose record of the call that is: client, or a server in front of the engine
    entry_before_s: float | None = None  # of it, before the engine's span begins; on one host only
    entry_ttft_s: float | None = None  # the client's own TTFT
    entry_tpot_s: float | None = None  # the client's own TPOT, over the tokens it counted itself
    itl_p95_s: float | None = None
    longest_gap_s: float | None = None  # longest inter-token gap
    client_gaps: str | None = None  # JSON list of the inter-token gaps (seconds) the client itself recorded
    provenance: str | None = None  # JSON: field -> measured:<attribute|span|event|client>, inferred:<model>
    # engine state around it
    concurrency_at_arrival: int | None = None
    decode_batch_mean: float | None = None
    kv_usage_admission_ratio: float | None = None
    kv_usage_peak_ratio: float | None = None
    preemptions: int | None = None
    queue_slot_s: float | None = None  # wait by reason as the engine itself reports it
    queue_kv_s: float | None = None
    queue_budget_s: float | None = None
    queue_window_s: float | None = None
    queue_policy_s: float | None = None
    queue_upstream_s: float | None = None  # of queue_s: in the router in front of the engine
    kv_load_s: float | None = None  # of context_s: KV cache looked up in, and loaded from, a tier of its own
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    outcome: str | None = None  # ok, error, aborted, refused
    finish_reason: str | None = None
    segments: str | None = None  # JSON list of [phase, first step, last step]
    quality: str | None = None  # JSON list of flags: clamped, negative_queue, wrong_parent, truncated, ...


# What attribution adds to a row of `requests`, besides one column of seconds a cause.
ATTRIBUTION_FIELDS: dict[str, type] = {
    "primary_class": str,  # class with most seconds; inconclusive where nothing is known
    "cause": str,  # cause with most seconds inside it
    "margin_ratio": float,  # lead over the next class, as a share of end to end
    "measured_s": float,  # seconds explained by measured parts alone
    "clamped": bool,  # known phases exceeded end to end within tolerance and the longest was cut
    "missing_signals": str,  # JSON list of signal names
    "first_causes": str,  # JSON: cause -> seconds of it before the first token, where the engine's steps tell
    "rules_version": str,
    "revision": int,
    "final": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user-visible turn: a root span with at least one call below."""

    turn_key: str
    trace_id: str
    name: str
    arrival_unix_ns: int
    finished_unix_ns: int
    calls: int
    calls_s: float  # union of its calls
    external_s: float  # union of its tool spans
    unattributed_s: float | None
    ttft_s: float | None  # user-visible: start of the turn to the first token of its last call
    e2e_s: float | None  # null where its span ends before it starts
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """One scheduler iteration of one instance. waiting: in all, where the engine does not tell why they wait."""

    instance: str
    step: int
    start_unix_ns: int
    duration_s: float | None
    prefill_tokens: int | None
    decode_sequences: int | None
    context_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_slot: int | None = None
    waiting_kv: int | None = None
    waiting_budget: int | None = None
    waiting_window: int | None = None
    waiting_policy: int | None = None
    slots_reserved: int | None = None
    schedule_s: float | None = None
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape (or OTLP metric point set) of one instance. Counters are cumulative, as the engine sends them."""

    instance: str
    unix_ns: int
    engine: str
    model: str | None = None
    source: str | None = None  # scrape, otlp, import
    joined: bool = True  # False: no instance could be told; kept, counted, used by nothing
    process_start_unix_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    preemptions: float | None = None  # counter
    retracted: float | None = None  # gauge: requests retracted at the moment (SGLang)
    prefix_queries_tokens: float | None = None  # counter
    prefix_hits_tokens: float | None = None  # counter
    prefix_hit_ratio: float | None = None  # gauge, where the engine gives only that
    prompt_tokens: float | None = None  # counter
    output_tokens: float | None = None  # counter
    finished: float | None = None  # counter, all reasons but abort
    aborted: float | None = None  # counter
    refused: float | None = None  # counter
    answered: float | None = None  # counter: calls that the HTTP server answered with 2xx; moves when the answer ends
    steps: float | None = None  # counter
    step_tokens: float | None = None  # counter
    ttft_count: float | None = None  # counter: moves at the first token, before the request ends
    ttft_sum_s: float | None = None
    itl_count: float | None = None
    itl_sum_s: float | None = None
    e2e_count: float | None = None
    e2e_sum_s: float | None = None
    queue_count: float | None = None
    queue_sum_s: float | None = None
    drafted_tokens: float | None = None  # counter
    accepted_tokens: float | None = None  # counter
    modelled_flops: float | None = None  # counter, per device
    modelled_read_bytes: float | None = None
    modelled_write_bytes: float | None = None
    histograms: str | None = None  # JSON: name -> {"le": [...], "count": [...]} cumulative


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One reading of one device, for each pod that has it where several share it.

    instance: the pod that has the device where the reading says so (`namespace/pod`), else who was asked: a scrape's name, the
    sender of OTLP metrics, this host.
    """

    instance: str
    device: str  # UUID, with the number of its slice behind it where it is one; else host and number
    unix_ns: int
    source: str | None = None  # scrape, otlp, import, nvml
    host: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None
    model: str | None = None  # of the device
    utilization_ratio: float | None = None  # time with a kernel on the device: not how well it was used
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    energy_j: float | None = None  # counter
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_c: float | None = None
    engine_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    throttle_reasons: int | None = None  # bits as NVML's clocks event reasons; 0: none
    xid: int | None = None  # the last XID error; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an instance runs, as its resource says: what device readings are joined to it by."""

    instance: str
    host: str | None = None
    node: str | None = None
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine replica over time, and the settings seen of it.

    One row a span instance. A scrape has one a process and span instance it is joined to, from first to last sample of that
    time: an engine that is restarted under another name answers at the same address.
    """

    instance: str
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    service: str | None = None
    kind: str = "spans"  # spans or scrape: which side knows it by this name; facts: what a file says of the process of this name
    first_seen_unix_ns: int = 0
    last_seen_unix_ns: int = 0
    settings: str | None = (
        None  # JSON: name -> {"value", "source", "unix_ns"?, "others": [...]?}; names as in rules/engine_settings.py
    )
    joined_to: str | None = None  # the instance of the other kind that is the same replica
    joined_by: str | None = None  # resource, only_instance, counters, counters_sum, user
    process_start_unix_s: float | None = None  # scrape: start of the process that was scraped then


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A benchmark run, an ablation arm or a recorded data set."""

    run: str
    name: str
    from_unix_ns: int
    to_unix_ns: int
    facts: str | None = None  # JSON: engine, machine, load, badge text


OWN_SOURCE = "phasewise"  # of marks of this server itself, which are of no other: exports leave them out


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A mark on the time axis: deploy, config change, alert, restart, xid (an error of a device)."""

    unix_ns: int
    kind: str
    text: str
    source: str = "api"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span as received: what the scanner makes of OTLP, and what the waterfall draws."""

    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    name: str = ""
    kind: int = 0
    start_unix_ns: int = 0
    end_unix_ns: int = 0
    status_code: int = 0
    status_message: str | None = None
    scope_name: str | None = None
    scope_version: str | None = None
    resource: str = "{}"  # JSON object of resource attributes, keys sorted
    attributes: str = "{}"  # JSON object of all attributes, keys in the order they came
    events: str | None = None  # JSON list of {"name", "unix_ns", "attributes"}
    links: str | None = None  # JSON list of {"trace_id", "span_id", "attributes"}
    dropped: int = 0  # attributes, events and links the sender says it dropped
    flags: str | None = None  # JSON list of what the scanner did: sanitised, truncated, attributes_cut
    received_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One OTLP metric data point as received."""

    name: str
    kind: str  # gauge, sum, histogram, summary
    unix_ns: int
    value: float | None = None  # gauge and sum
    count: float | None = None  # histogram
    sum: float | None = None
    buckets: str | None = None  # JSON: {"le": [...], "count": [...]} cumulative
    unit: str | None = None
    monotonic: bool | None = None
    scope_name: str | None = None
    resource: str = "{}"
    attributes: str = "{}"
    received_unix_ns: int = 0


def _plain(hint: object) -> type:
    """The one type behind ``X`` or ``X | None``."""
    arguments = getattr(hint, "__args__", None)
    chosen = next((a for a in arguments if a is not type(None)), hint) if arguments else hint
    assert isinstance(chosen, type), hint
    return chosen


def columns(record: type) -> dict[str, type]:
    """Field name to plain Python type, in order; for Request the attribution columns follow."""
    hints = get_type_hints(record)
    found = {f.name: _plain(hints[f.name]) for f in fields(record)}
    if record is Request:
        found |= dict.fromkeys(CAUSE_COLUMNS, float)
        found |= ATTRIBUTION_FIELDS
    return found


def arrow_schema(record: type) -> pa.Schema:
    """Arrow schema of a table of these rows."""
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns(record).items()])


def duckdb_columns(record: type) -> str:
    """Column list for CREATE TABLE."""
    return ", ".join(f'"{name}" {_DUCKDB[kind]}' for name, kind in columns(record).items())


SPAN_SCHEMA: pa.Schema = arrow_schema(Span)
METRIC_SCHEMA: pa.Schema = arrow_schema(MetricPoint)


@dataclass(frozen=True, slots=True)
class Scanned:
    """What one OTLP request held: rows, and what was refused or changed on the way.

    rejected: reason -> count of items not kept; warned: reason -> count of items kept but changed;
    first_error: English text naming the first refused item; names: every attribute key and event name in the rows, at any depth,
    and maybe others; None where the scanner did not look.
    """

    rows: pa.Table
    rejected: dict[str, int] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)
    first_error: str = ""
    names: frozenset[str] | None = None
