"""Requests that overlap, as OTLP/JSON lines in which no trace lies in one piece, and what a store holds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
from span_tables import at

from phasewise.collector.archive import SpanArchive

REQUESTS = 40


def span(
    name: str, number: int, span_id: str, parent: str, scope: str, *times_s: float, **attributes: Any
) -> dict[str, Any]:
    own = [
        {"key": k.replace("__", "."), "value": {"doubleValue" if isinstance(v, float) else "intValue": v}}
        for k, v in attributes.items()
    ]
    one = {
        "traceId": f"{number + 1:032x}",
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 2,
        "startTimeUnixNano": str(at(times_s[0])),
        "endTimeUnixNano": str(at(times_s[1])),
        "attributes": own,
    }
    resource = {"attributes": [{"key": "service.instance.id", "value": {"stringValue": "e-1"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": scope}, "spans": [one]}]}]}


def lines() -> list[str]:
    """Requests that overlap, one a second; the span around each comes twenty lines later, mostly in another piece."""
    found: list[dict[str, Any]] = []
    late: list[dict[str, Any]] = []
    for n in range(REQUESTS):
        values = {
            "gen_ai__latency__e2e": 3.0,
            "gen_ai__latency__time_in_queue": 1.0,
            "gen_ai__usage__completion_tokens": 5,
        }
        values |= {"gen_ai__latency__time_to_first_token": 1.5, "gen_ai__latency__time_in_model_prefill": 0.5}
        found.append(span("llm_request", n, "b" * 16, "a" * 16, "vllm.tracing.otel", n, n + 3.0, **values))
        late.append(span("POST /v1/chat", n, "a" * 16, "", "opentelemetry.instrumentation.fastapi", n - 0.1, n + 3.1))
        if n >= 20:
            found.append(late[n - 20])
    return [json.dumps(one) for one in [*found, *late[REQUESTS - 20 :]]]


def contents(data: Path) -> dict[str, Any]:
    """All that is stored but when it came and how often it was judged."""
    with duckdb.connect(str(data / "phasewise.duckdb"), read_only=True) as store:
        tables = {
            name: store.execute(sql).fetchall()
            for name, sql in {
                "requests": "SELECT * EXCLUDE (received_unix_ns, revision) FROM requests ORDER BY request_key",
                "turns": "SELECT * FROM turns ORDER BY turn_key",
                "rollups": "SELECT * FROM rollups ORDER BY ALL",
                "instances": "SELECT * FROM instances ORDER BY ALL",
                "marks": "SELECT * FROM positions WHERE name LIKE 'import:%'",
                "counters": "SELECT * FROM counters WHERE name NOT LIKE '%reopened%' ORDER BY ALL",
                "samples": "SELECT * FROM engine_samples ORDER BY ALL",
            }.items()
        }
    spans = SpanArchive(data).traces([f"{n + 1:032x}" for n in range(REQUESTS)]).drop_columns(["received_unix_ns"])
    return tables | {"spans": sorted(map(str, spans.to_pylist()))}
