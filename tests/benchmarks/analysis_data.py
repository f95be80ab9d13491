"""A store as a server leaves it after a day: attributed requests, the recent ones hot and those before in the files of sealed hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from phasewise.collector.cold import enter_files, make_views, placed_file
from phasewise.collector.lake import HOUR_NS, Lake
from phasewise.collector.records import EngineSample, Instance, Request, arrow_schema
from phasewise.collector.schemas import polars_schema
from phasewise.collector.store import Store
from phasewise.rules.vocabulary import CAUSE_COLUMNS, cause_column

HOURS = 24
HOT_HOURS = 2  # the newest, which nothing has sealed yet
INSTANCES = 8
SCRAPE_EVERY_NS = 15 * 10**9
LAST_END_NS = 120 * 10**9  # before the end of an hour: whatever ends in it began in it
_SLICE_ROWS = 50_000  # as sealing writes them
_MODELS = ("llama-8b", "llama-70b", "qwen-32b", "mistral-7b")
_PREFILL_TOKENS_PER_S = np.array([12_000.0, 2_500.0, 4_500.0, 14_000.0])
_TOKEN_S = np.array([0.011, 0.038, 0.024, 0.01])
_VERSIONS = ("0.11.0", "0.11.2", "0.12.0")
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_TENANTS = 40
_PROVENANCE = '{"queue_s":"measured:span","prefill_s":"measured:span","decode_s":"measured:span"}'


@dataclass(frozen=True, slots=True)
class Day:
    """So many requests that ended within the 24 hours before a whole hour."""

    requests: int
    end_unix_ns: int

    @property
    def start_unix_ns(self) -> int:
        return self.end_unix_ns - HOURS * HOUR_NS

    def count(self, hour: int) -> int:
        """Requests of an hour of the day: three times as many at its height as at night."""
        load = np.cumsum(1.0 - 0.5 * np.cos(np.arange(HOURS) * 2 * np.pi / HOURS))
        edges = np.rint(np.concatenate(([0.0], load / load[-1])) * self.requests).astype(int)
        return int(edges[hour + 1] - edges[hour])


def fill(data: Path, day: Day) -> None:
    """A store at `data` with that day, its scrapes and its engines."""
    with Store(data / "phasewise.duckdb", memory_limit="2GB") as store:
        lake = Lake(store.cold_directory)
        placed = []
        for hour in range(HOURS):
            start = day.start_unix_ns + hour * HOUR_NS
            if hour >= HOURS - HOT_HOURS:
                for part in _parts(day, hour):
                    with store.write() as transaction:
                        transaction.insert("requests", part)
                with store.write() as transaction:
                    transaction.insert("engine_samples", _samples(start))
                store.checkpoint()
                continue
            number = start // HOUR_NS
            requests = (batch for part in _parts(day, hour) for batch in _batches(part, Request))
            lake.write_hour("requests", number, 1, arrow_schema(Request), requests)
            lake.write_hour(
                "engine_samples", number, 1, arrow_schema(EngineSample), _batches(_samples(start), EngineSample)
            )
        for kind in ("requests", "engine_samples"):
            for number, paths in lake.files(kind).items():
                placed += [placed_file(lake.directory, kind, number, path) for path in paths]
        with store.write() as transaction:
            transaction.insert("instances", _instances(day))
            enter_files(transaction, placed)
            for number in sorted({one.hour for one in placed}):
                transaction.execute(
                    "INSERT INTO sealed_hours BY NAME SELECT ? AS hour, 1 AS generation, 'sealed' AS state, ? AS sealed_unix_ns, "
                    "? AS received_unix_ns, ? AS rows",
                    [
                        number,
                        (number + 2) * HOUR_NS,
                        (number + 1) * HOUR_NS,
                        sum(one.rows for one in placed if one.hour == number),
                    ],
                )
            make_views(transaction, store.cold_files)
        store.checkpoint()


def _batches(rows: pl.DataFrame, record: type) -> Iterator[pa.RecordBatch]:
    yield from rows.to_arrow().cast(arrow_schema(record)).to_batches()


def _parts(day: Day, hour: int) -> Iterator[pl.DataFrame]:
    """The requests of an hour, some at a time, each part in the order that sealing gives it."""
    count = day.count(hour)
    parts = max(-(-count // _SLICE_ROWS), 1)
    edges = [count * part // parts for part in range(parts + 1)]
    width_ns = (HOUR_NS - LAST_END_NS) // parts
    for part in range(parts):
        chance = np.random.default_rng([7, hour, part])
        first = day.start_unix_ns + hour * HOUR_NS + LAST_END_NS + part * width_ns
        yield _rows(chance, edges[part + 1] - edges[part], first, width_ns, count / (HOUR_NS / 1e9))


def _rows(chance: np.random.Generator, count: int, first_unix_ns: int, width_ns: int, per_s: float) -> pl.DataFrame:
    model = chance.choice(4, count, p=[0.5, 0.15, 0.2, 0.15])
    tenant = np.minimum(chance.zipf(1.6, count), _TENANTS)
    instance = model * 2 + chance.integers(0, 2, count)
    prompt = np.clip(chance.lognormal(6.3, 1.2, count), 1, 60_000).astype(np.int64)
    made = np.clip(chance.lognormal(5.0, 0.9, count), 1, 4_000).astype(np.int64)
    cached = np.where(chance.random(count) < 0.6, (prompt * chance.beta(0.8, 1.6, count)).astype(np.int64), 0)
    crowd = np.clip(chance.lognormal(2.0, 0.9, count), 0, 200).astype(np.int64)
    queue = np.where(crowd > 24, chance.exponential(0.8, count), chance.exponential(0.01, count)) * (crowd > 1)
    compute = (prompt - cached) / _PREFILL_TOKENS_PER_S[model]
    prefill = 0.004 + compute
    host = chance.exponential(0.006, count)
    weights = np.maximum(made - 1, 0) * _TOKEN_S[model]
    others = weights * 0.004 * crowd
    read = weights * (prompt + made / 2) / 100_000
    decode = weights + others + read
    ttft = queue + prefill + host
    e2e = ttft + decode
    too_long = np.maximum(e2e / (LAST_END_NS / 1e9 - 1.0), 1.0)
    queue, prefill, host, decode = (part / too_long for part in (queue, prefill, host, decode))
    weights, others, read, compute = (part / too_long for part in (weights, others, read, compute))
    ttft, e2e = queue + prefill + host, queue + prefill + host + decode
    end = first_unix_ns + np.sort(chance.integers(0, width_ns, count))
    arrival = end - np.rint(e2e * 1e9).astype(np.int64)
    scheduled = arrival + np.rint(queue * 1e9).astype(np.int64)
    first_token = arrival + np.rint(ttft * 1e9).astype(np.int64)
    causes = dict.fromkeys(CAUSE_COLUMNS, np.zeros(count))
    causes |= {
        cause_column("queue.slots"): queue * 0.8,
        cause_column("unexplained"): queue * 0.2 + (prefill - compute),
        cause_column("prefill.compute"): compute,
        cause_column("host"): host,
        cause_column("decode.weights"): weights,
        cause_column("decode.kv"): read,
        cause_column("interference"): others,
    }
    largest = np.argmax([queue, compute, weights + read], axis=0)
    told: dict[str, Any] = {
        "request_key": _digits(chance, count, 32),
        "trace_id": _digits(chance, count, 32),
        "span_id": _digits(chance, count, 16),
        "request_id": _digits(chance, count, 32),
        "engine": _constant("vllm_v1", count),
        "engine_version": _named(_VERSIONS, (instance + tenant) % 3),
        "service": _constant("chat", count),
        "instance": _named([f"gpu-{number}" for number in range(INSTANCES)], instance),
        "model": _named(_MODELS, model),
        "tenant": _named([*(f"tenant-{number}" for number in range(_TENANTS)), None], tenant),
        "route": _named(_ROUTES, chance.choice(3, count, p=[0.7, 0.2, 0.1])),
        "request_class": _named(("interactive", "offline"), (tenant % 5 == 0).astype(int)),
        "source": _constant("otlp", count),
        "input_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": made,
        "arrival_unix_ns": arrival,
        "finished_unix_ns": end,
        "received_unix_ns": end + 10**9,
        "queued_unix_ns": arrival,
        "scheduled_unix_ns": scheduled,
        "first_token_unix_ns": first_token,
        "e2e_s": (end - arrival) / 1e9,
        "ttft_s": (first_token - arrival) / 1e9,
        "queue_s": (scheduled - arrival) / 1e9,
        "context_s": np.zeros(count),
        "prefill_s": prefill,
        "first_token_s": host,
        "decode_s": decode,
        "tpot_s": pl.Series(np.where(made > 1, decode / np.maximum(made - 1, 1), np.nan)).fill_nan(None),
        "residual_s": np.zeros(count),
        "provenance": _constant(_PROVENANCE, count),
        "concurrency_at_arrival": crowd,
        "outcome": _named(("ok", "error", "refused", "aborted"), chance.choice(4, count, p=[0.98, 0.005, 0.01, 0.005])),
        "finish_reason": _named(("stop", "length"), chance.choice(2, count, p=[0.8, 0.2])),
        "primary_class": _named(("queueing", "compute", "bandwidth"), largest),
        "cause": _named(("queue.slots", "prefill.compute", "decode.weights"), largest),
        "margin_ratio": chance.random(count),
        "measured_s": e2e * 0.9,
        "clamped": np.zeros(count, dtype=bool),
        "rules_version": _constant("benchmark", count),
        "revision": np.ones(count, dtype=np.int64),
        "final": np.ones(count, dtype=bool),
        **causes,
    }
    schema = {name: kind for name, kind in polars_schema(Request).items() if name not in told}
    rows = pl.DataFrame(told).with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in schema.items())
    return rows.select(list(polars_schema(Request))).sort("request_key")


def _digits(chance: np.random.Generator, count: int, digits: int) -> pl.Series:
    """Hexadecimal texts of so many digits."""
    text = chance.bytes(count * digits // 2).hex().encode("ascii")
    ends = np.arange(count + 1, dtype=np.int32) * digits
    return pl.Series(pa.StringArray.from_buffers(count, pa.py_buffer(ends.tobytes()), pa.py_buffer(text)))


def _named(names: Any, index: Any) -> pl.Series:
    return pl.Series(list(names), dtype=pl.String).gather(pl.Series(np.asarray(index)).cast(pl.UInt32))


def _constant(text: str, count: int) -> pl.Series:
    return pl.repeat(text, count, dtype=pl.String, eager=True)


def _samples(hour_unix_ns: int) -> pl.DataFrame:
    """The scrapes of an hour."""
    at = np.arange(hour_unix_ns, hour_unix_ns + HOUR_NS, SCRAPE_EVERY_NS)
    chance = np.random.default_rng([11, hour_unix_ns // HOUR_NS])
    parts = [
        pl.DataFrame(
            _sample(f"gpu-{number}:8000", _MODELS[number // 2], at, chance), schema_overrides={"joined": pl.Boolean}
        )
        for number in range(INSTANCES)
    ]
    schema = polars_schema(EngineSample)
    rows = pl.concat(parts)
    rest = [pl.lit(None, dtype=kind).alias(name) for name, kind in schema.items() if name not in rows.columns]
    return rows.with_columns(rest).select(list(schema))


def _sample(name: str, model: str, at: Any, chance: np.random.Generator) -> Mapping[str, Any]:
    count = len(at)
    since = at / 1e9 - 1.7e9  # counters of an engine that has run for long
    return {
        "instance": _constant(name, count),
        "unix_ns": at,
        "engine": _constant("vllm_v1", count),
        "model": _constant(model, count),
        "source": _constant("scrape", count),
        "joined": np.ones(count, dtype=bool),
        "running": chance.integers(0, 24, count).astype(float),
        "waiting": chance.integers(0, 6, count).astype(float),
        "kv_usage_ratio": chance.random(count),
        "preemptions": np.floor(since * 0.01),
        "prefix_queries_tokens": np.floor(since * 900),
        "prefix_hits_tokens": np.floor(since * 300),
        "finished": np.floor(since),
    }


def _instances(day: Day) -> pl.DataFrame:
    made = [
        {
            "instance": name,
            "engine": "vllm_v1",
            "engine_version": "0.12.0",
            "model": _MODELS[number // 2],
            "kind": kind,
            "first_seen_unix_ns": day.start_unix_ns,
            "last_seen_unix_ns": day.end_unix_ns,
            "joined_to": f"gpu-{number}" if kind == "scrape" else None,
        }
        for number in range(INSTANCES)
        for kind, name in (("spans", f"gpu-{number}"), ("scrape", f"gpu-{number}:8000"))
    ]
    return pl.DataFrame(made, schema_overrides=polars_schema(Instance)).select(
        [name for name in polars_schema(Instance) if name in made[0]]
    )
