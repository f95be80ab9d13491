"""The columns of the answer: seconds by cause, the class and cause that hold most of them, and what the context says of each request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import polars as pl

from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Bools, Floats, Index, Steps, places
from phasewise.analyzer.overlaps import known_s
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.stepwise import Stepwise
from phasewise.analyzer.sums import STALL_MARK
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

# Causes that are measured where no steps tell; a fit or an overlap divides the others.
_MEASURED = (
    "queue.slots", "queue.capacity", "queue.empty_slots", "queue.budget", "queue.window", "queue.policy", "queue.upstream", "kv.wait", "kv.load", "context",
    "external", "prefill.compute",
)  # fmt: skip
LACKING_RATIO = 0.1  # of a request's time unexplained: what would tell is named
_CLASS_NAMES = pl.Series("primary_class", CLASSES)
_CAUSE_NAMES = pl.Series("cause", [None if cause == "unexplained" else cause for cause in CAUSES])
_CAUSE_COLUMNS = {cause: cause_column(cause) for cause in CAUSES}


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for the targets of one context. booked, front: seconds by cause, front those that lie around queue and prefill
    before the first token, whatever the engine; waiting: the signal that would tell why they waited; stalled: which
    stood still for a matter of their own; unknown numbers are NaN."""

    rows: Rows
    booked: Booked
    front: Booked
    stepped: Stepwise | None
    waiting: str
    stalled: Bools
    concurrency_at_arrival: Floats
    decode_batch_mean: Floats
    kv_usage_admission_ratio: Floats
    kv_usage_peak_ratio: Floats

    @classmethod
    def of(
        cls,
        rows: Rows,
        booked: Booked,
        front: Booked,
        samples: Samples,
        together: Steps,
        batch: Floats,
        stepped: Stepwise | None,
        stalled_s: Floats,
    ) -> Self:
        """together: requests in the engine at once; batch: those that ran beside each decode."""
        at_admission, peak = _kv_around(samples, rows.own("scheduled_unix_ns"), rows.own("finished_unix_ns"))
        if stepped is not None:
            batch = np.where(stepped.chosen, stepped.decode_batch_mean, batch)
            at_admission = np.where(stepped.chosen, stepped.kv_usage_admission_ratio, at_admission)
            peak = np.where(stepped.chosen, stepped.kv_usage_peak_ratio, peak)
        return cls(
            rows=rows,
            booked=booked,
            front=front,
            stepped=stepped,
            stalled=stalled_s > LACKING_RATIO * rows.own("e2e_s"),
            waiting="kv_usage" if not len(samples) and stepped is None else "wait_reason",
            concurrency_at_arrival=_concurrency(together, rows.own("arrival_unix_ns")),
            decode_batch_mean=batch,
            kv_usage_admission_ratio=at_admission,
            kv_usage_peak_ratio=peak,
        )


def answer_frame(keys: pl.Series, found: Sequence[Found]) -> pl.DataFrame:
    """One row a target of all contexts, its seconds by cause closed to what it took. keys: of all targets, in order."""
    edges = np.cumsum([0, *(one.rows.targets for one in found)]).tolist()
    cuts = [slice(low, high) for low, high in itertools.pairwise(edges)]
    e2e = _joined([one.rows.own("e2e_s") for one in found])
    booked = Booked.joined([one.booked for one in found])
    clamped = booked.close(e2e)
    outside = _outside(found, e2e)
    class_index, cause_index, margin_s = _ranked(booked.with_more(outside))
    whole = e2e + sum(outside.values(), start=np.zeros(len(e2e)))
    measured = booked.total(_MEASURED).copy()
    causes = [pl.Series([None], dtype=pl.String).new_from_index(0, one.rows.targets) for one in found]
    for place, (one, cut) in enumerate(zip(found, cuts, strict=True)):
        if one.stepped is not None:
            own = booked.part(cut)
            told = own.total(("kv.load", "context", "external")) + one.stepped.measured_s
            measured[cut] = np.where(one.stepped.chosen, np.minimum(told, e2e[cut]), measured[cut])
            causes[place] = _first_causes(one.rows, own, one.front, one.stepped)
    nothing, filled = pl.Series(np.zeros(len(e2e))), set(booked.filled)

    def joined(name: str) -> pl.Series:
        return pl.Series(_joined([getattr(one, name) for one in found]), nan_to_null=True)

    columns: dict[str, object] = {"request_key": keys}
    columns |= {name: booked[cause] if cause in filled else nothing for cause, name in _CAUSE_COLUMNS.items()}
    columns |= {
        "primary_class": _CLASS_NAMES.gather(class_index),
        "cause": _CAUSE_NAMES.gather(cause_index),
        "margin_ratio": pl.Series(
            np.divide(margin_s, whole, out=np.full(len(whole), np.nan), where=whole > 0), nan_to_null=True
        ),
        "measured_s": measured,
        "clamped": clamped,
        "missing_signals": _lacking(found, booked, e2e),
        "first_causes": pl.concat(causes) if len(causes) > 1 else causes[0],
        "concurrency_at_arrival": joined("concurrency_at_arrival").round().cast(pl.Int64),
        "decode_batch_mean": joined("decode_batch_mean"),
        "kv_usage_admission_ratio": joined("kv_usage_admission_ratio"),
        "kv_usage_peak_ratio": joined("kv_usage_peak_ratio"),
    }
    return pl.DataFrame(columns)


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _outside(found: Sequence[Found], e2e: Floats) -> dict[str, Floats]:
    """Seconds of each target's call that pass outside its engine, by cause: no part of its end-to-end time, but where its caller's
    time went. Durations only, never differences of two clocks."""
    entry = _joined([one.rows.own("entry_e2e_s") for one in found])
    gap = np.clip(np.nan_to_num(entry - e2e), 0.0, None)
    if not gap.any():
        return {}
    client = np.concatenate([one.rows.own_is_one_of("entry_side", ("client",)) for one in found])
    return {"host": np.where(client, 0.0, gap), "client": np.where(client, gap, 0.0)}


def _lacking(found: Sequence[Found], booked: Booked, e2e: Floats) -> pl.Series:
    """Each target's lacking signals as a JSON list."""
    queue = _joined([one.rows.own("queue_s") for one in found])
    prefill = _joined([one.rows.own("prefill_s") for one in found])
    stalled = np.concatenate([one.stalled for one in found])
    waits = (booked["unexplained"] > LACKING_RATIO * e2e) & (queue > 0) & ~stalled
    phases = ~np.isfinite(queue) | ~np.isfinite(prefill)
    named = sorted({one.waiting for one in found})
    which = np.repeat([named.index(one.waiting) for one in found], [one.rows.targets for one in found])
    texts = [
        json.dumps(sorted([*["phases"] * without, *[name] * waiting, *[STALL_MARK] * still]))
        for name in named
        for still in (0, 1)
        for waiting in (0, 1)
        for without in (0, 1)
    ]
    return pl.Series(texts).gather(which * 8 + stalled * 4 + waits * 2 + phases)


def _first_causes(rows: Rows, booked: Booked, front: Booked, stepped: Stepwise) -> pl.Series:
    """Each row's seconds by cause before its first token, as a JSON object; null where no steps tell. booked: closed."""
    external = front["external"] + np.maximum(known_s(rows.own("external_s")) - stepped.outside_s, 0.0)
    nothing = np.zeros(rows.targets)
    seconds: dict[str, Floats] = {}
    for cause in CAUSES:
        early = stepped.early.get(cause, nothing) + (external if cause == "external" else front[cause])
        if early.any():
            seconds[cause] = np.minimum(early, booked[cause])
    frame = pl.DataFrame({**seconds, "": stepped.chosen}).with_columns(pl.col(list(seconds)).round(9))
    # Made null before it is made a text: most causes are those of few rows.
    some = {cause: pl.when(pl.col(cause) > 0).then(pl.col(cause)) for cause in seconds}
    entries = [pl.lit(f'"{cause}":') + value.cast(pl.String) for cause, value in some.items()]
    inner = pl.concat_str(*entries, separator=",", ignore_nulls=True) if entries else pl.lit("")
    told = pl.when(pl.col("")).then(pl.lit("{") + inner + pl.lit("}"))
    return frame.select(told.alias("first_causes"))["first_causes"]


def _ranked(booked: Booked) -> tuple[Index, Index, Floats]:
    """Of each row the class with most seconds, the cause with most inside it, and by how many seconds that class leads. booked: with
    what passes outside the engine.

    The first of equal ones. A request without a duration, or whose time is not known, is bound by nothing.
    """
    best, second = np.zeros(booked.rows), np.zeros(booked.rows)
    class_index = np.full(booked.rows, CLASSES.index("inconclusive"))
    cause_index = np.full(booked.rows, CAUSES.index("unexplained"))
    for place, name in enumerate(CLASSES):
        inside = [cause for cause in booked.filled if CLASS_OF_CAUSE[cause] == name]
        if not inside:
            continue
        total, largest = booked.total(inside), booked[inside[0]]
        which = np.full(booked.rows, CAUSES.index(inside[0]))
        for cause in inside[1:]:
            which = np.where(booked[cause] > largest, CAUSES.index(cause), which)
            largest = np.maximum(largest, booked[cause])
        leads = total > best
        second = np.where(leads, best, np.maximum(second, total))
        best = np.where(leads, total, best)
        class_index[leads] = place
        cause_index = np.where(leads, which, cause_index)
    return class_index, cause_index, best - second


def _concurrency(together: Steps, arrival: Floats) -> Floats:
    """Requests in the engine when each arrived, itself among them; NaN where nothing tells."""
    if not len(together.time):
        return np.full(len(arrival), np.nan)
    return np.maximum(together.at(arrival), 1.0)


def _kv_around(samples: Samples, scheduled: Floats, end: Floats) -> tuple[Floats, Floats]:
    """KV use at the last sample before admission, and the highest while the request ran; NaN without a sample."""
    nothing = np.full(len(scheduled), np.nan)
    known = np.isfinite(samples.kv_usage)
    if not known.any():
        return nothing, nothing
    time, usage = samples.time[known], samples.kv_usage[known]
    before = places(time, np.where(np.isnan(scheduled), -np.inf, scheduled))
    admission = np.where(before >= 0, usage[np.maximum(before, 0)], np.nan)
    low = np.searchsorted(time, np.where(np.isnan(scheduled), np.inf, scheduled), side="left")
    high = places(time, np.where(np.isnan(end), -np.inf, end)) + 1
    inside = np.flatnonzero(high > low)
    peak = np.full(len(scheduled), np.nan)
    if len(inside):
        # Every second segment lies between two requests; the appended value lets the last one end with the samples.
        ends = np.stack((low[inside], high[inside]), axis=1).reshape(-1)
        peak[inside] = np.maximum.reduceat(np.append(usage, -np.inf), ends)[::2]
    return admission, peak
