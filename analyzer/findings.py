"""From a scene to a verdict: status, primary, cause, evidence, changes. Pure: the rules of architecture section 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from phasewise.analyzer.coverage import UNKNOWN, Sampling
from phasewise.analyzer.evidence import Evidence
from phasewise.analyzer.inflight import InFlight
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.outside import outside_s
from phasewise.analyzer.statistics import floats, percentile
from phasewise.analyzer.window import Objective
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, CONTENTION, cause_column

CONTENTION_RATIO = 0.25  # of the slow set's end-to-end time: from here on a deployment is slow
BROKEN_RATIO = 0.01  # of requests over a limit: from here on an objective is broken
PHASES_RATIO = 0.4  # of requests with phase data: below, the status is unknown
LEAD_RATIO = 0.1  # of the seconds compared: a smaller lead decides nothing
SLOW_SET_MIN = 3
OBJECTIVE_COLUMNS = {
    ("ttft", "engine"): "ttft_s",
    ("tpot", "engine"): "tpot_s",
    ("itl", "engine"): "itl_p95_s",
    ("e2e", "engine"): "e2e_s",
    ("queue", "engine"): "queue_s",
    ("ttft", "client"): "entry_ttft_s",
    ("e2e", "client"): "entry_e2e_s",
    ("itl", "client"): "itl_p95_s",
    ("tpot", "client"): "tpot_s",
    ("queue", "client"): "queue_s",
}
# Causes that can lie in the phases an objective is about: a broken TTFT is not explained by decode.
_BEFORE_FIRST = ("queue.", "kv.wait", "kv.evicted", "kv.load", "prefill.", "interference", "context", "host", "cold_start",
                 "external", "client", "communication.", "unexplained")  # fmt: skip
_AFTER_FIRST = ("decode.", "interference", "kv.preempt", "host", "cold_start", "external", "client", "communication.",
                "unexplained")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The decided part of a verdict. affected: the slow set; compared: seconds by class the choice was made from.

    seconds: all time of the affected requests that the objective is about, by cause; with a client's objective, also what
    passes between its boundary and the engine's.
    """

    status: str
    objective: Objective | None
    affected: pl.DataFrame
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


def limited(rows: pl.DataFrame, objective: Objective) -> pl.DataFrame:
    """Rows that break an objective; a row without that figure breaks nothing."""
    return rows.filter(pl.col(_column(rows, objective)) > objective.limit_s)


def _column(rows: pl.DataFrame, objective: Objective) -> str:
    column = OBJECTIVE_COLUMNS[objective.metric, objective.boundary]
    # Without inter-token gaps the mean gap of the request stands in; the page names it TPOT.
    return "tpot_s" if column == "itl_p95_s" and rows[column].null_count() == len(rows) else column


def most_broken(rows: pl.DataFrame, objectives: Sequence[Objective]) -> tuple[Objective | None, pl.DataFrame]:
    """The objective that most requests break, and those requests; none given or none broken: (the first, no rows)."""
    best: tuple[Objective | None, pl.DataFrame] = (objectives[0] if objectives else None, rows.clear())
    for objective in objectives:
        broken = limited(rows, objective)
        if len(broken) > len(best[1]):
            best = (objective, broken)
    return best


def slowest(rows: pl.DataFrame, sampling: Sampling = UNKNOWN) -> pl.DataFrame:
    """The slowest tenth by end-to-end time, at least 3; of a sample, the rows that stand for the slowest tenth of all requests."""
    # Only what tells which they are is put in order: all columns of a million rows are two gigabytes more while they are.
    judged = rows.select("e2e_s", "request_key", "finished_unix_ns").with_row_index("place")
    known = judged.filter(pl.col("e2e_s").is_not_null()).sort(["e2e_s", "request_key"], descending=[True, False])
    count = max(SLOW_SET_MIN, -(-len(known) // 10))
    if sampling.is_partial and len(known):
        population = float(sampling.weights(known).sum()) / (sampling.share(known, known) or 1.0)
        reached = np.cumsum(sampling.weights(known)) >= population / 10
        count = max(SLOW_SET_MIN, int(reached.argmax()) + 1 if reached.any() else len(known))
    return rows[known["place"].head(count)]


def seconds_by_cause(rows: pl.DataFrame, weights: Floats | None = None) -> dict[str, float]:
    """Booked seconds by cause, summed as integer nanoseconds so that the order of rows changes nothing. weights: for how many
    requests each row stands."""
    found = {}
    for cause in CAUSES:
        values = np.nan_to_num(floats(rows, cause_column(cause)))
        values = values if weights is None else values * weights
        found[cause] = int(np.rint(values * 1e9).astype(np.int64).sum()) / 1e9
    return found


def objective_seconds(rows: pl.DataFrame, objective: Objective | None) -> dict[str, float]:
    """Booked seconds by cause in the phases an objective is about. Where steps tell what passed before a request's first token this
    is exact; of the other requests it is all seconds of the causes that can lie there."""
    if objective is None or objective.metric == "e2e":
        return seconds_by_cause(rows)
    told = rows["first_causes"].is_not_null() if "first_causes" in rows.columns else pl.Series([False] * len(rows))
    coarse = seconds_by_cause(rows.filter(~told))
    found = {cause: seconds for cause, seconds in coarse.items() if _in_objective(cause, objective)}
    exact = rows.filter(told)
    if exact.is_empty():
        return found
    first = _first_seconds(exact)
    if objective.metric not in ("ttft", "queue"):
        first = {cause: max(0.0, whole - first[cause]) for cause, whole in seconds_by_cause(exact).items()}
        if _column(rows, objective) == "tpot_s":  # time per token leaves tools out
            first["external"] = 0.0
    return {cause: found.get(cause, 0.0) + first[cause] for cause in CAUSES if cause in found or first[cause] > 0}


def _first_seconds(rows: pl.DataFrame) -> dict[str, float]:
    """Seconds before the first token by cause, over rows that tell, summed as integer nanoseconds."""
    read = rows["first_causes"].str.json_decode(pl.Struct(dict.fromkeys(CAUSES, pl.Float64))).struct.unnest()
    whole = read.select((pl.col(cause).fill_null(0.0) * 1e9).round().cast(pl.Int64).sum() for cause in CAUSES)
    return {cause: int(whole[cause][0]) / 1e9 for cause in CAUSES}


def unexplained_wait_s(rows: pl.DataFrame) -> float:
    """Seconds of queue that no cause explains: waiting is contention, also where nothing tells what was waited for."""
    booked = sum(
        (
            np.nan_to_num(floats(rows, cause_column(cause)))
            for cause in CAUSES
            if cause.startswith("queue.") or cause == "kv.wait"
        ),
        start=np.zeros(len(rows)),
    )
    waited = np.nan_to_num(floats(rows, "queue_s")) - booked
    return float(np.clip(waited, 0.0, np.nan_to_num(floats(rows, cause_column("unexplained")))).sum())


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole; nothing where there is no time."""
    total = sum(seconds.values())
    return {cause: value / total for cause, value in seconds.items() if value > 0} if total > 0 else {}


def has_phases(rows: pl.DataFrame) -> pl.Series:
    """Which rows carry phase data: a queue or a prefill. Decode alone is known to any client and says nothing of the wait."""
    phases = ("queue_s", "prefill_s")
    return rows.select(pl.any_horizontal(*(pl.col(name).is_not_null() for name in phases)).alias("has"))["has"]


def decide(
    rows: pl.DataFrame, objectives: Sequence[Objective], flight: InFlight, sampling: Sampling = UNKNOWN
) -> Finding:
    """Status, slow set, primary and cause, before evidence is weighed (see `weighed`)."""
    objective, broken = most_broken(rows, objectives)
    breaks = objective is not None and len(rows) > 0 and sampling.share(broken, rows) > BROKEN_RATIO
    affected = broken if breaks else slowest(rows, sampling)
    phase_ratio = int(has_phases(rows).sum()) / len(rows) if len(rows) else None
    judged = objective if breaks else None
    seconds = objective_seconds(affected, judged)
    contention = {cause: seconds[cause] for cause in seconds if cause in CONTENTION}
    if _in_objective("queue.slots", judged):
        contention["unexplained"] = unexplained_wait_s(affected)
    outside = (
        outside_s(affected, judged.metric if judged else "e2e") if judged is None or judged.boundary == "client" else {}
    )
    beside = sum(outside.values())
    considered = _added(seconds, outside)
    total = sum(considered.values())
    ratio = sum(contention.values()) / total if total > 0 else None
    contended = ratio is not None and ratio >= CONTENTION_RATIO
    waiting = (flight.open > 0 or rows.is_empty()) and flight.contention_ratio >= CONTENTION_RATIO
    over = len(broken) if objective is not None else None

    def finding(status: str, compared: Mapping[str, float], live: bool, reason: str) -> Finding:
        primary, cause, margin = _largest(compared)
        return Finding(
            status,
            objective,
            affected,
            over,
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
    return finding("healthy", seconds_by_cause(rows), False, "no objective is broken and little time is spent waiting")


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
