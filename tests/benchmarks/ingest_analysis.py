"""Whether senders notice an analysis: acknowledgements while the heaviest questions run over a million requests.

The store begins with the requests of the last hours in its hot database; upkeep may seal those of hours that are over meanwhile. The
questions take all of them and nothing that arrives now, so that the verdict can be held against what was stored.
"""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import Measured, measured
from builders import SECOND_NS, START_UNIX_NS, attributed, make_request, request_table

from phasewise.collector.records import Request as Row
from phasewise.collector.records import columns
from phasewise.collector.store import Store

HOURS = 4.0
_DRAWN = 10_000  # rows that are drawn; the others are copies of them at other times
_LONGEST_REQUEST_S = 120.0  # none drawn here takes as long: all have finished before the window ends
_DIMENSIONS = ("input", "output", "concurrency", "model")
_LONGEST_S = 1800.0
_RATE_SPANS_PER_S = 20_000.0
_LEAST_S = 6.0  # of questions: 200 acknowledgements and more, twice what a p99 wants
_WAIT_S = 120  # for one answer, as the command line asks
_SENDING_S = 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """Where the stored requests finished: from first to last, last not included."""

    first_unix_ns: int
    last_unix_ns: int

    @classmethod
    def before(cls, now_unix_ns: int, hours: float = HOURS) -> Window:
        return cls(now_unix_ns - round(hours * 3600 * SECOND_NS), now_unix_ns)


@dataclass(slots=True)
class Asked:
    """Answers of the API: seconds each took, by question; and in `failed` what was not answered, or not about all requests."""

    window: Window
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def ask(self, server: Measured, path: str, parameters: Sequence[tuple[str, object]] = ()) -> dict[str, Any]:
        """Empty where it was not answered."""
        asked = [("from", self.window.first_unix_ns), ("to", self.window.last_unix_ns), *parameters]
        address = f"{server.served.url}{path}?{urllib.parse.urlencode(asked)}"
        request = urllib.request.Request(address, headers={"Prefer": f"wait={_WAIT_S}"})
        started = time.monotonic()
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=_WAIT_S + 30
            ) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            body = error.read().decode("utf-8", "replace").strip() or "(no body)"
            self.failed.append(f"{path}: HTTP {error.code} {body.splitlines()[0][:500]}")
            return {}
        except (OSError, ValueError) as error:
            self.failed.append(f"{path}: {type(error).__name__}: {error}")
            return {}
        self.seconds.setdefault(path, []).append(time.monotonic() - started)
        return found


def during_analysis(data: Path, requests: int, drain_s: float) -> tuple[dict[str, Any], list[str]]:
    """Figures of one server that is asked about `requests` stored ones while spans arrive; and what was not answered, not sent or not
    kept, in sentences.

    `analysis_s` is one round of all questions, the longest where there were several, and None where one was not answered;
    `ack_p99_during_analysis_ms` is None where nothing was acknowledged.
    """
    window = Window.before(time.time_ns())
    fill(data, requests, window)
    with measured(data) as server:
        asked = Asked(window)
        load = Load(int(server.served.ready["otlp_grpc_port"]), _LONGEST_S, rate_spans_per_s=_RATE_SPANS_PER_S)
        generator = Generator(load)
        generator.wait_until_sending(_SENDING_S)
        rounds: list[float] = []
        started = time.monotonic()
        while not rounds or (time.monotonic() - started < _LEAST_S and not asked.failed):
            began = time.monotonic()
            _analyze(server, asked, requests)
            rounds.append(time.monotonic() - began)
        told = generator.stop()
        drained = server.until_settled(told["spans"], drain_s)
        missing = int(told["spans"]) - server.counted()
    failures = [f"not answered beside ingest: {failure}" for failure in asked.failed]
    failures += [f"not sent beside an analysis: {error}" for error in told["errors"]]
    if missing or drained is None:
        failures.append(
            f"beside an analysis {told['spans']:,} spans were acknowledged, and {missing:,} of them are not stored"
        )
    _tell(requests, rounds, told, asked)
    figures = {
        "analysis_requests": requests,
        "analysis_s": None if asked.failed else max(rounds),
        "ack_p99_during_analysis_ms": told["ack_p99_ms"],
    }
    return figures, failures


def _tell(requests: int, rounds: Sequence[float], told: dict[str, Any], asked: Asked) -> None:
    acks = "; ".join(
        f"{name} {'unknown' if value is None else f'{value:,.0f} ms'}"
        for name, value in (
            ("ack p50", told["ack_p50_ms"]),
            ("p99", told["ack_p99_ms"]),
            ("longest", told["ack_max_ms"]),
        )
    )
    print(
        f"beside an analysis of {requests:,} requests of {HOURS:g} hours, {len(rounds)} times, longest {max(rounds):.1f} s: "
        f"{told['spans'] / told['wall_s']:,.0f} spans a second, {acks} of {told['answers']:,}; refused {told['refused']}"
    )
    for path, seconds in asked.seconds.items():
        print(f"  {path}: {len(seconds)} answers, longest {max(seconds):.2f} s")


def _analyze(server: Measured, asked: Asked, requests: int) -> None:
    """One round of questions. An answer about fewer requests than were stored is a failure: it was no analysis of them."""
    verdict = asked.ask(server, "/api/v1/verdict")
    if verdict and verdict["requests"] != requests:
        asked.failed.append(f"/api/v1/verdict: is about {verdict['requests']:,} requests, {requests:,} were stored")
    asked.ask(server, "/api/v1/slices", [("by", name) for name in _DIMENSIONS])
    for name in _DIMENSIONS:
        asked.ask(server, "/api/v1/slices", [("by", name), ("metric", "tpot")])
    asked.ask(server, "/api/v1/differences")
    asked.ask(server, "/api/v1/timeline")


def fill(data: Path, requests: int, window: Window, drawn: int = _DRAWN) -> None:
    """A store with so many attributed requests of four replicas and two models, spread evenly over the window."""
    chance = random.Random(7)
    rows_n = min(drawn, requests)
    copies = -(-requests // rows_n)
    length_s = (window.last_unix_ns - window.first_unix_ns) / SECOND_NS - _LONGEST_REQUEST_S
    apart_s = length_s / copies
    rows = [_row(chance, number, chance.uniform(0, apart_s)) for number in range(rows_n)]
    moved_ns = window.first_unix_ns - START_UNIX_NS
    shifted = {
        name: f'"{name}" + {moved_ns} + copy * {round(apart_s * SECOND_NS)}'
        for name in columns(Row)
        if name.endswith("_unix_ns")
    }
    shifted["request_key"] = 'md5("request_key" || copy)'
    listed = ", ".join(f'{shifted.get(name, chr(34) + name + chr(34))} AS "{name}"' for name in columns(Row))
    with Store(data / "phasewise.duckdb") as store, store.write() as transaction:
        transaction.run(
            f"INSERT INTO requests BY NAME SELECT {listed} FROM drawn, range({copies}) AS copies(copy) LIMIT {requests}",
            drawn=request_table(rows),
        )


def _row(chance: random.Random, number: int, at_s: float) -> dict[str, object]:
    prompt = chance.choice([60, 300, 1500, 5000])
    request = make_request(
        at_s=at_s,
        queue_s=min(60.0, chance.expovariate(2.0)),
        prefill_s=prompt / 6000,
        decode_s=chance.uniform(0.5, 3),
        output_tokens=chance.choice([20, 100, 300]),
        input_tokens=prompt,
        model="qwen-7b" if number % 4 == 0 else "llama-8b",
        instance=f"gpu-{number % 4}",
        concurrency_at_arrival=chance.choice([3, 12, 40]),
    )
    return attributed(request)
