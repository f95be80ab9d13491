"""Observations that speak for or against a class of causes, each with its number and the number it is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.queueing import KV_FULL_RATIO, KV_HIGH_RATIO, PLATEAU_RATIO
from phasewise.analyzer.signals import Value
from phasewise.analyzer.statistics import rounded
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

SPAN, ENGINE = "request spans", "engine metrics"
OTHERS = "others' prefill inside these requests, share of their end-to-end time"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One row of the card. supports, opposes: classes it speaks for and against; side: where it was seen."""

    name: str
    observed: float | str | None
    expected: str
    unit: str
    side: str
    supports: tuple[str, ...] = ()
    opposes: tuple[str, ...] = ()
    status: str = "measured"

    def row(self, primary: str) -> dict[str, object]:
        """The verdict's evidence entry, seen from the class that was chosen."""
        value = rounded(self.observed) if isinstance(self.observed, float) else self.observed
        says = "for" if primary in self.supports else "against" if primary in self.opposes else "context"
        about = primary
        if says == "context" and self.opposes:
            says, about = "against", self.opposes[0]
        elif says == "context" and self.supports:
            says, about = "for", self.supports[0]
        return {
            "name": self.name,
            "observed": value,
            "expected": self.expected,
            "unit": self.unit,
            "source": self.side,
            "status": self.status,
            "says": says,
            "about": about,
            "for": list(self.supports),
            "against": list(self.opposes),
        }


def _number(signals: Mapping[str, Value], name: str) -> float | None:
    value = signals.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def gather(
    signals: Mapping[str, Value], shares: Mapping[str, float], flight: InFlight, *, stated: bool = False
) -> list[Evidence]:
    """All observations the window allows. shares: of the affected requests' seconds the objective is about, by cause; stated: the
    engine itself tells what its requests waited for, so that shares of waiting are observations, not conclusions."""
    found = [
        *_waiting(signals, shares),
        *(_stated(shares) if stated else ()),
        *_memory(signals, shares),
        *_flight(flight),
    ]
    return [*found, *_compute(signals, shares), *_decode(signals, shares), *_others(shares)]


def _waiting(signals: Mapping[str, Value], shares: Mapping[str, float]) -> list[Evidence]:
    found = []
    queue = _number(signals, "queue_ratio")
    if queue is not None:
        found.append(
            Evidence(
                "queue time, share of affected end-to-end time", queue, "under 10 % without contention", "ratio", SPAN,
                ("queueing", "kv") if queue >= 0.1 else (), ("queueing",) if queue < 0.05 else (),
            )
        )  # fmt: skip
    waiting, full = _number(signals, "waiting_mean"), _number(signals, "slots_full_ratio")
    if waiting is not None:
        found.append(
            Evidence(
                "waiting requests, mean over samples", waiting, "0 while the engine keeps up", "requests", ENGINE,
                ("queueing", "kv") if waiting >= 0.5 else (), ("queueing", "kv") if waiting < 0.1 else (),
            )
        )  # fmt: skip
    limit = _number(signals, "slots_limit_count")
    if full is not None and waiting is not None and waiting >= 0.1:
        at = f" of {limit:g}" if limit is not None else ""
        found.append(
            Evidence(
                f"running at the slot limit{at} while requests wait, share of that time", full,
                f"at least {PLATEAU_RATIO * 100:g} % where slots are the limit", "ratio", ENGINE,
                ("queueing",) if full >= PLATEAU_RATIO else (), (),
            )
        )  # fmt: skip
    return found


def _stated(shares: Mapping[str, float]) -> list[Evidence]:
    """The engine's own reasons; they outweigh a queue that is short beside a long answer."""
    found = []
    for name, label in (("queueing", "slots, budget, window or policy"), ("kv", "KV blocks, or lost to preemption")):
        share = sum(value for cause, value in shares.items() if CLASS_OF_CAUSE[cause] == name)
        supports = (name,) if share >= 0.1 else ()
        found.append(
            Evidence(
                f"waits for {label} as the engine states them, share of the time judged", share, "under 10 %", "ratio",
                SPAN, supports, (name,) if share < 0.02 else (),
            )
        )  # fmt: skip
    return found


def _memory(signals: Mapping[str, Value], shares: Mapping[str, float]) -> list[Evidence]:
    found = []
    usage, preempted = _number(signals, "kv_usage_p95_ratio"), _number(signals, "preemptions_count")
    if usage is not None:
        found.append(
            Evidence(
                "KV cache in use, p95", usage, f"under {KV_HIGH_RATIO * 100:g} % where KV is not the limit", "ratio", ENGINE,
                ("kv",) if usage >= KV_FULL_RATIO else (), ("kv",) if usage < KV_HIGH_RATIO else (),
            )
        )  # fmt: skip
    if preempted is not None:
        found.append(
            Evidence(
                "preemptions", preempted, "0", "count", ENGINE,
                ("kv",) if preempted > 0 else (), ("kv",) if preempted == 0 and (usage or 0) < KV_FULL_RATIO else (),
            )
        )  # fmt: skip
    pool, need = _number(signals, "kv_pool_tokens"), _number(signals, "kv_need_tokens")
    if pool is not None and need is not None:
        found.append(
            Evidence(
                "KV tokens the requests in flight would fill, peak", need, f"pool holds {pool:,.0f}", "tokens", SPAN,
                ("kv",) if need > pool else (), ("kv",) if need < KV_HIGH_RATIO * pool else (), "inferred",
            )
        )  # fmt: skip
    full = _number(signals, "slots_full_ratio")
    if usage is not None and usage >= KV_HIGH_RATIO and full is not None and full < PLATEAU_RATIO:
        found.append(
            Evidence(
                "slots free while requests wait, share of that time", 1.0 - full, "0 % where slots are the limit", "ratio",
                ENGINE, ("kv",), ("queueing",),
            )
        )  # fmt: skip
    return found


def _flight(flight: InFlight) -> list[Evidence]:
    if not flight.open or flight.total_s <= 0:
        return []
    ratio = flight.contention_ratio
    return [
        Evidence(
            "in-flight: waiting share of request-seconds", ratio, "under 25 %", "ratio",
            ENGINE, tuple(sorted({"kv" if c.startswith("kv") else "queueing" for c in flight.waiting_s})) if ratio >= 0.25 else (),
        )
    ]  # fmt: skip


def _compute(signals: Mapping[str, Value], shares: Mapping[str, float]) -> list[Evidence]:
    found = []
    others, own = shares.get("interference", 0.0), shares.get("prefill.compute", 0.0)
    if "prefill_ratio" in signals and signals["prefill_ratio"] is not None:
        found.append(
            Evidence(
                "own prefill, share of affected end-to-end time", own, "follows prompt length", "ratio", SPAN,
                ("compute",) if own >= 0.1 else (), ("compute",) if own + others < 0.05 else (),
            )
        )  # fmt: skip
        found.append(
            Evidence(
                OTHERS, others, "under 10 %", "ratio", SPAN,
                ("compute",) if others >= 0.1 else (), (), "inferred",
            )
        )  # fmt: skip
    rate = _number(signals, "prefill_rate_tok_per_s")
    if rate is not None:
        found.append(Evidence("prefill speed, median", rate, "the same as in quiet times", "tokens/s", SPAN))
    return found


def _decode(signals: Mapping[str, Value], shares: Mapping[str, float]) -> list[Evidence]:
    found = []
    reading = shares.get("decode.weights", 0.0) + shares.get("decode.kv", 0.0)
    tpot, bound = _number(signals, "tpot_p50_s"), signals.get("decode_bound")
    if tpot is not None:
        found.append(
            Evidence(
                "steady decoding, share of affected end-to-end time", reading, "the rest, when nothing is in the way", "ratio",
                SPAN, ("bandwidth",) if reading >= 0.4 else (), ("bandwidth",) if reading < 0.1 else (), "inferred",
            )
        )  # fmt: skip
    if isinstance(bound, str):
        batch = _number(signals, "decode_batch_mean")
        found.append(
            Evidence(
                f"decode step by roofline at a mean batch of {batch:.3g}" if batch else "decode step by roofline", bound,
                "bandwidth below the ridge", "", "roofline",
                ("bandwidth",) if bound == "bandwidth" else ("compute",) if bound == "compute" else (),
                ("bandwidth",) if bound == "compute" else (), "inferred",
            )
        )  # fmt: skip
    return found


def _others(shares: Mapping[str, float]) -> list[Evidence]:
    if not shares:
        return []
    host = shares.get("host", 0.0) + shares.get("host.scheduler", 0.0)
    found = [
        Evidence(
            "frontend and host, share of affected end-to-end time", host, "under 10 %", "ratio", SPAN,
            ("host",) if host >= 0.1 else (), ("host",) if host < 0.05 else (), "inferred",
        )
    ]  # fmt: skip
    for cause, limit in (
        ("context", 0.1),
        ("external", 0.1),
        ("client", 0.1),
        ("cold_start", 0.1),
        ("communication.node", 0.1),
    ):
        if shares.get(cause, 0.0) > 0:
            share = shares[cause]
            found.append(
                Evidence(
                    f"{cause}, share of affected end-to-end time", share, f"under {limit * 100:g} %", "ratio", SPAN,
                    (CLASS_OF_CAUSE[cause],) if share >= limit else (), (),
                )
            )  # fmt: skip
    return found
