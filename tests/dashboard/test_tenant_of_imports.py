"""Files that are sent with a key bear its tenant, as live spans do."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import attributed, make_request, request_table
from otlp_messages import span_message, trace_request
from stocked import NOW_UNIX_NS, Served, make_served

from phasewise.collector.access import Door
from phasewise.collector.access_keys import KeyFile, new_key
from phasewise.collector.exchange import TABLES, marked
from phasewise.collector.tenants import KEY_TENANT
from phasewise.dashboard.access import Posture
from phasewise.rules.load import Rulebook


class Sender:
    """An application with a key of a tenant and one of none."""

    def __init__(self, data: Path, rulebook: Rulebook) -> None:
        self.tokens = {}
        for tenant in ("acme", ""):
            key, self.tokens[tenant] = new_key(("ingest", "read"), now_unix_ns=NOW_UNIX_NS, tenant=tenant)
            KeyFile(data).add(key)
        door = Door(data, "test", clock=lambda: NOW_UNIX_NS)
        self.served: Served = make_served(data, rulebook, filled=False, posture=Posture(door, "127.0.0.1"))

    def send(self, body: bytes, tenant: str) -> None:
        headers = {"content-type": "application/octet-stream", "authorization": f"Bearer {self.tokens[tenant]}"}
        asked: Any = self.served.client._ask("POST", "/api/v1/ingest", {"headers": headers, "content": body})
        answer = asyncio.run(asked)
        assert answer.status_code == 200, answer.text

    def tenants(self) -> list[str | None]:
        return self.served.store.query("SELECT tenant FROM requests ORDER BY ALL")["tenant"].to_list()


@pytest.fixture
def sender(tmp_path: Path, rulebook: Rulebook) -> Iterator[Sender]:
    made = Sender(tmp_path, rulebook)
    yield made
    made.served.store.close()


def traces() -> bytes:
    """A span whose resource claims a tenant."""
    span = span_message({"gen_ai.usage.prompt_tokens": 9, "gen_ai.latency.e2e": 1.0})
    resource = {"service.name": "vllm", KEY_TENANT: "claimed"}
    return bytes(trace_request(span, resource=resource, scope="vllm.tracing.otel").SerializeToString())


def client_records() -> bytes:
    record = {
        "metadata": {
            "session_num": 0,
            "x_request_id": "r-1",
            "request_start_ns": NOW_UNIX_NS - 10**10,
            "request_end_ns": NOW_UNIX_NS - 9 * 10**9,
            "worker_id": "w",
            "record_processor_id": "p",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {"request_latency": {"value": 1000.0, "unit": "ms"}},
        "error": None,
    }
    return (json.dumps(record) + "\n").encode()


def export_table() -> bytes:
    rows = request_table([attributed(make_request(tenant="theirs"))])
    table: pa.Table = rows.to_arrow() if hasattr(rows, "to_arrow") else rows
    schema = marked(TABLES["requests"].schema, "requests")
    sink = io.BytesIO()
    pq.write_table(table.select(schema.names).cast(schema), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("body", "tenant", "expected"),
    [
        (traces, "acme", "acme"),
        (traces, "", None),
        (client_records, "acme", "acme"),
        (client_records, "", None),
        (export_table, "acme", "acme"),
        (export_table, "", "theirs"),
    ],
)
def test_what_comes_with_a_key_is_its_tenants(sender: Sender, body: Any, tenant: str, expected: str | None) -> None:
    sender.send(body(), tenant)
    assert sender.tenants() == [expected]
