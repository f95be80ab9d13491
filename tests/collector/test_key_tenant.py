"""The tenant of a key becomes the tenant of the request, whatever the span says of itself."""

from __future__ import annotations

import polars as pl
import pytest
from otlp_messages import RECEIVED_UNIX_NS, span_message, trace_request

from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.collector.tenants import KEY_TENANT, with_tenant
from phasewise.rules.load import load_rulebook


@pytest.mark.parametrize(
    ("tenant", "scope", "own", "expected"),
    [
        ("acme", "vllm.tracing.otel", {}, "acme"),
        ("acme", "phasewise.engine", {"phasewise.tenant": "mine"}, "acme"),
        ("", "vllm.tracing.otel", {}, None),
        (None, "vllm.tracing.otel", {}, None),
    ],
)
def test_the_key_wins(tenant: str | None, scope: str, own: dict[str, object], expected: str | None) -> None:
    resource = {"service.name": "vllm"} if tenant is None else {"service.name": "vllm", KEY_TENANT: "claimed"}
    span = span_message({"gen_ai.usage.prompt_tokens": 9, "gen_ai.latency.e2e": 1.0, **own})
    message = trace_request(span, resource=resource, scope=scope)
    rows = scan_traces(message.SerializeToString(), RECEIVED_UNIX_NS).rows
    if tenant is not None:
        rows = with_tenant(rows, tenant)
    spans = pl.from_arrow(rows)
    assert isinstance(spans, pl.DataFrame)
    found = normalize(spans, Profiles(load_rulebook().engines)).requests
    assert found["tenant"].to_list() == [expected]


def test_no_rows_are_no_problem() -> None:
    rows = scan_traces(trace_request().SerializeToString(), RECEIVED_UNIX_NS).rows
    assert with_tenant(rows, "acme").num_rows == 0
