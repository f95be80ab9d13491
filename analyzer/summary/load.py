"""What happens as the load rises: throughput that stands still, waits that leap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, Tempting, computed, either
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, near, ratio
from phasewise.analyzer.summary.waiting import KERNEL_ADVICE, OVERLOAD, memory_is_short


def overload(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Load rises, throughput and time per token stand still, only the waiting grows: the service rate is reached."""
    for path in ("workload.concurrency", "workload.request_rate_per_s"):
        for view in (None, "server", "client"):
            found = _plateau(summary, machine, summary.series(path, view), path)
            if found is not None:
                yield found
                return


def _plateau(summary: Summary, machine: Machine, series: list[tuple[float, Point]], path: str) -> Hypothesis | None:
    known = [(load, point, point.throughput) for load, point in series]
    runs = [(load, point, done) for load, point, done in known if done]
    if len(runs) < 2:
        return None
    top_load, top, top_done = runs[-1]
    flat = [run for run in runs if near(run[2], top_done, 0.1)]
    start_load, start, _ = flat[0]
    if len(flat) < 2 or top_load < 1.35 * start_load:
        return None
    evidence: list[Evidence] = [
        computed("throughput", top_done, flat[0][2], "1/s", f"{start.place} to {top.place}", f"stands still while the load rises from {start_load:g} to {top_load:g}")
    ]  # fmt: skip
    strength = 0.5
    waits = [(load, point.typical_s("ttft")) for load, point, _ in flat if point.typical_s("ttft") is not None]
    if len(waits) >= 2 and (waits[-1][1] or 0) > 1.5 * (waits[0][1] or 0):
        strength = either(strength, 0.5)
        evidence.append(
            computed("ttft_s", waits[-1][1], waits[0][1], "s", f"{top.place}.ttft", "only the wait grows with the load")
        )
    paces = [pace for _, point, _ in flat if (pace := point.typical_s("tpot")) is not None]
    if len(paces) >= 2:
        if near(paces[0], paces[-1], 0.15):
            strength = either(strength, 0.5)
            evidence.append(
                computed("tpot_s", paces[-1], paces[0], "s", f"{top.place}.tpot", "the time per token does not change")
            )
        else:
            strength *= 0.5
            evidence.append(
                computed(
                    "tpot_s",
                    paces[-1],
                    paces[0],
                    "s",
                    f"{top.place}.tpot",
                    "the steps themselves get slower",
                    against=True,
                )
            )
    if memory_is_short(summary, machine):
        return None
    before = [run for run in runs if run[0] < start_load]
    abrupt = bool(before) and ratio(flat[0][2], before[-1][2]) is not None and near(
        flat[0][2] / start_load, before[-1][2] / before[-1][0], 0.2
    )  # fmt: skip
    if abrupt and path == "workload.concurrency":
        evidence.append(
            computed(
                "throughput_per_stream", flat[0][2] / start_load, before[-1][2] / before[-1][0], "1/s", start.place,
                f"rises in proportion up to {start_load:g} streams and then stops at once: a limit, not a resource that fills",
            )
        )  # fmt: skip
        return Hypothesis(
            cause="queue.slots",
            mechanism="hidden_slot_limit",
            strength=min(either(strength, 0.3), 0.85),
            sentence=f"Throughput stops dead at {start_load:g} streams: something admits no more than that.",
            evidence=tuple(evidence),
            techniques=("raise_max_num_seqs", "collect_missing_signals"),
            tempting=KERNEL_ADVICE,
            symptoms=frozenset({"compute", "external"}),
            phase="ttft",
        )
    return Hypothesis(
        cause="queue.capacity",
        mechanism="overload",
        strength=min(strength, 0.95),
        sentence="More is offered than the deployment serves; the rest waits.",
        evidence=tuple(evidence),
        techniques=OVERLOAD,
        tempting=(
            *KERNEL_ADVICE,
            Tempting("raise_prefill_chunk", "the work of one request did not change with the load"),
        ),
        symptoms=frozenset({"compute", "external"}),
        phase="ttft",
    )


def admission_jump(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Between two loads TTFT leaps while the time per token hardly changes: the batch has reached its limit, the rest waits."""
    if memory_is_short(summary, machine):
        return
    series = [(load, p) for load, p in summary.series("workload.concurrency") if p.typical_s("ttft")]
    here = summary.count("workload.concurrency")
    for (few, light), (many, heavy) in pairwise(series):
        before, after = light.typical_s("ttft"), heavy.typical_s("ttft")
        leap, more = ratio(after, before), many / few if few else None
        if (
            leap is None
            or more is None
            or more > 8
            or leap < 4
            or leap < 2.5 * more
            or (here is not None and here < many)
        ):
            continue
        pace = ratio(heavy.typical_s("tpot"), light.typical_s("tpot"))
        if pace is not None and pace > 1.7:
            continue
        strength = 0.5 if pace is None else 0.6 if pace > 1.35 else 0.7
        evidence = [
            computed(
                "ttft_leap",
                leap,
                more,
                "ratio",
                f"{light.place} to {heavy.place}",
                f"from {few:g} to {many:g} requests in flight, far more than the load grew",
            )
        ]
        if pace is not None:
            evidence.append(
                computed(
                    "tpot_growth",
                    pace,
                    more,
                    "ratio",
                    f"{light.place} to {heavy.place}",
                    "the batch that runs hardly grew",
                )
            )
        waited = ratio((after or 0.0) - (before or 0.0), _whole(heavy))
        if waited is not None and waited < 0.25:
            strength *= waited / 0.25
            evidence.append(
                computed(
                    "waited_share",
                    waited,
                    0.25,
                    "ratio",
                    heavy.place,
                    "but little of the request is waiting",
                    against=True,
                )
            )
        tokens = summary.sequence_tokens
        pool = machine.pool_estimate_tokens(summary.count("engine.gpu_memory_utilization"))
        short = pool is not None and tokens is not None and pool < 0.8 * many * tokens
        if short:
            evidence.append(
                computed(
                    "kv_pool_estimate",
                    pool,
                    many * (tokens or 0.0),
                    "tokens",
                    "memory less weights / KV bytes of a token",
                    "by estimate the pool does not hold that many sequences",
                )
            )
        yield Hypothesis(
            cause="kv.wait" if short else "queue.slots",
            mechanism="admission_jump",
            strength=strength,
            sentence=f"From {many:g} requests in flight on, some wait to be admitted while the others decode as before.",
            evidence=tuple(evidence),
            techniques=("admission_control", "kv_cache_quantization", "add_gpu_memory")
            if short
            else ("raise_max_num_seqs", "admission_control", "add_replicas"),
            tempting=KERNEL_ADVICE[:2] if short else KERNEL_ADVICE,
            symptoms=frozenset({"compute", "bandwidth", *(("queueing",) if short else ())}),
            share=waited,
            phase="e2e",
        )
        return


def _whole(point: Point) -> float | None:
    given_s, ttft, pace = point.typical_s("e2e"), point.typical_s("ttft"), point.typical_s("tpot")
    if given_s is not None or ttft is None or pace is None:
        return given_s
    return ttft + max((point.output_tokens or 1.0) - 1, 0.0) * pace
