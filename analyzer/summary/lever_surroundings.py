"""Settings around the engine: gateways, server processes, preparation of requests, grammars, timers, links."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.change import MATTERS, Change, Choose, Lever, more, switch
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least

_MANY_CLIENTS = 50.0

_ENGINE_SIDE = frozenset({"queueing", "compute", "bandwidth"})


def _gateway(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if str(change.here or "").lower() in ("", "none") or change.there not in ("none", None):
        return None
    load = summary.in_flight or 0.0
    smoother = change.gains.get("itl", 1.0) < 0.8 or change.gains.get("tpot", 1.0) < 0.8
    whole = change.gains.get("e2e")
    if smoother or (change.gains.get("ttft", 1.0) >= MATTERS and whole is not None and whole < 1.15):
        return Lever(
            "client", "proxy_buffering", ("disable_proxy_buffering", "flush_first_token_immediately"),
            "Behind the gateway the first token comes late and the others close together: it buffers.", ("ttft", "e2e"), 0.75, _ENGINE_SIDE,
        )  # fmt: skip
    if load >= _MANY_CLIENTS or at_least(summary.count("workload.num_requests"), 200):
        return Lever(
            "external", "gateway_limit", ("raise_gateway_connection_limit",),
            "The engine alone serves the same load well: the gateway lets too few requests through.", strength=0.8, symptoms=_ENGINE_SIDE,
        )  # fmt: skip
    return Lever(
        "external", "gateway", ("disable_proxy_buffering", "raise_gateway_connection_limit", "collect_missing_signals"),
        "Without the gateway the same requests are faster.", strength=0.6, symptoms=_ENGINE_SIDE,
    )  # fmt: skip


def _grammar(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.path == "workload.structured_output" and change.there is not False:
        return None
    pace = max(
        change.gains.get("tpot", 0.0),
        change.gains.get("itl", 0.0),
        change.gains.get("throughput", 0.0) if "ttft" not in change.gains else 0.0,
    )
    if pace >= MATTERS and pace >= 0.5 * change.gains.get("ttft", 0.0):
        return Lever(
            "host",
            "grammar_per_token",
            ("faster_grammar_backend", "simplify_schema"),
            "Each token waits for the mask of the grammar.",
            ("tpot", "itl", "throughput"),
            0.75,
            frozenset({"bandwidth", "compute", "context"}),
        )
    return Lever(
        "context",
        "grammar_compilation",
        ("cache_compiled_grammar", "simplify_schema", "faster_grammar_backend"),
        "The grammar is compiled before the first token.",
        ("ttft", "e2e"),
        0.75,
        frozenset({"host", "queueing", "compute"}),
    )


def _threads(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.lowered:
        return Lever(
            "host",
            "too_many_threads",
            ("limit_cpu_threads",),
            "With fewer threads the same work is faster: they fight for cores.",
            symptoms=frozenset({"context"}),
        )
    return Lever(
        "context",
        "preprocessing",
        ("parallel_preprocessing",),
        "With more threads requests are prepared faster.",
        ("ttft", "e2e", "throughput"),
    )


def _servers(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if not change.raised:
        return None
    prepared = summary.typical_s("frontend") or summary.seconds("validation_p50") or summary.seconds("preprocess_p50")
    return Lever(
        "context" if prepared else "host", "api_server", ("scale_api_servers", "parallel_preprocessing" if prepared else "async_scheduling"),
        "With more server processes the same engine is reached sooner.", symptoms=frozenset({"queueing", "external"}),
    )  # fmt: skip


def _images(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if not change.lowered and change.there is not None:
        return None
    return Lever(
        "context",
        "preprocessing",
        ("parallel_preprocessing", "preprocessing_cache"),
        "With smaller or fewer images the same service is faster.",
        ("ttft", "e2e", "throughput"),
        0.5,
    )


def _stream(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    return (
        Lever(
            "host",
            "flush_timer",
            ("flush_first_token_immediately",),
            "With a shorter flush interval the first token comes earlier.",
            ("ttft", "itl"),
            0.75,
            _ENGINE_SIDE | {"external"},
        )
        if change.lowered
        else None
    )


_WORKERS = more(
    "context",
    "preprocessing",
    ("parallel_preprocessing", "scale_api_servers"),
    "With more workers requests are prepared faster.",
    ("ttft", "e2e", "throughput"),
    frozenset({"queueing", "host"}),
)


_PREPARED = more(
    "context",
    "preprocessing",
    ("preprocessing_cache",),
    "With a larger cache fewer images are prepared twice.",
    ("ttft", "e2e", "throughput"),
)


SURROUNDINGS: Mapping[str, Choose] = {
    "engine.gateway": _gateway,
    "engine.structured_output_backend": _grammar,
    "workload.structured_output": _grammar,
    "workload.structured_output_schema": _grammar,
    "engine.api_server_workers": _servers,
    "engine.preprocess_workers": _WORKERS,
    "engine.preprocess_threads": _threads,
    "engine.preprocess_cache_gb": _PREPARED,
    "engine.stream_interval_ms": _stream,
    "engine.kv_transfer_backend": switch("communication.network", "kv_transfer", ("enable_rdma_transfer",), "Over another transport the same requests are faster.", ("ttft", "e2e", "throughput")),
    "workload.images_per_request": _images,
    "workload.image_width_px": _images,
    "workload.image_height_px": _images,
}  # fmt: skip
