"""The columns of the answer: seconds by cause, the class and cause that hold most of them, and what the context says of each request."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import polars as pl

from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Bools, Floats, Index, Steps, places
from phasewise.analyzer.phase_causes import known_s
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.stepwise import Stepwise
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

# Causes that are measured where no steps tell; a fit or an overlap divides the others.
_MEASURED = (
    "queue.slots", "queue.capacity", "queue.budget", "queue.window", "queue.policy", "queue.upstream", "kv.wait", "context",
    "external", "prefill.compute",
)  # fmt: skip
_CLASS_NAMES = pl.Series("primary_class", CLASSES)
_CAUSE_NAMES = pl.Series("cause", [None if cause == "unexplained" else cause for cause in CAUSES])
_CAUSE_COLUMNS = {cause: cause_column(cause) for cause in CAUSES}


def answer_columns(
    rows: Rows,
    booked: Booked,
    clamped: Bools,
    lacking: Mapping[str, Bools],
    samples: Samples,
    together: Steps,
    batch: Floats,
    stepped: Stepwise | None,
) -> pl.DataFrame:
    """One row a target. together: requests in the engine at once; batch: those that ran beside each decode, NaN unknown."""
    e2e = rows.own("e2e_s")
    class_index, cause_index, margin_s = _ranked(booked)
    measured = booked.total(_MEASURED)
    at_admission, peak = _kv_around(samples, rows.own("scheduled_unix_ns"), rows.own("finished_unix_ns"))
    if stepped is not None:
        told = booked.total(("context", "external")) + stepped.measured_s
        measured = np.where(stepped.chosen, np.minimum(told, e2e), measured)
        batch = np.where(stepped.chosen, stepped.decode_batch_mean, batch)
        at_admission = np.where(stepped.chosen, stepped.kv_usage_admission_ratio, at_admission)
        peak = np.where(stepped.chosen, stepped.kv_usage_peak_ratio, peak)
    nothing = pl.Series(np.zeros(len(e2e)))
    filled = set(booked.filled)
    columns: dict[str, object] = {"request_key": rows.own_series("request_key")}
    columns |= {name: booked[cause] if cause in filled else nothing for cause, name in _CAUSE_COLUMNS.items()}
    columns |= {
        "primary_class": _CLASS_NAMES.gather(class_index),
        "cause": _CAUSE_NAMES.gather(cause_index),
        "margin_ratio": _known(np.divide(margin_s, e2e, out=np.full(len(e2e), np.nan), where=e2e > 0)),
        "measured_s": measured,
        "clamped": clamped,
        "missing_signals": _named(lacking),
        "first_causes": pl.Series([None], dtype=pl.String).new_from_index(0, len(e2e)),
        "concurrency_at_arrival": _concurrency(together, rows.own("arrival_unix_ns")),
        "decode_batch_mean": _known(batch),
        "kv_usage_admission_ratio": _known(at_admission),
        "kv_usage_peak_ratio": _known(peak),
    }
    return pl.DataFrame(columns)


def first_causes(rows: Rows, booked: Booked, front: Booked, stepped: Stepwise) -> pl.Series:
    """Each row's seconds by cause before its first token, as a JSON object; null where no steps tell.

    front: seconds that lie around queue and prefill, before the first token, whatever the engine.
    """
    external = front["external"] + np.clip(known_s(rows.own("external_s")) - stepped.outside_s, 0.0, None)
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
    """Of each row the class with most seconds, the cause with most inside it, and by how many seconds that class leads.

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


def _known(values: Floats) -> pl.Series:
    return pl.Series(values, nan_to_null=True)


def _concurrency(together: Steps, arrival: Floats) -> pl.Series:
    """Requests in the engine when each arrived, itself among them; unknown where nothing tells."""
    if not len(together.time):
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, len(arrival))
    return pl.Series(np.maximum(together.at(arrival), 1.0)).fill_nan(None).round().cast(pl.Int64)


def _named(lacking: Mapping[str, Bools]) -> pl.Series:
    """Each row's lacking signals as a JSON list."""
    names = sorted(lacking)
    code = sum((lacking[name].astype(np.intp) << k for k, name in enumerate(names)), start=np.zeros(1, dtype=np.intp))
    texts = [json.dumps([name for k, name in enumerate(names) if number >> k & 1]) for number in range(1 << len(names))]
    return pl.Series(texts).gather(code)


def _kv_around(samples: Samples, scheduled: Floats, end: Floats) -> tuple[Floats, Floats]:
    """KV use at the last sample before admission, and the highest while the request ran; NaN without a sample."""
    nothing = np.full(len(scheduled), np.nan)
    known = np.isfinite(samples.kv_usage)
    if not known.any():
        return nothing, nothing
    time, usage = samples.time[known], samples.kv_usage[known]
    before = places(time, np.nan_to_num(scheduled, nan=-np.inf))
    admission = np.where(before >= 0, usage[np.maximum(before, 0)], np.nan)
    low = np.searchsorted(time, np.nan_to_num(scheduled, nan=np.inf), side="left")
    high = places(time, np.nan_to_num(end, nan=-np.inf)) + 1
    inside = np.flatnonzero(high > low)
    peak = np.full(len(scheduled), np.nan)
    if len(inside):
        # Every second segment lies between two requests; the appended value lets the last one end with the samples.
        ends = np.stack((low[inside], high[inside]), axis=1).reshape(-1)
        peak[inside] = np.maximum.reduceat(np.append(usage, -np.inf), ends)[::2]
    return admission, peak
