"""Whether senders notice an analysis: acknowledgements while the heaviest questions run over a million requests."""

from __future__ import annotations

import random
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import Measured, measured
from builders import SECOND_NS, attributed, make_request, request_table

from phasewise.collector.records import Request as Row
from phasewise.collector.records import columns
from phasewise.collector.store import Store

_DRAWN = 10_000  # rows that are drawn; the others are copies of them at other times
_COPIES_APART_S = 600
_EVERYTHING = (("from", "0"), ("to", str(4_102_444_800 * SECOND_NS)))
_DIMENSIONS = ("input", "output", "concurrency", "model")
_LONGEST_S = 1800.0
_PAUSE_S = 0.8  # of each connection between two bodies: 32 of them send 20,000 spans a second


@dataclass(slots=True)
class Asked:
    """Answers of the API: seconds each took, by question, and what was not answered."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def ask(self, server: Measured, path: str, parameters: Sequence[tuple[str, object]]) -> None:
        started = time.monotonic()
        try:
            server.served.get(path, [*_EVERYTHING, *parameters])
        except urllib.error.HTTPError as error:
            self.failed.append(f"{path}: {error.code} {error.read()[:200]!r}")
        except OSError as error:
            self.failed.append(f"{path}: {error}")
        else:
            self.seconds.setdefault(path, []).append(time.monotonic() - started)


def during_analysis(data: Path, requests: int) -> dict[str, Any]:
    """Figures for the last line: analysis_requests, analysis_s (one verdict and its slices), ack_p99_during_analysis_ms."""
    fill(data, requests)
    with measured(data) as server:
        asked = Asked()
        generator = Generator(Load(int(server.served.ready["otlp_grpc_port"]), _LONGEST_S, pause_s=_PAUSE_S))
        started = time.monotonic()
        _analyze(server, asked)
        analysis_s = time.monotonic() - started
        told = generator.stop()
    print(
        f"beside an analysis of {requests:,} requests, {analysis_s:.1f} s: {told['spans'] / told['wall_s']:,.0f} spans a second, "
        f"ack p50 {told['ack_p50_ms']:.0f} ms, p99 {told['ack_p99_ms']:.0f} ms, longest {told['ack_max_ms']:.0f} ms"
    )
    for path, seconds in asked.seconds.items():
        print(f"  {path}: {len(seconds)} answers, longest {max(seconds):.2f} s")
    for failure in asked.failed:
        print(f"  NOT ANSWERED {failure}")
    return {
        "analysis_requests": requests,
        "analysis_s": analysis_s,
        "analysis_finished": not asked.failed,
        "ack_p99_during_analysis_ms": told["ack_p99_ms"],
    }


def _analyze(server: Measured, asked: Asked) -> None:
    asked.ask(server, "/api/v1/verdict", [])
    asked.ask(server, "/api/v1/slices", [("by", name) for name in _DIMENSIONS])
    for name in _DIMENSIONS:
        asked.ask(server, "/api/v1/slices", [("by", name), ("metric", "tpot")])
    asked.ask(server, "/api/v1/differences", [])


def fill(data: Path, requests: int, drawn: int = _DRAWN) -> None:
    """A store with so many attributed requests of four replicas and two models."""
    chance = random.Random(7)
    rows = [_row(chance, number) for number in range(min(drawn, requests))]
    copies = -(-requests // len(rows))
    shifted = {
        name: f'"{name}" + copy * {_COPIES_APART_S * SECOND_NS}' for name in columns(Row) if name.endswith("_unix_ns")
    }
    shifted["request_key"] = 'md5("request_key" || copy)'
    listed = ", ".join(f'{shifted.get(name, chr(34) + name + chr(34))} AS "{name}"' for name in columns(Row))
    with Store(data / "phasewise.duckdb") as store, store.write() as transaction:
        transaction.run(
            f"INSERT INTO requests BY NAME SELECT {listed} FROM drawn, range({copies}) AS copies(copy) LIMIT {requests}",
            drawn=request_table(rows),
        )


def _row(chance: random.Random, number: int) -> dict[str, object]:
    prompt = chance.choice([60, 300, 1500, 5000])
    request = make_request(
        at_s=chance.uniform(0, _COPIES_APART_S),
        queue_s=chance.expovariate(2.0),
        prefill_s=prompt / 6000,
        decode_s=chance.uniform(0.5, 3),
        output_tokens=chance.choice([20, 100, 300]),
        input_tokens=prompt,
        model="qwen-7b" if number % 4 == 0 else "llama-8b",
        instance=f"gpu-{number % 4}",
        concurrency_at_arrival=chance.choice([3, 12, 40]),
    )
    return attributed(request)
