"""What telemetry a verdict lacked, and how each engine is told to send it."""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.analyzer.findings import Finding
from phasewise.analyzer.scene import Scene
from phasewise.analyzer.signals import Value
from phasewise.rules.engine_settings import NAME_IT

HOW: dict[str, str] = {
    "request_spans": (
        "vLLM: --otlp-traces-endpoint http://HOST:4317; SGLang: --enable-trace --otlp-traces-endpoint HOST:4317"
    ),
    "engine_metrics": (
        "phasewise serve --scrape http://ENGINE:PORT/metrics (SGLang also needs --enable-metrics), "
        "or phasewise ingest --scrapes FILE"
    ),
    "cached_tokens": "vLLM's spans do not carry it, its plugin does: pip install --no-deps phasewise beside it; SGLang sends gen_ai.usage.cached_tokens",
    "accelerator": f"{NAME_IT}; or for one engine OTEL_RESOURCE_ATTRIBUTES=phasewise.gpu=h100-sxm",
    "model": "engine metrics carry the model's name; or name it in phasewise.toml [hardware] model",
    "client_boundary": "import the client's records: phasewise ingest FILE; or propagate traceparent from the client",
    "scrape_join": "give --scrape one URL an engine, or an `instance` with each scrape; several engines could be meant",
    "all_spans": (
        "send every span: OTEL_TRACES_SAMPLER=parentbased_always_on, llm-d OTEL_TRACES_SAMPLER_ARG=1.0, Triton rate=1, and no tail "
        "sampling in the collector between"
    ),
    "replica_names": (
        "give each replica's spans the name its scrape has: OTEL_RESOURCE_ATTRIBUTES=service.instance.id=HOST:PORT, or "
        "k8s.pod.name and k8s.namespace.name with a pod label on the scrape"
    ),
    "frontend_spans": (
        "trace the server in front of the engine (OpenTelemetry instrumentation of its framework, tokenizer and retrieval calls): "
        "spans of its own work between its request's span and the engine's"
    ),
    "span_attributes": (
        "raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT (128 by default) at the sender, or send fewer attributes of tools and messages"
    ),
    "tool_spans": (
        "trace what a request waits for inside its stream (tools, retrieval, a client that reads slowly): spans in the request's own trace, "
        "or the engine's steps (vLLM: pip install --no-deps phasewise beside it)"
    ),
    "wait_reason": "scrape the engine more often: no sample lies near these waits",
}


def missing_signals(scene: Scene, finding: Finding, signals: dict[str, Value]) -> list[dict[str, object]]:
    """Entries {signal, how, why} for everything that would have sharpened this verdict."""
    found: dict[str, str] = {}
    if finding.phase_ratio is None or finding.phase_ratio < 0.9:
        found["request_spans"] = (
            "no requests" if finding.phase_ratio is None else f"{finding.phase_ratio:.0%} carry phases"
        )
    if scene.sampling.is_partial:
        found["all_spans"] = f"{scene.sampling.ratio:.0%} of the finished requests sent spans"
    if scene.unjoined:
        found["scrape_join"] = f"{len(scene.unjoined)} scraped engines belong to no known spans"
    elif (apart := _apart(scene)) is not None:
        found["replica_names"] = apart
    if signals.get("kv_usage_p95_ratio") is None:
        found["engine_metrics"] = "without KV use and waiting requests, a full slot limit and a full KV pool look alike"
    elif finding.sums.unknown_waits:
        found["wait_reason"] = "part of the waiting could not be told apart"
    count, told = scene.sums.count, scene.sums.told
    if finding.sums.stalled:
        found["tool_spans"] = (
            "tokens of single requests came late while those beside them got theirs, and nothing tells what for"
        )
    if count and not told["cached_tokens"]:
        found["cached_tokens"] = "the cache hit of single requests is unknown"
    if count and not told["model"]:
        found["model"] = "weight and KV bytes follow from the model's shape"
    if (dropped := scene.sums.dropped) > 0:
        found["span_attributes"] = f"{dropped:,} of {count:,} requests lost attributes before they were sent"
    if finding.cause == "host" and (front_s := finding.sums.outside_s().get("host", 0.0)) > 0:
        found["frontend_spans"] = (
            f"{front_s:.3g} s of the affected requests pass in front of the engine, and no span tells what for"
        )
    if signals.get("device_kind") is None and count:
        found["accelerator"] = "the achieved share of its peaks is unknown"
    if count and not told["entry_e2e_s"]:
        worst = _ttft_text(scene)
        found["client_boundary"] = f"user-visible TTFT unknown{worst}"
    return [{"signal": name, "how": HOW[name], "why": why} for name, why in found.items()]


def _apart(scene: Scene) -> str | None:
    """Spans without scrapes beside scraped engines of the same kind without spans: replicas that nothing tells apart."""
    alone = [one for one in scene.replicas if one.has_spans and one.samples.is_empty()]
    scraped = [one for one in scene.replicas if not one.has_spans and one.engine in {other.engine for other in alone}]
    if not alone or not scraped:
        return None
    return f"spans of {len(alone)} and scrapes of {len(scraped)} engines are not joined: neither names nor counters tell which is which"


def _ttft_text(scene: Scene) -> str:
    values = scene.requests["ttft_s"].drop_nulls()
    middle = values.median()
    return f", at least {middle:.3g} s in the median" if isinstance(middle, float) else ""


def sentences(names: Sequence[str]) -> list[str]:
    """How to turn on each named signal."""
    return [HOW[name] for name in names if name in HOW]
