"""A store with a known morning in it, and the application on top of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asgi_client import Client
from builders import (
    SECOND_NS,
    START_UNIX_NS,
    attributed,
    make_instance,
    make_request,
    make_sample,
    record_table,
    request_table,
)
from fastapi import FastAPI

from phasewise.analyzer.attribution import attributor
from phasewise.collector.access import Door
from phasewise.collector.records import Annotation, EngineSample, Instance
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.access import Posture
from phasewise.dashboard.api import create_app
from phasewise.dashboard.app import attach_dash
from phasewise.rules.load import Rulebook

NOW_UNIX_NS = START_UNIX_NS + 600 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Served:
    """One application with everything behind it."""

    app: FastAPI
    store: Store
    writer: Writer
    client: Client


def traffic(n: int = 160) -> list[dict[str, object]]:
    """Requests over nine minutes: gpu-1 queues from the fifth on, spans of model qwen-7b know cached tokens."""
    chance = random.Random(7)
    rows = []
    for i in range(n):
        at_s = i * 540 / n
        hot = i % 2 == 1 and at_s > 240
        prompt = chance.choice([60, 300, 1500, 5000])
        model = "qwen-7b" if i % 4 == 0 else "llama-8b"
        request = make_request(
            at_s=at_s,
            queue_s=(at_s - 200) / 50 if hot else 0.01,
            prefill_s=prompt / 6000,
            decode_s=chance.uniform(0.5, 3),
            output_tokens=chance.choice([20, 100, 300]),
            input_tokens=prompt,
            cached_tokens=prompt // 2 if model == "qwen-7b" else None,
            model=model,
            instance=f"gpu-{i % 2}",
            route=chance.choice(["/chat", "/rag"]),
            concurrency_at_arrival=chance.choice([3, 12, 40]),
        )
        rows.append(attributed(request))
    return rows


def samples() -> list[EngineSample]:
    """A scrape of both engines every 5 s, with a silent minute between 100 and 160 s."""
    found = []
    for name in ("gpu-0", "gpu-1"):
        for at_s in range(0, 540, 5):
            hot = name == "gpu-1" and at_s > 240
            if 100 < at_s < 160:
                continue
            found.append(
                make_sample(
                    instance=f"{name}:8000", at_s=at_s, running=16.0 if hot else 3.0, waiting=float(at_s - 240) if hot else 0.0,
                    kv_usage_ratio=0.4, prefix_queries_tokens=at_s * 100.0, prefix_hits_tokens=at_s * 25.0,
                )
            )  # fmt: skip
    return found


def fill(store: Store) -> None:
    instances = [make_instance(instance=f"gpu-{i}:8000", joined_to=f"gpu-{i}") for i in range(2)]
    instances += [make_instance(instance=f"gpu-{i}", kind="spans", joined_to=None) for i in range(2)]
    mark = Annotation(unix_ns=START_UNIX_NS + 230 * SECOND_NS, kind="deploy", text="<b>router 1.8</b>")
    with store.write() as transaction:
        transaction.insert("requests", request_table(traffic()))
        transaction.insert("engine_samples", record_table(EngineSample, samples()))
        transaction.insert("instances", record_table(Instance, instances))
        transaction.insert("annotations", record_table(Annotation, [mark]))


def make_served(
    data: Path,
    rulebook: Rulebook,
    *,
    filled: bool = True,
    clock: Callable[[], int] = lambda: NOW_UNIX_NS,
    posture: Posture | None = None,
) -> Served:
    """An application over its own directory: filled or empty, at a fixed time unless told otherwise. It asks for no keys, but has
    the door that would."""
    data.mkdir(exist_ok=posture is not None)
    posture = posture or Posture(Door(data, "test", clock=clock), "127.0.0.1")
    store = Store(data / "phasewise.duckdb")
    writer = Writer(store, data, rulebook, attributor(rulebook), clock=clock)
    if filled:
        fill(store)
    info = {"host": "127.0.0.1", "otlp_grpc_port": 4317, "otlp_http_port": 4318}
    app = create_app(store, writer, rulebook, data_dir=data, clock=clock, serve_info=info, posture=posture)
    attach_dash(app, store, rulebook=rulebook, data_dir=data, clock=clock)
    return Served(app, store, writer, Client(app))
