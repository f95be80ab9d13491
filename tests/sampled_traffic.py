"""Traffic with known truth: every request of an engine, its counters and histograms as scraped, and spans thinned in some way."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Callable, Sequence

from builders import START_UNIX_NS, make_request, make_sample

from phasewise.collector.records import EngineSample, Request

EDGES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, math.inf)
SECOND_NS = 10**9


def population(count: int = 2000, seed: int = 1, instance: str = "gpu-0", over_s: float = 600.0) -> list[Request]:
    """Requests that arrive at random over a time; decode times are log-normal around 1.5 s, slow ones wait in the queue too."""
    chance = random.Random(seed)
    rows = []
    for at_s in sorted(chance.uniform(0, over_s) for _ in range(count)):
        decode_s = chance.lognormvariate(0.4, 0.7)
        queue_s = 2.0 * decode_s if decode_s > 4 else 0.01
        rows.append(make_request(at_s=at_s, decode_s=decode_s, queue_s=queue_s, instance=instance, engine="vllm_v1"))
    return rows


def scrapes(
    rows: Sequence[Request],
    *,
    every_s: float = 5.0,
    until_s: float = 660.0,
    restart_s: float | None = None,
    answered: int | None = None,
    **fields: object,
) -> list[EngineSample]:
    """What a scrape of the engine shows; a restart begins its counters again. answered: of HTTP answers, all there were."""
    ends = sorted((row.finished_unix_ns, row.e2e_s or 0.0) for row in rows)
    found: list[EngineSample] = []
    latencies: list[float] = []
    place, began_again = 0, False
    for k in range(int(until_s / every_s) + 1):
        now = START_UNIX_NS + round(k * every_s * SECOND_NS)
        if restart_s is not None and k * every_s >= restart_s and not began_again:
            latencies, began_again = [], True
            place = bisect.bisect_left(ends, (START_UNIX_NS + round(restart_s * SECOND_NS), 0.0))
        while place < len(ends) and ends[place][0] <= now:
            bisect.insort(latencies, ends[place][1])
            place += 1
        shape = {
            "le": ["+Inf" if edge == math.inf else edge for edge in EDGES],
            "count": [bisect.bisect_right(latencies, edge) for edge in EDGES],
        }
        made = make_sample(
            at_s=k * every_s,
            finished=float(len(latencies)),
            aborted=0.0,
            e2e_count=float(len(latencies)),
            e2e_sum_s=sum(latencies),
            histograms=json.dumps({"e2e": shape}),
            answered=None if answered is None else float(len(latencies)) * answered / len(rows),
            **{"instance": "gpu-0:8000", "engine": "vllm_v1", **fields},
        )
        found.append(made)
    return found


def kept(rows: Sequence[Request], keep: Callable[[Request, random.Random], bool], seed: int = 2) -> list[Request]:
    chance = random.Random(seed)
    return [row for row in rows if keep(row, chance)]


def head(ratio: float) -> Callable[[Request, random.Random], bool]:
    return lambda _row, chance: chance.random() < ratio


def tail(rows: Sequence[Request], slowest_ratio: float, rest_ratio: float) -> Callable[[Request, random.Random], bool]:
    """All of the slowest, some of the rest: what tail sampling by latency sends."""
    latencies = sorted(row.e2e_s or 0.0 for row in rows)
    limit = latencies[int(len(rows) * (1 - slowest_ratio))]
    return lambda row, chance: (row.e2e_s or 0.0) >= limit or chance.random() < rest_ratio
