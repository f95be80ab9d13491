"""A window of more requests than a verdict reads, small enough for a test: what differs in real ones differs here too."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
from builders import START_UNIX_NS, attributed, make_instance, make_request, make_sample, record_table

from phasewise.analyzer.window import Window
from phasewise.collector.records import EngineSample, Instance, Request
from phasewise.collector.schemas import polars_schema
from phasewise.collector.store import Store

SECOND_NS = 10**9
WINDOW = Window(START_UNIX_NS + 1200 * SECOND_NS, START_UNIX_NS + 3600 * SECOND_NS)
NOW_UNIX_NS = START_UNIX_NS + 8 * 3600 * SECOND_NS
# Figures that rest on every request of a window; all others may rest on a draw.
EXACT = (
    "status objective window requests refused aborted open provisional unattributed affected primary cause shares affected_shares"
    " explained_ratio contention_ratio phase_shares examples stage recorded"
).split()
EXACT_SIGNALS = (
    "requests_count replicas_count concurrency_mean arrival_rate_per_s tenants_count top_tenant_ratio classes_count offline_ratio"
    " running_mean waiting_mean slots_limit_count preemptions_count preemptions_per_request kv_pool_tokens prefix_hit_ratio"
    " queue_ratio prefill_ratio decode_ratio interference_ratio contention_ratio"
).split()


def rows(count: int, seed: int = 5) -> list[dict[str, object]]:
    """Requests that end within the hour from START_UNIX_NS on: four engines, one of which tells its steps; some refused, some not yet
    attributed, some with a client's own figures."""
    chance = random.Random(seed)
    return [_row(chance, number, number * 3500 / count) for number in range(count)]


def _row(chance: random.Random, number: int, at_s: float) -> dict[str, object]:
    engine, prompt = number % 4, chance.choice([60, 300, 1500, 5000])
    queue_s = chance.expovariate(1.0) if chance.random() < 0.3 else 0.01
    decode_s = chance.lognormvariate(0.2, 0.6)
    others_s = min(decode_s / 2, chance.expovariate(3.0))
    request = make_request(
        at_s=at_s,
        queue_s=queue_s,
        prefill_s=prompt / 6000,
        decode_s=decode_s,
        input_tokens=prompt,
        cached_tokens=prompt // 2 if engine == 1 else None,
        output_tokens=chance.choice([20, 100, 300]),
        instance=f"gpu-{engine}",
        engine="phasewise" if engine == 3 else "vllm_v1",
        tenant=chance.choice(["a", "b", "b", None]),
        request_class=chance.choice(["interactive", "offline"]),
        dataset="morning" if engine == 2 else None,
        preemptions=chance.choice([0, 0, 1]) if engine == 1 else None,
        outcome=chance.choices(["ok", "refused", "aborted"], [97, 2, 1])[0],
        request_key=hashlib.blake2b(b"%d" % number, digest_size=16).hexdigest(),
    )
    e2e_s = request.e2e_s or 0.0
    row = attributed(
        request,
        {
            "queue.slots": 0.7 * queue_s,
            "unexplained": 0.3 * queue_s + 0.01,
            "prefill.compute": prompt / 6000,
            "interference": others_s,
            "decode.weights": decode_s - others_s,
        },
    )
    row |= {"measured_s": 0.8 * e2e_s, "final": number % 50 != 0, "clamped": number % 97 == 0, "decode_batch_mean": 4.0}
    if engine == 0:
        row |= {"entry_side": "client", "entry_e2e_s": e2e_s + 0.2, "entry_ttft_s": (request.ttft_s or 0.0) + 0.05}
    elif engine == 2:
        row |= {"entry_side": "server", "entry_e2e_s": e2e_s + 0.1, "entry_before_s": 0.04}
        row["entry_ttft_s"] = (request.ttft_s or 0.0) + 0.3
    if engine == 3:
        row["first_causes"] = json.dumps({"queue.slots": queue_s, "prefill.compute": prompt / 6000})
    if number % 61 == 0:
        row["e2e_s"] = None  # its end is known and its beginning is another clock's
    if number % 211 == 0:
        row |= {name: None for name in row if name.startswith("cause_")}
        row |= {"revision": None, "cause": None, "primary_class": None, "first_causes": None}
    return row


def fill(store: Store, made: Sequence[Mapping[str, object]], samples: Sequence[EngineSample] = ()) -> None:
    taken = list(samples) or [
        make_sample(instance=f"gpu-{engine}", at_s=at_s, engine="vllm_v1", running=4.0, waiting=float(at_s % 3))
        for engine in range(3)
        for at_s in range(0, 3600, 60)
    ]
    instances = [
        make_instance(instance=f"gpu-{engine}", kind=kind, joined_to=f"gpu-{engine}" if kind == "scrape" else None)
        for engine in range(4)
        for kind in ("spans", "scrape")
    ]
    with store.write() as transaction:
        transaction.insert("requests", pl.DataFrame(made, schema=polars_schema(Request), orient="row"))
        transaction.insert("engine_samples", record_table(EngineSample, taken))
        transaction.insert("instances", record_table(Instance, instances))


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two figures differ by more than what rounding to six digits makes of one and the same number."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}, key=str):
            yield from differences(one.get(name), other.get(name), f"{path}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, theirs, f"{path}[{place}]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > 2e-6 * max(abs(one), abs(other), 0.5):
            yield f"{path}: {one} {other}"
    elif one != other:
        yield f"{path}: {one} {other}"


def exact(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a verdict that rests on every request."""
    signals = {name: verdict["signals"].get(name) for name in EXACT_SIGNALS}
    return {name: verdict[name] for name in EXACT} | {
        "signals": signals,
        "sampling": verdict["provenance"]["sampling"],
        "coverage": verdict["provenance"]["coverage"],
    }
