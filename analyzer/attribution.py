"""Every second of every request booked to one cause (architecture section 3), for one instance at a time.

Requests of an engine that sends its steps are booked by these (`stepwise`). Engines without step telemetry (vLLM, SGLang) send
phases; what others did at the same time comes from the overlap of requests, what the engine looked like from its samples. What
neither tells is `unexplained`, and what is missing is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.analyzer.coverage import partly_seen
from phasewise.analyzer.decoding import clean_tpot_s, interference_s, preempted_s
from phasewise.analyzer.intervals import Bools, Floats, Steps, covered, level, own_share_s, valid
from phasewise.analyzer.queueing import REASONS, Samples, slot_limit, wait_reasons
from phasewise.analyzer.steady import DecodeSplit, decode_split
from phasewise.analyzer.step_samples import with_step_samples
from phasewise.analyzer.stepwise import Stepwise, book_steps
from phasewise.collector.context import Context
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

CLAMP_S = 0.002  # known phases may exceed end to end by this or by 1 %: the longest is cut
CLAMP_RATIO = 0.01
ROUNDING_S = 1e-9  # a smaller excess is that of sums of floats, and no contradiction
HOUR_S = 3600.0
SATURATED_RATIO = 0.9  # of the busy time spent prefilling: the engine has no room for more prompts
PREFILL_COVERS = frozenset({"P", "P,F", "C,P,F", "C,P"})
_NUMBERS = (
    "arrival_unix_ns finished_unix_ns queued_unix_ns scheduled_unix_ns first_token_unix_ns e2e_s queue_s context_s prefill_s "
    "first_token_s decode_s external_s combined_s input_tokens cached_tokens output_tokens "
    "queue_slot_s queue_kv_s queue_budget_s queue_window_s queue_policy_s queue_upstream_s preemptions"
).split()
_PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")
_STATED = {
    "queue_slot_s": "queue.slots",
    "queue_kv_s": "kv.wait",
    "queue_budget_s": "queue.budget",
    "queue_window_s": "queue.window",
    "queue_policy_s": "queue.policy",
    "queue_upstream_s": "queue.upstream",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of the context's requests as arrays on a common time axis (seconds since `origin_unix_ns`)."""

    frame: pl.DataFrame
    origin_unix_ns: int
    number: dict[str, Floats]
    siblings: tuple[npt.NDArray[np.intp], ...] = ()  # rows of one call, where n > 1: they are not each other's "others"

    def __getitem__(self, name: str) -> Floats:
        return self.number[name]


def attributor(rulebook: Rulebook) -> Callable[[Context], pl.DataFrame]:
    """The function the writer calls: one row a target, with the cause columns and what the context fills."""

    def attribute(context: Context) -> pl.DataFrame:
        return attribute_instance(context, rulebook)

    return attribute


def attribute_instance(context: Context, rulebook: Rulebook) -> pl.DataFrame:
    """Attribution of the target rows of one instance; see module docstring."""
    context = with_step_samples(context)
    frame = context.requests.sort("request_key")
    if frame.is_empty():
        return pl.DataFrame(schema={"request_key": pl.String})
    rows = _rows(frame)
    samples = read_samples(context.samples, rows.origin_unix_ns)
    # Where a good part of the requests sends no spans, those that do say nothing of how many ran together.
    sampled = partly_seen(frame, context.samples)
    if sampled:
        running = samples.step(samples.running)
        together = samples.step(samples.running + np.nan_to_num(samples.waiting))
    else:
        running = level(rows["scheduled_unix_ns"], rows["finished_unix_ns"])
        together = level(rows["arrival_unix_ns"], rows["finished_unix_ns"])
    prefills = covered(rows["scheduled_unix_ns"], rows["first_token_unix_ns"])
    booked = {cause: np.zeros(len(frame)) for cause in CAUSES}

    stepped = book_steps(replace(context, requests=frame), rows.number, rows.origin_unix_ns, rulebook)
    if stepped is None or not stepped.chosen.all():
        _book_waiting(booked, context, rows, samples, None if sampled else running, prefills)
        _book_prefill(booked, rows)
        split = decode_split(context, rows.number, running, rulebook)
        _book_decode(booked, rows, samples, prefills, split)
    if stepped is not None:
        for cause in CAUSES:
            booked[cause] = np.where(stepped.chosen, stepped.booked[cause], booked[cause])
    front = {cause: np.zeros(len(frame)) for cause in CAUSES}
    _book_before_queue(front, rows, prefills)
    front["context"] += _known(rows["context_s"])
    front["host"] += _known(rows["first_token_s"])
    for cause in CAUSES:
        booked[cause] += front[cause]
    booked["external"] += _known(rows["external_s"])
    clamped = _close(booked, rows["e2e_s"])
    lacking = {
        "kv_usage" if not len(samples) and stepped is None else "wait_reason": (
            booked["unexplained"] > 0.1 * rows["e2e_s"]
        )
        & (rows["queue_s"] > 0),
        "phases": ~np.isfinite(rows["queue_s"]) | ~np.isfinite(rows["prefill_s"]),
    }
    answer = _answer(rows, booked, clamped, lacking, samples, running, together, stepped)
    if stepped is not None:
        answer = answer.with_columns(_first_causes(rows, booked, front, stepped))
    return answer.filter(pl.col("request_key").is_in(list(context.targets)))


def read_samples(frame: pl.DataFrame, origin_unix_ns: int) -> Samples:
    """Samples of one instance as arrays, in time order; counters become increments, a reset counts as unknown."""
    ordered = frame.sort("unix_ns").unique("unix_ns", keep="first", maintain_order=True)

    def column(name: str) -> Floats:
        return ordered[name].cast(pl.Float64).fill_null(float("nan")).to_numpy().copy()

    def increment(name: str) -> Floats:
        step = np.diff(column(name), prepend=np.nan)
        return np.where(step < 0, np.nan, step)

    preempted = increment("preemptions")
    retracted = column("retracted")
    return Samples(
        time=(ordered["unix_ns"].to_numpy() - origin_unix_ns) / 1e9,
        running=column("running"),
        waiting=column("waiting"),
        kv_usage=column("kv_usage_ratio"),
        preempted=np.where(np.isfinite(preempted), preempted, np.where(retracted > 0, retracted, preempted)),
        prompt_tokens=increment("prompt_tokens"),
    )


def _rows(frame: pl.DataFrame) -> Rows:
    first = frame["arrival_unix_ns"].min()
    assert isinstance(first, int)
    number: dict[str, Floats] = {}
    for name in _NUMBERS:
        series = frame[name]
        if name.endswith("_unix_ns"):
            series = (series - first) / 1e9
        number[name] = series.cast(pl.Float64).fill_null(float("nan")).to_numpy().copy()
    return Rows(frame, first, number, _siblings(frame))


def _siblings(frame: pl.DataFrame) -> tuple[npt.NDArray[np.intp], ...]:
    shared = frame.select("call_key").with_row_index("row").filter(pl.col("call_key").is_not_null())
    shared = shared.filter(pl.col("call_key").is_duplicated())
    several = shared.group_by("call_key", maintain_order=True).agg("row")
    return tuple(np.asarray(indices, dtype=np.intp) for indices in several["row"].to_list())


def others_prefill_s(rows: Rows, prefills: Steps, start: Floats, end: Floats) -> Floats:
    """Seconds of each [start, end) that prefills of other calls cover; the sequences of one call share its prompt."""
    found = np.nan_to_num(prefills.integral(start, end))
    scheduled, first = rows["scheduled_unix_ns"], rows["first_token_unix_ns"]
    for group in rows.siblings:
        for i in group:
            rest = group[group != i]
            own = covered(scheduled[rest], first[rest]).integral(start[i : i + 1], end[i : i + 1])
            found[i] = max(0.0, found[i] - float(np.nan_to_num(own)[0]))
    return found


def _known(values: Floats) -> Floats:
    """Negative and unknown count as nothing; what they hide lands in the residual."""
    return np.clip(np.nan_to_num(values), 0.0, None)


def _book_waiting(
    booked: dict[str, Floats], context: Context, rows: Rows, samples: Samples, overlap: Steps | None, prefills: Steps
) -> None:
    """overlap: requests running, by their spans; None where these are too few to tell."""
    queue = _known(rows["queue_s"])
    queued, scheduled = rows["queued_unix_ns"], rows["scheduled_unix_ns"]
    running = samples.step(samples.running) if overlap is None else overlap
    slots = slot_limit(context.settings, samples, overlap, None if overlap is None else level(queued, scheduled))
    reasons = wait_reasons(queued, scheduled, samples, slots, running, prefills)
    total = np.nan_to_num(sum((reasons[reason] for reason in REASONS), start=np.zeros(len(queue))))
    stated = {cause: _known(rows[column]) for column, cause in _STATED.items()}
    stated_total = sum(stated.values(), start=np.zeros(len(queue)))
    told = stated_total > 0
    for cause, seconds in stated.items():
        booked[cause] += np.where(told, np.minimum(seconds, queue), 0.0)
    saturated = prefill_bound(running, prefills)
    for reason in REASONS:
        cause = "queue.capacity" if saturated and reason in ("queue.slots", "queue.budget") else reason
        part = np.divide(np.nan_to_num(reasons[reason]), total, out=np.zeros_like(total), where=total > 0)
        unplaced = (total <= 0) & (reason == "unexplained")
        booked[cause] += np.where(told, 0.0, queue * np.where(unplaced, 1.0, part))


def prefill_bound(running: Steps, prefills: Steps) -> bool:
    """Whether an engine prefills nearly all the time it is busy: then neither a slot nor a larger step serves more."""
    if not len(running.time):
        return False
    ends = running.time[:1], running.time[-1:]
    busy = Steps(running.time, (running.value > 0.5).astype(float)).integral(*ends)[0]
    return bool(busy > 0 and prefills.integral(*ends)[0] >= SATURATED_RATIO * busy)


def _book_before_queue(booked: dict[str, Floats], rows: Rows, prefills: Steps) -> None:
    """What lies before the engine marks a request queued and cannot be split ({C,F} of vLLM): the part that others' prefill
    covers is waiting for their step to end; the rest is the frontend.

    {C,F} is a difference of two clocks: it holds the delivery of the first token, during which the engine's own clock is
    decoding already. Where the phases add up to more than end to end, that delivery is counted twice and is taken out here.
    """
    covers = rows.frame["combined_covers"].fill_null("").to_numpy()
    combined = _known(rows["combined_s"])
    frontend = np.isin(covers, ["C,F", "C", "F"])
    phases = sum((_known(rows[name]) for name in _PHASES), start=np.zeros(len(combined)))
    twice = np.where(frontend, np.clip(phases - rows["e2e_s"], 0.0, combined), 0.0)
    combined = combined - np.nan_to_num(twice)
    start, end = rows["arrival_unix_ns"], rows["queued_unix_ns"]
    others = np.minimum(others_prefill_s(rows, prefills, start, end), combined)
    booked["interference"] += np.where(frontend, others, 0.0)
    booked["host"] += np.where(frontend, combined - others, 0.0)
    prefill = np.isin(covers, sorted(PREFILL_COVERS))
    booked["prefill.compute"] += np.where(prefill, combined, 0.0)
    booked["unexplained"] += np.where(~frontend & ~prefill, combined, 0.0)


def _book_prefill(booked: dict[str, Floats], rows: Rows) -> None:
    prefill = _known(rows["prefill_s"])
    start, end = rows["scheduled_unix_ns"], rows["first_token_unix_ns"]
    end = np.where(np.isfinite(prefill), np.minimum(end, start + prefill), end)
    uncached = rows["input_tokens"] - np.nan_to_num(rows["cached_tokens"])
    together = np.ones(len(prefill))
    for group in rows.siblings:
        together[group] = len(group)
    own = np.minimum(own_share_s(start, end, uncached / together) * together, end - start)
    share = np.divide(own, end - start, out=np.ones_like(prefill), where=valid(start, end))
    booked["prefill.compute"] += prefill * np.nan_to_num(share, nan=1.0)
    booked["interference"] += prefill * (1.0 - np.nan_to_num(share, nan=1.0))


def _book_decode(booked: dict[str, Floats], rows: Rows, samples: Samples, prefills: Steps, split: DecodeSplit) -> None:
    decode = _known(rows["decode_s"])
    gaps = np.nan_to_num(rows["output_tokens"] - 1)
    start, end = rows["first_token_unix_ns"], rows["finished_unix_ns"]
    overlap = others_prefill_s(rows, prefills, start, end)
    moved = samples.hold(np.nan_to_num(samples.preempted) > 0)
    preempting = (np.nan_to_num(moved.integral(start, end)) > 0) | (np.nan_to_num(rows["preemptions"]) > 0)
    hour = np.floor(rows["finished_unix_ns"] / HOUR_S + rows.origin_unix_ns / 1e9 / HOUR_S)
    for one in np.unique(hour[np.isfinite(hour)]):
        here = hour == one
        clean = clean_tpot_s(decode[here], gaps[here], overlap[here], bool(preempting[here].any()))
        others = interference_s(decode[here], gaps[here], overlap[here], clean)
        lost = preempted_s(decode[here], gaps[here], others, clean, preempting[here])
        steady = decode[here] - others - lost
        booked["interference"][here] += others
        booked["kv.preempt"][here] += lost
        for cause, share in split.shares(here, steady, gaps[here]).items():
            booked[cause][here] += share


def _close(booked: dict[str, Floats], e2e: Floats) -> Bools:
    """Make the parts of each row add up to its end-to-end time; returns which rows were cut."""
    parts = np.stack([booked[cause] for cause in CAUSES])
    over = parts.sum(axis=0) - e2e
    known = np.isfinite(e2e)
    fits = known & (over <= np.maximum(CLAMP_S, CLAMP_RATIO * e2e))
    cut = fits & (over > 0)
    longest = parts.argmax(axis=0)
    which = np.flatnonzero(cut)
    parts[longest[which], which] -= np.minimum(over[which], parts[longest[which], which])
    unexplained = CAUSES.index("unexplained")
    parts[unexplained] += np.where(fits & (over < 0), -over, 0.0)
    broken = known & ~fits
    parts[:, broken | ~known] = 0.0
    parts[unexplained, broken] = e2e[broken]
    for k, cause in enumerate(CAUSES):
        booked[cause] = parts[k]
    return np.asarray(cut & (over > ROUNDING_S), dtype=np.bool_)


def _answer(
    rows: Rows,
    booked: dict[str, Floats],
    clamped: Bools,
    lacking: Mapping[str, Bools],
    samples: Samples,
    running: Steps,
    together: Steps,
    stepped: Stepwise | None,
) -> pl.DataFrame:
    by_class = np.stack(
        [
            sum((booked[c] for c in CAUSES if CLASS_OF_CAUSE[c] == name), start=np.zeros(len(clamped)))
            for name in CLASSES
        ]
    )
    order = np.argsort(-by_class, axis=0, kind="stable")
    best = np.take_along_axis(by_class, order[:1], axis=0)[0]
    second = np.take_along_axis(by_class, order[1:2], axis=0)[0]
    # A request without a duration, or whose time is not known, is bound by nothing.
    order[0] = np.where(best > 0, order[0], CLASSES.index("inconclusive"))
    names = np.array(CLASSES)[order[0]]
    chosen = _largest_cause(booked, order[0])
    e2e = rows["e2e_s"]
    measured = sum(
        (booked[c] for c in ("queue.slots", "queue.capacity", "queue.budget", "queue.window", "queue.policy", "queue.upstream",
                             "kv.wait", "context", "external", "prefill.compute")),
        start=np.zeros(len(e2e)),
    )  # fmt: skip
    arrival, first, end = rows["arrival_unix_ns"], rows["first_token_unix_ns"], rows["finished_unix_ns"]
    ran = valid(first, end) & np.isfinite(rows["scheduled_unix_ns"]) & bool(len(running.time))
    batch = np.divide(running.integral(first, end), end - first, out=np.full(len(e2e), np.nan), where=ran)
    at_admission, peak = _kv_around(samples, rows["scheduled_unix_ns"], end)
    if stepped is not None:
        told = sum((booked[c] for c in ("context", "external")), start=np.zeros(len(e2e))) + stepped.measured_s
        measured = np.where(stepped.chosen, np.minimum(told, e2e), measured)
        batch = np.where(stepped.chosen, stepped.decode_batch_mean, batch)
        at_admission = np.where(stepped.chosen, stepped.kv_usage_admission_ratio, at_admission)
        peak = np.where(stepped.chosen, stepped.kv_usage_peak_ratio, peak)
    columns: dict[str, object] = {"request_key": rows.frame["request_key"]}
    columns |= {cause_column(cause): booked[cause] for cause in CAUSES}
    columns |= {
        "primary_class": names,
        "cause": chosen,
        "margin_ratio": np.divide(best - second, e2e, out=np.full(len(e2e), np.nan), where=e2e > 0),
        "measured_s": measured,
        "clamped": clamped,
        "missing_signals": _named(lacking),
        "first_causes": pl.Series([None] * len(clamped), dtype=pl.String),
        "concurrency_at_arrival": np.maximum(together.at(arrival), 1.0)
        if len(together.time)
        else np.full(len(e2e), np.nan),
        "decode_batch_mean": batch,
        "kv_usage_admission_ratio": at_admission,
        "kv_usage_peak_ratio": peak,
    }
    return pl.DataFrame(columns).with_columns(
        pl.col("concurrency_at_arrival").fill_nan(None).round().cast(pl.Int64),
        pl.col("margin_ratio", "decode_batch_mean", "kv_usage_admission_ratio", "kv_usage_peak_ratio").fill_nan(None),
    )


def _first_causes(
    rows: Rows, booked: Mapping[str, Floats], front: Mapping[str, Floats], stepped: Stepwise
) -> pl.Series:
    """Each row's seconds by cause before its first token, as a JSON object; null where no steps tell.

    front: seconds that lie around queue and prefill, before the first token, whatever the engine.
    """
    early = {cause: stepped.early[cause] + front[cause] for cause in CAUSES}
    early["external"] = early["external"] + np.clip(_known(rows["external_s"]) - stepped.outside_s, 0.0, None)
    seconds = pl.DataFrame({cause: np.minimum(early[cause], booked[cause]).round(9) for cause in CAUSES})
    entries = (
        pl.when(pl.col(cause) > 0).then(pl.lit(f'"{cause}":') + pl.col(cause).cast(pl.String)) for cause in CAUSES
    )
    told = pl.lit("{") + pl.concat_str(*entries, separator=",", ignore_nulls=True) + pl.lit("}")
    chosen = pl.Series("chosen", stepped.chosen)
    return seconds.select(pl.when(chosen).then(told).alias("first_causes"))["first_causes"]


def _largest_cause(booked: dict[str, Floats], class_index: npt.NDArray[np.intp]) -> list[str | None]:
    """The cause with most seconds inside each row's class; None where the class is that nothing is known."""
    names = np.empty((len(CLASSES), len(class_index)), dtype=object)
    for k, name in enumerate(CLASSES):
        inside = [cause for cause in CAUSES if CLASS_OF_CAUSE[cause] == name]
        best = np.stack([booked[cause] for cause in inside]).argmax(axis=0)
        names[k] = np.array([None if cause == "unexplained" else cause for cause in inside], dtype=object)[best]
    found: list[str | None] = np.take_along_axis(names, class_index[None, :], axis=0)[0].tolist()
    return found


def _named(lacking: Mapping[str, Bools]) -> list[str]:
    """Each row's lacking signals as a JSON list."""
    names = sorted(lacking)
    code = sum((lacking[name].astype(int) << k for k, name in enumerate(names)), start=np.zeros(1, dtype=int))
    texts = [json.dumps([name for k, name in enumerate(names) if number >> k & 1]) for number in range(1 << len(names))]
    return [texts[number] for number in code]


def _kv_around(samples: Samples, scheduled: Floats, end: Floats) -> tuple[Floats, Floats]:
    """KV use at the last sample before admission, and the highest while the request ran; NaN without a sample."""
    nothing = np.full(len(scheduled), np.nan)
    known = np.isfinite(samples.kv_usage)
    if not known.any():
        return nothing, nothing
    time, usage = samples.time[known], samples.kv_usage[known]
    before = np.searchsorted(time, np.nan_to_num(scheduled, nan=-np.inf), side="right") - 1
    admission = np.where(before >= 0, usage[np.maximum(before, 0)], np.nan)
    low = np.searchsorted(time, np.nan_to_num(scheduled, nan=np.inf), side="left")
    high = np.searchsorted(time, np.nan_to_num(end, nan=-np.inf), side="right")
    inside = np.flatnonzero(high > low)
    peak = np.full(len(scheduled), np.nan)
    if len(inside):
        # Every second segment lies between two requests; the appended value lets the last one end with the samples.
        ends = np.stack((low[inside], high[inside]), axis=1).reshape(-1)
        peak[inside] = np.maximum.reduceat(np.append(usage, -np.inf), ends)[::2]
    return admission, peak
