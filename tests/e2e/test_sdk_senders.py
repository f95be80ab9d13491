"""The OpenTelemetry SDKs of Python and JavaScript send the same spans live, over every transport they have: the rows are equal.

JavaScript needs node and its packages: in the folder that PHASEWISE_NODE_MODULES names, else installed once by npm into a cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from serving import Served, serving

from phasewise.collector.journal import JournalReader
from phasewise.collector.requests import REQUEST_SCHEMA
from phasewise.collector.store import Store
from phasewise.instrumented_engine.llama.model_files import cache_folder

pytestmark = [pytest.mark.slow, pytest.mark.live]
SENDERS = Path(__file__).parent.parent / "senders"
# The last releases that run on node 20.
PACKAGES = (
    "@opentelemetry/api@1.9.0",
    "@opentelemetry/sdk-trace-base@2.12.0",
    "@opentelemetry/resources@2.12.0",
    "@opentelemetry/exporter-trace-otlp-grpc@0.223.0",
    "@opentelemetry/exporter-trace-otlp-proto@0.223.0",
    "@opentelemetry/exporter-trace-otlp-http@0.223.0",
)
PROTOCOLS = {"python": ("grpc", "http/protobuf"), "javascript": ("grpc", "http/protobuf", "http/json")}
COMPRESSIONS = ("none", "gzip")
CALLS = 3
# What names the sender, its trace or the moment of arrival here.
OWN = ("request_key", "call_key", "trace_id", "span_id", "instance", "service", "request_id", "client_request_id", "received_unix_ns", "root_key", "turn_key")  # fmt: skip


def plan(base_s: int, variant: str) -> list[dict[str, Any]]:
    """A client call with the engine's span below, an engine's alone, and a call that was refused. Times are [s, ns].

    Whole numbers among the seconds: JavaScript cannot say 2.0, and sends an integer.
    """

    def span(name: str, scope: str, kind: str, start: float, end: float, parent: int | None = None, **more: Any) -> dict[str, Any]:  # fmt: skip
        def moment(offset: float) -> list[int]:
            return [base_s + int(offset), round(offset % 1 * 1e9)]

        events = [{**event, "at": moment(event["at"])} for event in more.get("events", ())]
        return {
            "name": name, "scope": scope, "kind": kind, "parent": parent, "start": moment(start), "end": moment(end),
            "attributes": more.get("attributes", {}), "events": events, "links": more.get("links", []),
            "error": more.get("error"),
        }  # fmt: skip

    def engine(name: str, e2e: float, **more: Any) -> dict[str, Any]:
        return {
            "gen_ai.request.id": f"chatcmpl-{variant}-{name}", "gen_ai.latency.e2e": e2e, "gen_ai.usage.prompt_tokens": 97,
            "gen_ai.latency.time_to_first_token": 1, "gen_ai.latency.time_in_queue": 0.25,
            "gen_ai.latency.time_in_model_prefill": 0.5, "gen_ai.latency.time_in_model_decode": e2e - 1,
            "gen_ai.latency.time_in_model_inference": e2e - 0.5, "gen_ai.usage.completion_tokens": 36,
            "gen_ai.request.n": 1, "gen_ai.request.temperature": 1, "gen_ai.request.top_p": 0.95, **more,
        }  # fmt: skip

    client = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "modèle"}
    return [
        span("chat modèle", "app", "CLIENT", 0, 3.25, attributes={
            **client, "gen_ai.response.id": f"chatcmpl-{variant}-a", "gen_ai.usage.input_tokens": 97,
            "gen_ai.usage.output_tokens": 36, "gen_ai.response.finish_reasons": ["stop"], "app.tags": ["π", "😀", ""],
        }),
        span("llm_request", "vllm.tracing.otel", "SERVER", 0.125, 3.125, 0, attributes=engine("a", 3, **{"app.flag": True})),
        span("llm_request", "vllm.tracing.otel", "SERVER", 5.000000001, 7.5, attributes=engine("b", 2.5), links=[0]),
        span("chat modèle", "app", "CLIENT", 8, 8.5, attributes={**client, "error.type": "503"}, error="no capacity",
             events=[{"name": "exception", "at": 8.25, "attributes": {"exception.type": "Refused", "retry.after_s": 2}}]),
    ]  # fmt: skip


def node_modules() -> Path:
    """Skips where they are not and cannot be had."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if given := os.environ.get("PHASEWISE_NODE_MODULES"):
        return Path(given)
    folder = cache_folder().parent / "opentelemetry-js" / "-".join(p.rpartition("@")[2] for p in PACKAGES[1::2])
    if not (folder / "whole").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed: set PHASEWISE_NODE_MODULES to a node_modules folder with " + " ".join(PACKAGES))  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", *PACKAGES]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not answer in time")
        if done.returncode:
            pytest.skip(f"npm could not install the SDK for JavaScript: {done.stderr.strip()[-200:]}")
        (folder / "whole").touch()
    return folder / "node_modules"


def command(language: str) -> tuple[list[str], dict[str, str]]:
    if language == "python":
        return [sys.executable, str(SENDERS / "send.py")], dict(os.environ)
    return ["node", str(SENDERS / "send.cjs")], os.environ | {"NODE_PATH": str(node_modules())}


def send(served: Served, language: str, protocol: str, compression: str, base_s: int) -> str:
    """One run of one sender; the name of its instance."""
    name = f"{language}-{protocol.replace('/', '-')}-{compression}"
    grpc, http = served.ready["otlp_grpc_port"], served.ready["otlp_http_port"]
    url = f"http://127.0.0.1:{grpc}" if protocol == "grpc" else f"http://127.0.0.1:{http}/v1/traces"
    told = {
        "protocol": protocol, "url": url, "compression": compression, "spans": plan(base_s, name),
        "resource": {"service.name": name, "service.instance.id": name, "host.name": "here"},
    }  # fmt: skip
    arguments, environment = command(language)
    for variable in [variable for variable in environment if variable.startswith("OTEL_")]:
        del environment[variable]
    done = subprocess.run(
        arguments, input=json.dumps(told), text=True, capture_output=True, timeout=120, env=environment
    )
    assert done.returncode == 0, f"{name}: {done.stderr}"
    return name


@pytest.mark.parametrize("language", list(PROTOCOLS))
def test_every_transport_of_an_sdk_makes_the_same_rows(language: str, tmp_path: Path) -> None:
    command(language)  # skips before anything is started
    base_s = int(time.time()) - 60
    with serving(tmp_path / "data") as served:
        ways = [(language, p, c) for p in PROTOCOLS[language] for c in COMPRESSIONS]
        measure = ("python", "grpc", "none")  # what all others are measured by
        names = [send(served, *way, base_s) for way in dict.fromkeys([measure, *ways])]
        served.verdict((CALLS - 1) * len(names), timeout_s=60)  # the refused are counted apart
        assert served.stop() == 0
    with Store(tmp_path / "data" / "phasewise.duckdb") as store:
        requests = store.query("SELECT * FROM requests")
    assert len(requests) == CALLS * len(names)
    told = {name: rows_of(requests, name) for name in names}
    spans = {name: spans_of(tmp_path / "data", name) for name in names}
    first, *others = names
    for name in others:
        assert told[name] == told[first], name
        assert spans[name] == spans[first], name
    called, alone, refused = told[first]
    assert (called["engine"], called["model"], called["entry_e2e_s"], called["e2e_s"]) == (
        "vllm_v1",
        "modèle",
        3.25,
        3.0,
    )
    assert (alone["e2e_s"], alone["queue_s"], alone["decode_s"], alone["output_tokens"]) == (2.5, 0.25, 1.5, 36)
    assert alone["arrival_unix_ns"] == (base_s + 5) * 10**9 + 1
    assert refused["outcome"] not in ("ok", None)


def rows_of(requests: pl.DataFrame, name: str) -> list[dict[str, Any]]:
    """Rows of one sender in order, without what is its own; and without attribution, which for calls that no engine tells of looks at
    all that ran at the time."""
    own = requests.filter(pl.col("service") == name).sort("arrival_unix_ns")
    return own.select(c for c in REQUEST_SCHEMA if c not in OWN).to_dicts()


def spans_of(data: Path, name: str) -> list[dict[str, Any]]:
    """Raw spans of one sender in order: attributes, events and links by content, ids by their place in the plan."""
    entries = JournalReader(data / "journal").read(None, limit=10**9, limit_rows=10**9)
    rows = [
        row for entry in entries if entry.kind == "spans" for row in entry.rows.to_pylist() if name in row["resource"]
    ]
    rows.sort(key=lambda row: (row["start_unix_ns"], -row["end_unix_ns"]))
    place = {row["span_id"]: index for index, row in enumerate(rows)}
    found = []
    for row in rows:
        attributes = json.loads(row["attributes"])
        events = json.loads(row["events"] or "[]")
        links = [place[link["span_id"]] for link in json.loads(row["links"] or "[]")]
        same = (
            "name",
            "kind",
            "start_unix_ns",
            "end_unix_ns",
            "status_code",
            "status_message",
            "scope_name",
            "dropped",
        )
        told = {key: row[key] for key in same}
        parent = place[row["parent_span_id"]] if row["parent_span_id"] else None
        text = json.dumps([attributes, events], sort_keys=True, ensure_ascii=False).replace(name, "NAME")
        found.append(told | {"parent": parent, "links": links, "text": json.loads(text)})
    return found
