"""From a scene to a verdict: status, primary, cause, evidence, changes. Pure: the rules of architecture section 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from phasewise.analyzer.evidence import Evidence
from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.slow_set import SlowSet, objective_column
from phasewise.analyzer.statistics import floats, percentile
from phasewise.analyzer.sums import Sums
from phasewise.analyzer.window import Objective
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, CONTENTION

CONTENTION_RATIO = 0.25  # of the slow set's end-to-end time: from here on a deployment is slow
PHASES_RATIO = 0.4  # of requests with phase data: below, the status is unknown
LEAD_RATIO = 0.1  # of the seconds compared: a smaller lead decides nothing
# Causes that can lie in the phases an objective is about: a broken TTFT is not explained by decode.
_BEFORE_FIRST = ("queue.", "kv.wait", "kv.evicted", "kv.load", "prefill.", "interference", "context", "host", "cold_start",
                 "external", "client", "communication.", "unexplained")  # fmt: skip
_AFTER_FIRST = ("decode.", "interference", "kv.preempt", "host", "cold_start", "external", "client", "communication.",
                "unexplained")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The decided part of a verdict. affected: the slow set, or what was drawn of it; sums: of all of it; compared: seconds by class the
    choice was made from.

    seconds: all time of the affected requests that the objective is about, by cause; with a client's objective, also what
    passes between its boundary and the engine's.
    """

    status: str
    objective: Objective | None
    affected: pl.DataFrame
    sums: Sums
    over_limit: int | None
    primary: str
    cause: str | None
    compared: Mapping[str, float]
    margin_ratio: float | None
    contention_ratio: float | None
    phase_ratio: float | None
    live: bool
    reason: str
    seconds: Mapping[str, float]


def objective_seconds(sums: Sums, objective: Objective | None) -> Mapping[str, float]:
    """Booked seconds by cause in the phases an objective is about. Where steps tell what passed before a request's first token this
    is exact; of the other requests it is all seconds of the causes that can lie there."""
    if objective is None or objective.metric == "e2e":
        return sums.seconds
    coarse = sums.coarse_s if sums.stepped else sums.seconds
    found = {cause: seconds for cause, seconds in coarse.items() if _in_objective(cause, objective)}
    if not sums.stepped:
        return found
    first = dict(sums.first_s)
    if objective.metric not in ("ttft", "queue"):
        first = {cause: max(0.0, whole - first[cause]) for cause, whole in sums.stepped_s.items()}
        if objective_column(objective, sums.told["itl_p95_s"] > 0) == "tpot_s":  # time per token leaves tools out
            first["external"] = 0.0
    return {cause: found.get(cause, 0.0) + first[cause] for cause in CAUSES if cause in found or first[cause] > 0}


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole; nothing where there is no time."""
    total = sum(seconds.values())
    return {cause: value / total for cause, value in seconds.items() if value > 0} if total > 0 else {}


def decide(slow: SlowSet, sums: Sums, flight: InFlight) -> Finding:
    """Status, primary and cause, before evidence is weighed (see `weighed`). sums: of all requests that `slow` was chosen from."""
    objective, breaks, count = slow.objective, slow.breaks, sums.count - sums.unattributed
    phase_ratio = sums.with_phases / count if count else None
    judged = objective if breaks else None
    seconds = objective_seconds(slow.sums, judged)
    contention = {cause: seconds[cause] for cause in seconds if cause in CONTENTION}
    if _in_objective("queue.slots", judged):
        contention["unexplained"] = slow.sums.unexplained_wait_s
    outside: Mapping[str, float] = {}
    if judged is None or judged.boundary == "client":
        outside = slow.sums.outside_s(judged.metric if judged else "e2e")
    beside = sum(outside.values())
    considered = _added(seconds, outside)
    total = sum(considered.values())
    ratio = sum(contention.values()) / total if total > 0 else None
    contended = ratio is not None and ratio >= CONTENTION_RATIO
    waiting = (flight.open > 0 or not count) and flight.contention_ratio >= CONTENTION_RATIO

    def finding(status: str, compared: Mapping[str, float], live: bool, reason: str) -> Finding:
        primary, cause, margin = _largest(compared)
        return Finding(
            status,
            objective,
            slow.rows,
            slow.sums,
            slow.over_limit,
            primary,
            cause,
            _by_class(compared),
            margin,
            ratio,
            phase_ratio,
            live,
            reason,
            considered,
        )

    blind = phase_ratio is None or phase_ratio < PHASES_RATIO
    if waiting and (blind or not (contended or breaks)):
        return finding("slow", flight.waiting_s, True, "requests in flight are waiting; spans come when they end")
    if blind:
        reason = "no requests" if phase_ratio is None else "too few requests carry phase data"
        return finding("unknown", {}, False, reason)
    if total > 0 and beside >= CONTENTION_RATIO * total and beside > sum(contention.values()):
        return finding(
            "slow", {**contention, **_added(outside, {})}, False, "time passes in front of or beside the engine"
        )
    if contended:
        unknown = contention.get("unexplained", 0.0) >= sum(contention.values()) / 2
        why = (
            "requests wait, and no engine metrics near tell what for"
            if unknown
            else "contention holds the affected requests"
        )
        return finding("slow", contention, False, why)
    if breaks:
        return finding("slow", considered, False, "an objective is broken without contention")
    return finding("healthy", sums.seconds, False, "no objective is broken and little time is spent waiting")


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {cause: one.get(cause, 0.0) + other.get(cause, 0.0) for cause in CAUSES if cause in one or cause in other}


def _in_objective(cause: str, objective: Objective | None) -> bool:
    """Whether a cause can lie in the phases an objective is about: decode does not break a TTFT, nor the queue a TPOT."""
    if objective is None:
        return True
    if objective.metric in ("ttft", "queue"):
        return cause.startswith(_BEFORE_FIRST)
    return objective.metric == "e2e" or cause.startswith(_AFTER_FIRST)


def _by_class(seconds: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys(CLASSES, 0.0)
    for cause, value in seconds.items():
        found[CLASS_OF_CAUSE[cause]] += value
    return found


def _largest(seconds: Mapping[str, float]) -> tuple[str, str | None, float | None]:
    """Class with most seconds, its largest cause, and its lead over the next class as a share of all seconds compared."""
    by_class = _by_class(seconds)
    total = sum(by_class.values())
    if total <= 0:
        return "inconclusive", None, None
    ordered = sorted(CLASSES, key=lambda name: (-by_class[name], CLASSES.index(name)))
    best = ordered[0]
    margin = (by_class[best] - by_class[ordered[1]]) / total
    if best == "inconclusive" or margin < LEAD_RATIO:
        return "inconclusive", None, margin
    inside = [cause for cause in CAUSES if CLASS_OF_CAUSE[cause] == best]
    return best, max(inside, key=lambda cause: seconds.get(cause, 0.0)), margin


def weighed(finding: Finding, evidence: Sequence[Evidence]) -> Finding:
    """The same with primary withheld where nothing speaks for it or two signals speak against it.

    A healthy deployment's class is what bounds it, not a fault: there the seconds themselves are the signal.
    """
    if finding.primary == "inconclusive" or finding.status != "slow":
        return finding
    supports = [one for one in evidence if finding.primary in one.supports]
    opposes = [one for one in evidence if finding.primary in one.opposes]
    kv_needs = 2 if finding.primary == "kv" else 1
    if len(supports) >= kv_needs and len(opposes) < 2:
        return finding
    why = "no signal speaks for it" if len(supports) < kv_needs else "two signals speak against it"
    reason = f"{finding.primary} holds most of the time, but {why}"
    return replace(finding, primary="inconclusive", cause=None, reason=reason)


def shape_matched(affected: pl.DataFrame, before: pl.DataFrame, column: str) -> tuple[float | None, bool]:
    """Median of `column` before, over requests of the same prompt and output length buckets (powers of two).

    Returns the median and whether every bucket of the affected requests was met by at least 5 earlier ones.
    """
    if before.is_empty() or affected.is_empty():
        return None, False

    def bucketed(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.with_columns(
            pl.col("input_tokens").cast(pl.Float64).log(2.0).floor().alias("in_bucket"),
            pl.col("output_tokens").cast(pl.Float64).log(2.0).floor().alias("out_bucket"),
        )

    earlier = bucketed(before)
    wanted = bucketed(affected).select("in_bucket", "out_bucket").unique()
    met = wanted.join(earlier, on=["in_bucket", "out_bucket"], how="left", nulls_equal=True)
    counts = met.group_by("in_bucket", "out_bucket").agg(pl.col("request_key").count().alias("n"))
    same = earlier.join(wanted, on=["in_bucket", "out_bucket"], how="semi", nulls_equal=True)
    matched = bool((counts["n"] >= 5).all())
    return percentile(floats(same if matched else earlier, column), 0.5).value, matched
