"""Recordings of real engines through the real sockets: over both transports the bytes give the rows of the scanner itself."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest
from otlp_messages import captured_bodies
from receive_process import receiving
from shared_data import shared_path

from phasewise.collector.frames import frame_of
from phasewise.collector.journal import JournalReader
from phasewise.collector.redact import redact_spans
from phasewise.collector.scan import scan_traces

pytestmark = [pytest.mark.live, pytest.mark.slow]
NAMES = (
    "sglang-light",
    "sglang-overload",
    "vllm-client-openai-v2",
    "vllm-kv-starvation",
    "vllm-light",
    "vllm-long-prompt",
    "vllm-mixed",
    "vllm-overload",
    "vllm-shared-prefix",
    "vllm-startup-grpc",
)


def ordered(rows: pl.DataFrame) -> pl.DataFrame:
    """Whatever the order they were acknowledged in, and when."""
    return rows.drop("received_unix_ns").sort("trace_id", "span_id", "name")


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_gives_the_same_rows_over_both_transports(tmp_path: Path, name: str) -> None:
    bodies = list(captured_bodies(shared_path("captures", name, "otlp-traces.ld.gz")))
    alone = ordered(pl.concat([frame_of(redact_spans(scan_traces(body, time.time_ns()).rows)[0]) for body in bodies]))
    for transport in ("grpc", "http"):
        with receiving(tmp_path / transport) as process:
            for body in bodies:
                if transport == "grpc":
                    process.export(body)
                else:
                    assert process.post(body).status == 200
            entries = JournalReader(tmp_path / transport / "journal").read(None, limit=10**9, limit_rows=10**9)
        assert ordered(pl.concat([frame_of(entry.rows) for entry in entries])).equals(alone)


def test_every_recording_is_sent() -> None:
    assert sorted(path.parent.name for path in shared_path("captures").glob("*/otlp-traces.ld.gz")) == sorted(NAMES)
