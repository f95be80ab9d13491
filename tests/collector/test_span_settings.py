"""How an engine is set, told by the resource of its spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from span_tables import span_frame
from writing import Bench, rulebook

from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.registry import Registry
from phasewise.collector.store import Store

VLLM = {"service.instance.id": "v-0", "service.name": "vllm"}


def request(start_s: float, **resource: str | float) -> dict[str, Any]:
    return {
        "name": "llm_request", "scope": "vllm.tracing.otel", "kind": 2, "start_s": start_s, "end_s": start_s + 1,
        "resource": VLLM | {key.replace("_", "."): value for key, value in resource.items()},
        "attributes": {"gen_ai.request.id": f"r-{start_s}", "gen_ai.latency.e2e": 1.0},
    }  # fmt: skip


def stored_settings(store: Store) -> dict[str, Any]:
    rows = store.query("SELECT settings FROM instances WHERE kind = 'spans'")
    settings: dict[str, Any] = json.loads(rows["settings"][0] or "{}")
    return settings


def test_the_accelerator_named_in_the_resource_is_a_setting_of_the_instance(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.receive([request(0.0, phasewise_gpu="h100-sxm")])
    bench.run(5)
    assert stored_settings(bench.store)["accelerator"] == {"source": "resource", "value": "h100-sxm"}
    bench.store.close()


def test_the_newest_resource_counts_and_an_empty_one_says_nothing() -> None:
    profiles = Profiles(rulebook().engines)
    spans = [request(0.0, phasewise_gpu="a10"), request(9.0, phasewise_gpu="l4"), request(20.0, phasewise_gpu="")]
    told = normalize(span_frame(spans), profiles).settings
    assert told == [("v-0", {"accelerator": "a10"}), ("v-0", {"accelerator": "l4"})]


def test_what_the_operator_states_wins() -> None:
    bench_rows = pl.DataFrame(
        {
            "instance": ["v-0"], "engine": ["vllm_v1"], "engine_version": [None], "model": [None], "service": [None],
            "arrival_unix_ns": [0], "finished_unix_ns": [1],
        },
        schema_overrides={"engine_version": pl.String, "model": pl.String, "service": pl.String},
    )  # fmt: skip
    registry = Registry(pl.DataFrame(), {"accelerator": "h200-sxm"})
    registry.see_requests(bench_rows)
    registry.see_settings("v-0", {"accelerator": "a10", "tensor_parallel": 2}, "resource")
    settings = registry.settings("v-0")
    assert (settings["accelerator"].value, settings["accelerator"].source) == ("h200-sxm", "user")
    assert settings["tensor_parallel"].value == 2
