"""Every second of every request booked to one cause (architecture section 3), for one instance at a time.

Requests of an engine that sends its steps are booked by these (`stepwise`). Engines without step telemetry (vLLM, SGLang) send
phases; what others did at the same time comes from the overlap of requests, what the engine looked like from its samples. What
neither tells is `unexplained`, and what is missing is named.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from phasewise.analyzer.attribution_columns import answer_columns, first_causes
from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows, read_rows
from phasewise.analyzer.coverage import partly_seen
from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.overlaps import Overlaps
from phasewise.analyzer.phase_causes import book_before_queue, book_decode, book_prefill, book_waiting, known_s
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.steady import decode_split
from phasewise.analyzer.step_samples import with_step_samples
from phasewise.analyzer.stepwise import book_steps
from phasewise.collector.context import Context
from phasewise.rules.load import Rulebook


def attributor(rulebook: Rulebook) -> Callable[[Context], pl.DataFrame]:
    """The function the writer calls: one row a target, with the cause columns and what the context fills."""

    def attribute(context: Context) -> pl.DataFrame:
        return attribute_instance(context, rulebook)

    return attribute


def attribute_instance(context: Context, rulebook: Rulebook) -> pl.DataFrame:
    """Attribution of the target rows of one instance, in order of their ends; see module docstring.

    What requests do to each other, and what is calibrated on them, is found over the whole context, everything else for the targets.
    """
    context = with_step_samples(context)
    if context.requests.is_empty():
        return pl.DataFrame(schema={"request_key": pl.String})
    rows = read_rows(context.requests, context.targets)
    if not rows.targets:
        return pl.DataFrame(schema={"request_key": pl.String})
    samples = read_samples(context.samples, rows.origin_unix_ns)
    around = Overlaps(rows, samples, partly_seen(rows.frame, context.samples))
    booked = Booked(rows.targets)
    stepped = book_steps(context, rows, rulebook)
    batch = np.full(rows.targets, np.nan)
    if stepped is None or not stepped.chosen.all():
        batch = around.batch_mean
        book_waiting(booked, rows, context.settings, samples, around)
        book_prefill(booked, rows, around)
        split = decode_split(context, batch, rows.own("input_tokens"), rows.own("output_tokens"), rulebook)
        book_decode(booked, rows, samples, around, split)
        batch = np.where(np.isfinite(rows.own("scheduled_unix_ns")), batch, np.nan)
    if stepped is not None:
        booked.replace(stepped.chosen, stepped.booked)
    front = Booked(rows.targets)
    book_before_queue(front, rows, around)
    front.add("context", known_s(rows.own("context_s")))
    front.add("host", known_s(rows.own("first_token_s")))
    for cause in front.filled:
        booked.add(cause, front[cause])
    booked.add("external", known_s(rows.own("external_s")))
    clamped = booked.close(rows.own("e2e_s"))
    lacking = _lacking(rows, booked, "kv_usage" if not len(samples) and stepped is None else "wait_reason")
    answer = answer_columns(rows, booked, clamped, lacking, samples, around.together, batch, stepped)
    if stepped is not None:
        answer = answer.with_columns(first_causes(rows, booked, front, stepped))
    return answer


def _lacking(rows: Rows, booked: Booked, waiting: str) -> dict[str, Bools]:
    """Which targets lack what. waiting: the signal that would tell why they waited."""
    queue = rows.own("queue_s")
    return {
        waiting: (booked["unexplained"] > 0.1 * rows.own("e2e_s")) & (queue > 0),
        "phases": ~np.isfinite(queue) | ~np.isfinite(rows.own("prefill_s")),
    }


def read_samples(frame: pl.DataFrame, origin_unix_ns: int) -> Samples:
    """Samples of one instance as arrays, in time order; counters become increments, a reset counts as unknown."""
    if frame.is_empty():
        return Samples(*(np.empty(0) for _ in range(6)))
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
