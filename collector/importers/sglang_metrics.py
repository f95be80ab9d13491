"""SGLang's `--export-metrics-to-file`: a line a finished request, with the times of its scheduler and of its API server.

`queue_time` holds every entry into the queue; where a request was retracted, the first wait is not known by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import Unusable
from phasewise.collector.importers.record_span import between, differences, number, span_of, word
from phasewise.collector.records import Span

SCOPE = "sglang.request_metrics"
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "num_retractions", "dp_rank")
_TIMES = ("e2e_latency", "first_token_latency", "decode_throughput")
_PAIRS = (
    ("api_server_dispatch_finish_ts", "request_received_ts"),
    ("prefill_finished_time", "forward_entry_time"),
    ("response_sent_to_client_ts", "request_received_ts"),
)
_REMEDY = "start SGLang with --enable-metrics"


def recognises(document: dict[str, Any]) -> bool:
    return "request_parameters" in document and ("finish_reason" in document or "e2e_latency" in document)


def spans(document: dict[str, Any]) -> Iterator[Span]:
    start, e2e = number(document.get("request_received_ts")), number(document.get("e2e_latency"))
    if start is None or start <= 0:
        raise Unusable(
            "request_received_ts", f"is {document.get('request_received_ts')!r:.80}, not Unix seconds", _REMEDY
        )
    if e2e is None or e2e < 0:
        raise Unusable("e2e_latency", f"is {document.get('e2e_latency')!r:.80}, not seconds", _REMEDY)
    finish = document.get("finish_reason")
    retracted = (number(document.get("num_retractions")) or 0) > 0
    found = {
        "id": word(document.get("id")),
        "finish_reason": word(finish.get("type") if isinstance(finish, dict) else finish),
        "weight_version": word(document.get("weight_version")),
        **{name: number(document.get(name)) for name in (*_COUNTS, *_TIMES)},
        **differences(document, _PAIRS),
        "queue_time of all entries" if retracted else "queue_time": number(document.get("queue_time")),
    }
    # The scheduler's clock is the API server's only in some releases; elsewhere it began with the machine.
    prefilled = between(document, "prefill_finished_time", "request_received_ts")
    if prefilled is not None and 0 <= prefilled <= e2e + 1:
        found["prefill_finished_time - request_received_ts"] = prefilled
    identity = f"{document.get('id')}/{start!r}/{e2e!r}"
    yield span_of(SCOPE, identity, float(start), float(start) + float(e2e), found)
