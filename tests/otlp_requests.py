"""Trace requests of any shape for property tests: up to three resources with up to two scopes each."""

from __future__ import annotations

from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@st.composite
def requests(
    draw: st.DrawFn,
    pairs: st.SearchStrategy[list[KeyValue]],
    texts: st.SearchStrategy[str],
    spans: st.SearchStrategy[list[Span]],
) -> ExportTraceServiceRequest:
    """pairs: attributes of a resource; texts: name and version of a scope; spans: those of one scope."""
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 3))):
        group = request.resource_spans.add()
        group.resource.attributes.extend(draw(pairs))
        for _ in range(draw(st.integers(0, 2))):
            scope = group.scope_spans.add()
            scope.scope.name, scope.scope.version = draw(texts), draw(texts)
            scope.spans.extend(draw(spans))
    return request
