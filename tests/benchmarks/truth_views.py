"""One run of the engine as two stores would hold it, and what the analyzer says of each: with the engine's own steps, and from
what vLLM sends.

What an operator would have written into phasewise.toml is told in both: the accelerator, the number of devices, the data types.
The model's name comes with the engine's spans, or with vLLM's metrics. Nothing else of the set-up is told.

The objective of a question is a limit on one figure, just under what the fastest of the slowest tenth took, at the boundary of
that view. So a tenth of the requests break it, as with an objective that is set a little too tight, and with steps they are the very
requests that the truth is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from phasewise.analyzer.attribution import attributor
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Objective, Window
from phasewise.collector.profiles import Profiles
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.commands.engine_recording import (
    Sender,
    ended_ns,
    hand_over,
    spans_of,
    vllm_samples_of,
    vllm_spans_of,
)
from phasewise.instrumented_engine import vllm_scrapes
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.deployment import Deployment
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.simulation import Setup
from phasewise.instrumented_engine.vllm_scrapes import VllmServer
from phasewise.rules.load import Rulebook

SLOW_RATIO = 0.1
# Column that the analyzer judges an objective by; without gaps between tokens the mean gap of a request stands in.
FIGURES = {"ttft": "ttft_s", "itl": "tpot_s", "e2e": "e2e_s"}
INSTANCE = "engine-0"
SCRAPE = "engine-0:8000"


@dataclass(frozen=True, slots=True)
class View:
    """rows: the attributed requests; verdicts: objective -> verdict object, without objectives nobody has a figure for."""

    rows: pl.DataFrame
    steps: int
    samples: int
    verdicts: Mapping[str, dict[str, Any]]


def hardware(deployment: Deployment) -> dict[str, object]:
    """The [hardware] section for this deployment."""
    weights, kv = deployment.precision.weight_bits, deployment.precision.kv_bits
    told: dict[str, object] = {
        "accelerator": deployment.gpu.id,
        "tensor_parallel": deployment.tensor_parallel_count,
        "weight_dtype": "bf16",
        "kv_dtype": "bf16" if kv > 8 else "fp8",
    }
    if weights <= 8:
        eight = "fp8" if deployment.compute_dtype == "fp8" else "int8"
        told["quantization"] = eight if weights > 5 else "awq"
    return told


def with_steps(recording: Recording, setup: Setup, folder: Path, rulebook: Rulebook) -> View:
    """What the engine itself sends: its spans and its steps."""
    sender = Sender(INSTANCE, setup.deployment.model.id, "0.1.0")
    spans = spans_of(recording, sender)
    with Store(folder / "steps.duckdb", threads=1) as store:
        writer = _writer(store, folder / "steps", rulebook, setup.deployment, recording)
        hand_over(writer, spans)
        return _view(store, rulebook, recording)


def from_spans(recording: Recording, setup: Setup, folder: Path, rulebook: Rulebook, *, seed: int = 0) -> View:
    """What a vLLM in its place would send: one span a request, and scrapes of its metrics every 5 s."""
    server = _server(recording, setup.config, setup.deployment)
    pages = vllm_scrapes.pages(recording, server, vllm_scrapes.moments_ns(recording, seed=seed))
    samples = vllm_samples_of(pages, Profiles(rulebook.engines), SCRAPE)
    spans = vllm_spans_of(recording, INSTANCE)
    with Store(folder / "spans.duckdb", threads=1) as store:
        writer = _writer(store, folder / "spans", rulebook, setup.deployment, recording)
        hand_over(writer, spans, samples)
        return _view(store, rulebook, recording)


def limit_of(figures: pl.Series) -> float | None:
    """The limit that the slowest tenth breaks; None where nobody has this figure."""
    known = figures.drop_nulls().sort(descending=True)
    if known.is_empty() or known[0] <= 0:
        return None
    last = known[-(-len(known) // round(1 / SLOW_RATIO)) - 1]
    return float(last) * (1 - 1e-9) if last > 0 else None


def _server(recording: Recording, config: EngineConfig, deployment: Deployment) -> VllmServer:
    return VllmServer(
        model=deployment.model.id,
        started_ns=recording.steps[0][0] - 60 * 10**9,
        kv_blocks=recording.kv_blocks_total,
        block_tokens=config.block_tokens,
        prefix_caching=config.prefix_sharing,
        cache_dtype="auto" if deployment.precision.kv_bits > 8 else "fp8",
    )


def _writer(store: Store, folder: Path, rulebook: Rulebook, deployment: Deployment, recording: Recording) -> Writer:
    folder.mkdir()
    now = ended_ns(recording) + 10**9
    return Writer(store, folder, rulebook, attributor(rulebook), clock=lambda: now, stated=hardware(deployment))


def _view(store: Store, rulebook: Rulebook, recording: Recording) -> View:
    rows = store.query("SELECT * FROM requests ORDER BY arrival_unix_ns, request_key")
    end = ended_ns(recording) + 10**9
    window = Window(0, end)
    verdicts = {}
    for name, column in FIGURES.items():
        limit_s = limit_of(rows[column])
        if limit_s is not None:
            slo = (Objective(name, limit_s),)
            verdicts[name] = window_verdict(store, rulebook, window, slo=slo, now_unix_ns=end)
    counted = store.query(
        "SELECT (SELECT count(*) FROM engine_steps) AS steps, (SELECT count(*) FROM engine_samples) AS samples"
    )
    return View(rows, int(counted["steps"].item()), int(counted["samples"].item()), verdicts)
