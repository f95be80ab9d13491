"""Recorded telemetry of real engines through the whole writer: counts, phases and client figures as their own files state them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from captures import bodies, scrapes
from shared_data import shared_path
from writing import bench, rulebook

from phasewise.collector.archive import SpanArchive
from phasewise.collector.importers import import_bytes, import_file
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces

STARTUP = "vllm-startup-grpc"
WITH_SPANS = (
    "sglang-overload", "vllm-client-openai-v2", "vllm-kv-starvation", "vllm-overload",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sglang-light", "vllm-light", "vllm-long-prompt", "vllm-mixed", "vllm-shared-prefix")),
)  # fmt: skip
CHILD_COLUMNS = {"prefill_waiting": "queue_s", "prefill_forward": "prefill_s", "decode_waiting": "decode_wait_s"}
PROFILES = Profiles(rulebook().engines)
Load = Callable[[str], "Loaded"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the store held of a folder: after its spans, and after its scrapes and client records as well."""

    folder: Path
    spans: pl.DataFrame
    spans_only: pl.DataFrame
    requests: pl.DataFrame
    samples: pl.DataFrame
    instances: pl.DataFrame
    marks: pl.DataFrame
    client_format: str
    client_counts: dict[str, int]


def span_rows(folder: Path) -> pa.Table:
    return pa.concat_tables([scan_traces(body, r["recv_unix_ns"]).rows for r, body in bodies(folder)])


def scrape_lines(folder: Path, shift_ns: int = 0) -> bytes:
    lines = [json.dumps({"unix_ns": at + shift_ns, "text": text}) for at, text in scrapes(folder)]
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Loads each folder once: spans, scrapes, then the client's file, all as imports."""

    @cache
    def loaded(name: str) -> Loaded:
        folder = shared_path("captures", name)
        with bench(tmp_path_factory.mktemp(name)) as b:
            b.writer.add_spans(span_rows(folder))
            spans_only = b.store.query("SELECT * FROM requests")
            kind, counts = "", {}
            if name != STARTUP:
                b.writer.add_import(import_bytes(scrape_lines(folder), "scrapes", PROFILES))
                client = import_file(next(folder.glob("client*.jsonl")), PROFILES)
                kind, counts = client.format, b.writer.add_import(client)
            traces = spans_only["trace_id"].drop_nulls().unique().to_list()
            return Loaded(
                folder=folder,
                spans=pl.DataFrame(SpanArchive(b.folder).traces(traces)),
                spans_only=spans_only,
                requests=b.store.query("SELECT * FROM requests"),
                samples=b.store.query("SELECT * FROM engine_samples"),
                instances=b.store.query("SELECT * FROM instances"),
                marks=b.store.query("SELECT * FROM annotations"),
                client_format=kind,
                client_counts=counts,
            )

    return loaded


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found


def served(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter((pl.col("outcome") == "ok") & (pl.col("source") == "otlp"))


def check_percentiles(expected: dict[str, float | None], columns: dict[str, np.ndarray], least_s: float = 6e-5) -> None:
    """name_p50: value, against linear percentiles, within 2 % (the files are rounded to four decimals)."""
    for key, value in expected.items():
        name, _, percentile = key.rpartition("_p")
        if value is not None and name in columns:
            found = float(np.percentile(columns[name], float(percentile)))
            assert abs(found - value) <= max(0.02 * value, least_s), f"{key}: {found}, expected {value}"


def values(frame: pl.DataFrame, column: str) -> np.ndarray:
    return frame[column].drop_nulls().to_numpy()


@pytest.mark.parametrize("name", [*WITH_SPANS, STARTUP])
def test_served_requests_are_counted_right(load: Load, name: str) -> None:
    expected = json.loads(shared_path("captures", "expected.json").read_text())[name]["requests"]
    rows = load(name).spans_only
    assert served(rows).height == expected
    assert rows.filter(pl.col("outcome") == "refused").height == (2 if name == "vllm-client-openai-v2" else 0)
    assert rows["final"].all()


@pytest.mark.parametrize("name", WITH_SPANS)
def test_phases_are_those_of_the_spans(load: Load, name: str) -> None:
    known, rows = facts(load(name).folder), served(load(name).spans_only)
    columns = {c: values(rows, f"{c}_s") for c in ("ttft", "e2e", "tpot", "decode", "prefill", "queue")}
    own = known["server_span_s"]
    if "child_span_s" in known:  # there the child spans count: the prefill attribute holds the queue
        check_percentiles(known["child_span_s"], {child: values(rows, c) for child, c in CHILD_COLUMNS.items()})
        spans = load(name).spans  # slices without a column of their own stand in the archive of raw spans
        length = (spans["end_unix_ns"] - spans["start_unix_ns"]) / 1e9
        children = {child: length.filter(spans["name"] == child).to_numpy() for child in ("tokenize", "decode_forward")}
        assert all(len(found) == rows.height for found in children.values())
        check_percentiles(known["child_span_s"], children)
        own = {key: value for key, value in own.items() if key.startswith(("ttft", "e2e", "tpot"))}
    check_percentiles(own, columns)
    total = float(rows["e2e_s"].sum())
    for phase, share in known.get("share_of_e2e", {}).items():
        parts = ["combined_s", "residual_s"] if phase == "other_frontend" else [f"{phase}_s"]
        found = sum(float(rows[part].sum()) for part in parts) / total
        assert abs(found - share) <= max(0.02 * share, 6e-5), phase


@pytest.mark.parametrize("name", WITH_SPANS)
def test_client_figures_come_with_the_client_file(load: Load, name: str) -> None:
    one = load(name)
    known, rows = facts(one.folder), served(one.requests)
    # Every record found its call (those that were refused before the engine as well), and nothing was counted twice.
    assert (one.client_counts["matched"], one.client_counts["added"]) == (known["client_requests"], 0)
    assert rows.height == served(one.spans_only).height
    assert one.requests.filter(pl.col("source").str.starts_with("import:")).is_empty()
    gaps = np.array([gap for text in rows["client_gaps"].drop_nulls() for gap in json.loads(text)])
    columns = {"ttft": values(rows, "entry_ttft_s"), "itl": gaps}
    if name != "vllm-client-openai-v2":  # its uninstrumented completion has no client record
        columns["e2e"] = values(rows, "entry_e2e_s")
    if one.client_format == "aiperf":  # counts tokens with a tokenizer of its own, and states its TPOT over them
        columns["tpot"] = values(rows, "entry_tpot_s")
    elif one.client_format == "vllm-bench":
        decode = rows["entry_e2e_s"] - rows["entry_ttft_s"]
        columns["tpot"] = (decode / (rows["output_tokens"] - 1)).to_numpy()
    check_percentiles(known["client_s"], columns)


@pytest.mark.parametrize("name", WITH_SPANS)
def test_scrapes_join_their_replica(load: Load, name: str) -> None:
    one = load(name)
    known = facts(one.folder)["metrics"]
    assert one.samples.height == facts(one.folder)["scrapes"]
    assert one.samples["joined"].all()
    assert served(one.requests)["model"].unique().to_list() == ["smollm2-135m"]
    spans = one.instances.filter(pl.col("kind") == "spans").row(0, named=True)
    scrape = one.instances.filter(pl.col("kind") == "scrape").row(0, named=True)
    assert (spans["joined_to"], scrape["joined_to"]) == (scrape["instance"], spans["instance"])
    assert (spans["joined_by"], one.instances.height) == ("only_instance", 2)
    highest = {name: float(one.samples[name].max() or 0) for name in ("running", "waiting", "kv_usage_ratio")}  # type: ignore[arg-type]
    assert highest["running"] == known["max_running"]
    assert highest["waiting"] == known.get("max_waiting", known.get("max_queue"))
    assert abs(highest["kv_usage_ratio"] - known.get("max_kv_usage", known.get("max_token_usage"))) < 1e-4
    if name.startswith("vllm"):
        settings = json.loads(scrape["settings"])
        preemptions = one.samples["preemptions"].drop_nulls()
        assert preemptions.max() - preemptions.min() == known["preemptions"]  # type: ignore[operator]
        starved = name == "vllm-kv-starvation"
        assert settings["kv_pool_tokens"] == {"value": 768 if starved else 93_184, "source": "scrape"}
        assert settings["prefix_caching"]["value"] is not starved
        looked_up = one.samples["prefix_queries_tokens"].drop_nulls()
        assert float(looked_up.max() or 0) > 0 or starved  # type: ignore[arg-type]


def test_startup_spans_are_marks_and_no_requests(load: Load) -> None:
    one = load(STARTUP)
    assert one.marks.height == 12
    assert one.marks["kind"].unique().to_list() == ["startup"]
    assert any(text.startswith("Overall Loading: 6") for text in one.marks["text"])
    assert one.instances.is_empty()


def test_two_captures_at_once_join_by_their_counters(tmp_path: Path) -> None:
    """Two replicas of one engine in the same minutes, their scrapes without a name: the finished counters tell."""
    with bench(tmp_path) as b:
        first = shared_path("captures", "vllm-overload")
        second = shared_path("captures", "vllm-kv-starvation")
        shift = next(scrapes(first))[0] - next(scrapes(second))[0]
        for folder, by in ((first, 0), (second, shift)):
            rows = span_rows(folder)
            frame = pl.from_arrow(rows)
            assert isinstance(frame, pl.DataFrame)
            moved = frame.with_columns(pl.col("start_unix_ns") + by, pl.col("end_unix_ns") + by)
            b.writer.add_spans(moved.to_arrow().cast(rows.schema))
            b.writer.add_import(import_bytes(scrape_lines(folder, by), "scrapes", PROFILES))
        joined = {row["instance"]: row for row in b.rows("SELECT * FROM instances WHERE kind = 'spans'")}
        assert len(joined) == 2
        assert {row["joined_by"] for row in joined.values()} == {"counters"}
        starts = {
            row["instance"]: b.store.query(
                "SELECT any_value(process_start_unix_s) AS s FROM engine_samples WHERE instance = ?", [row["joined_to"]]
            )["s"].item()
            for row in joined.values()
        }
        models = b.rows("SELECT instance, count(*) AS n FROM requests GROUP BY 1")
        by_count = {row["n"]: starts[row["instance"]] for row in models}
        assert by_count[96] < by_count[24]  # the overloaded server was started first
