"""phasewise-summary/1 documents for tests: a builder, and a strategy that draws any document the schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from phasewise.analyzer.summary.document import schema

SECTIONS = ("hardware", "engine", "model", "workload", "observed")
# Paths that people vary, and some that mean nothing to the analyzer.
PATHS = (
    "engine.gateway", "engine.max_num_seqs", "engine.max_num_batched_tokens", "engine.tensor_parallel", "engine.version",
    "engine.speculation.method", "engine.quant_kernel", "engine.prefix_caching", "engine.routing_policy",
    "engine.extra_flags.some_thread_count", "workload.concurrency", "workload.groups", "workload.input_tokens",
    "workload.structured_output", "workload.num_requests", "hardware.sm_clock_mhz",
)  # fmt: skip


def make_summary(name: str = "made", **sections: object) -> dict[str, object]:
    """A valid document; sections that are not given are empty."""
    return {"schema": "phasewise-summary/1", "id": name, **{s: {} for s in SECTIONS}, **sections}


def summaries() -> st.SearchStrategy[dict[str, object]]:
    """Any document of the format: every section, every type a field allows, absurd magnitudes among them."""
    whole = schema()
    properties = _mapping(whole["properties"])
    fixed = {"schema": st.just("phasewise-summary/1"), "id": st.text(max_size=8)}
    required = {name: _object(_mapping(properties[name])) for name in SECTIONS}
    optional = {
        name: _any(_mapping(properties[name]))
        for name in ("client", "server", "stages", "baseline", "sweep", "arms", "timeline", "requests")
    }
    return st.fixed_dictionaries({**fixed, **required}, optional=optional)


def _mapping(value: object) -> Mapping[str, Any]:
    assert isinstance(value, Mapping)
    return value


def _any(rule: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in rule:
        return _any(_defined(rule["$ref"]))
    if "enum" in rule:
        return st.sampled_from(rule["enum"])
    if "const" in rule:
        return st.just(rule["const"])
    kinds = rule.get("type")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds or ["object"])
    return st.one_of([_typed(kind, rule) for kind in kinds])


def _typed(kind: str, rule: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = rule.get("minimum"), rule.get("maximum")
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "string":
        return st.sampled_from(["none", "kv prefill", "H100-SXM", "bf16", "a", ""]) | st.text(max_size=6)
    if kind == "integer":
        return (
            st.integers(min_value=low, max_value=high) | st.integers(0, 64) | st.just(10**400 if high is None else high)
        )
    if kind == "number":
        wide = st.floats(min_value=low, max_value=high, allow_nan=False, allow_infinity=False)
        return (
            wide | st.sampled_from([0, 1, 0.5]) | st.floats(0, 1)
            if high is not None
            else wide | st.sampled_from([0, 1, 50, 3000, 1e308, 5e-324])
        )
    if kind == "array":
        return st.lists(_any(rule["items"]) if "items" in rule else st.just("short"), max_size=3)
    assert kind == "object", kind
    return _object(rule)


def _object(rule: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties: dict[str, Any] = dict(rule.get("properties", {}))
    for part in rule.get("allOf", ()):
        properties |= _defined(part["$ref"])["properties"]
    if not properties and "additionalProperties" in rule:
        return st.dictionaries(st.text(max_size=4), _any(rule["additionalProperties"]), max_size=3)
    needed = {name: _field(name, properties[name]) for name in rule.get("required", ())}
    # Many fields at once find more than any single one: each is drawn with even odds.
    rest = {name: _field(name, r) for name, r in properties.items() if name not in needed}
    return st.fixed_dictionaries(needed, optional=rest)


def _field(name: str, rule: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if name == "differs":
        values = st.none() | st.booleans() | st.integers(0, 512) | st.sampled_from(["none", "x", ["short"], []])
        return st.dictionaries(st.sampled_from(PATHS), values, max_size=2)
    return _any(rule)


def _defined(reference: str) -> Mapping[str, Any]:
    return _mapping(_mapping(schema()["$defs"])[reference.rpartition("/")[2]])
