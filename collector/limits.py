"""Every bound of the receiving process in one place: what a request, a span and a queue may hold.

Sources: OTLP specification (64 MiB a request, after decompression), the OpenTelemetry SDK's default attribute count (128),
Grafana Tempo's default value length (2,048 bytes), New Relic's key length (255). The rest are our own choices.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """What is kept of one span; the rest is counted and the span flagged."""

    attributes: int = 128  # then only keys this product reads (KNOWN_PREFIXES), up to known_attributes
    known_attributes: int = 512
    resource_attributes: int = 256
    key_bytes: int = 256  # longer keys are dropped
    value_bytes: int = 2048  # longer strings and lists are cut, with a mark
    list_bytes: int = 64 * 1024  # JSON text of a list under gen_ai.
    own_list_bytes: int = MIB  # JSON text of a list under phasewise.: steps travel in these
    depth: int = 32  # nesting of lists and maps inside one value
    events: int = 4096  # one stream-chunk event a token is common
    links: int = 512
    future_s: float = 600.0  # a start further ahead of the receipt is flagged


# Keys the engine profiles read: kept even behind the first `attributes` ones, so that a long chat history cannot evict the
# token counts that follow it.
KNOWN_PREFIXES = (
    "phasewise.",
    "gen_ai.usage.",
    "gen_ai.latency.",
    "gen_ai.request.",
    "gen_ai.response.",
    "gen_ai.server.",
    "gen_ai.client.",
    "gen_ai.operation.",
    "gen_ai.provider.",
    "gen_ai.system",
    "gen_ai.token.",
    "gen_ai.conversation.",
    "llm.usage.",
    "llm.token_count.",
    "llm.model_name",
    "llm.request.type",
    "openinference.span.kind",
    "triton.",
    "llm.latency.",
)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What one process takes at once; beyond it senders are told to retry."""

    request_bytes: int = 64 * MIB  # before and after decompression
    json_bytes: int = 16 * MIB  # parsed JSON takes about ten times its text
    queue_bytes: int = 96 * MIB  # of requests read but not yet durable
    late_bytes: int = 72 * MIB  # of these, of requests that take long to come; others have the rest
    small_bytes: int = MIB // 4  # a request that comes with its headers: no room needs to be kept for it
    queue_rows: int = 50_000  # scanned rows waiting for the disk
    expected_s: float = 1.0  # that room is kept for what a request has announced; over it, it takes long to come
    socket_bytes: int = (
        MIB  # window of an HTTP connection, 10 MB/s where a reply takes 100 ms; the kernel holds twice that
    )
    body_s: float = 30.0  # for a request's body to arrive
    body_bytes_per_s: float = 1024.0  # slower senders are cut off once `slow_after_s` have passed
    slow_after_s: float = 5.0
    header_s: float = 10.0
    unread_s: float = 30.0  # that a client leaves an answer unread before its connection is closed (Linux)
    idle_s: float = 12.0  # a gRPC connection without a call; no interval at which exporters are commonly set to send
    age_s: float = 300.0  # a gRPC connection, which is then asked to be made anew
    connections: int = 1000  # HTTP requests under way, and connections of gRPC
    streams: int = 64  # gRPC calls under way in one connection
    retry_after_s: tuple[int, int] = (1, 2)  # hint to refused senders: Python exporters give up on more than about 8 s
    drain_s: float = 6.0  # after SIGTERM, for requests under way


SPAN_LIMITS = SpanLimits()
INTAKE_LIMITS = IntakeLimits()
