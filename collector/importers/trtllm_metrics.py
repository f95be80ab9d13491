"""TensorRT-LLM's `/perf_metrics`: timing of each request by a clock that began with its machine, so only differences count.

Disaggregated servers nest the record of the context server and that of the generation server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.attributes import Value
from phasewise.collector.importers.record import Unusable
from phasewise.collector.importers.record_span import between, differences, number, span_of, word
from phasewise.collector.records import Span

SCOPE = "trtllm.perf_metrics"
CLOCKS_END_NS = 10**17  # three years of running machine: later times are Unix times
_REMEDY = "start TensorRT-LLM with return_perf_metrics: true"
_NESTED = ("ctx_perf_metrics", "gen_perf_metrics")
_PAIRS = (
    ("arrival_time", "server_arrival_time"),
    ("first_scheduled_time", "arrival_time"),
    ("first_token_time", "first_scheduled_time"),
    ("server_first_token_time", "first_token_time"),
)


def recognises(document: dict[str, Any]) -> bool:
    return any(isinstance(document.get(name), dict) for name in ("perf_metrics", *_NESTED))


def spans(document: dict[str, Any]) -> Iterator[Span]:
    """One request. Its times are those of the clock; who places the file on the time axis shifts them."""
    before, after = _parts(document)
    first, last = _timing(before), _timing(after)
    begin = number(first.get("server_arrival_time")) or number(first.get("arrival_time"))
    if not begin or begin <= 0:
        raise Unusable("timing_metrics.arrival_time", f"is {first.get('arrival_time')!r:.80}, not seconds", _REMEDY)
    decoded = between(last, "last_token_time", "first_token_time")
    if before is after:
        e2e = between({**last, "begin": begin}, "last_token_time", "begin")
    else:  # two machines: each by its own clock
        led = between({**first, "begin": begin}, "first_token_time", "begin")
        moved = between(last, "first_token_time", "arrival_time")
        known = (led, moved, decoded)
        e2e = sum(part for part in known if part is not None) if None not in known else None
    if e2e is None or e2e < 0:
        raise Unusable("timing_metrics.last_token_time", f"is {last.get('last_token_time')!r:.80}", _REMEDY)
    found: dict[str, Value] = {
        "request_id": word(document.get("request_id", before.get("request_id"))),
        "e2e": e2e,
        **differences(first, _PAIRS),
        "last_token_time - first_token_time": decoded,
        "kv_cache_transfer_end - kv_cache_transfer_start": between(
            last, "kv_cache_transfer_end", "kv_cache_transfer_start"
        ),
        **_counts(before, "kv_cache_metrics", ("num_reused_blocks", "num_new_allocated_blocks", "num_missed_blocks")),
        **_counts(after, "speculative_decoding", ("total_draft_tokens", "total_accepted_draft_tokens")),
    }
    identity = f"{found['request_id']}/{begin!r}/{last.get('last_token_time')!r}"
    yield span_of(SCOPE, identity, float(begin), float(begin) + e2e, found)


def _parts(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record that tells of the prompt, and the one that tells of the generation: one and the same, mostly."""
    context, generation = (document.get(name) for name in _NESTED)
    if isinstance(context, dict) and isinstance(generation, dict):
        return context, generation
    only = next((part for part in (generation, context, document) if isinstance(part, dict)), document)
    return only, only


def _timing(part: dict[str, Any]) -> dict[str, Any]:
    metrics = part.get("perf_metrics")
    timing = metrics.get("timing_metrics") if isinstance(metrics, dict) else None
    if not isinstance(timing, dict):
        raise Unusable("perf_metrics.timing_metrics", "is missing", _REMEDY)
    return timing


def _counts(part: dict[str, Any], group: str, names: tuple[str, ...]) -> dict[str, Value]:
    metrics = part.get("perf_metrics")
    found = metrics.get(group) if isinstance(metrics, dict) else None
    return {name: number(found.get(name)) for name in names} if isinstance(found, dict) else {}
