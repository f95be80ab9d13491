"""Every second of every request booked to one cause (architecture section 3), one instance beside the other.

Requests of an engine that sends its steps are booked by these (`stepwise`). Engines without step telemetry (vLLM, SGLang) send
phases; what others did at the same time comes from the overlap of requests, what the engine looked like from its samples. What
neither tells is `unexplained`, and what is missing is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from phasewise.analyzer.attribution_columns import Found, answer_frame
from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows, Stack
from phasewise.analyzer.coverage import partly_seen
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.kernel_times import kernel_times
from phasewise.analyzer.machine import machine
from phasewise.analyzer.overlaps import Overlaps, known_s
from phasewise.analyzer.phase_causes import (
    book_before_queue,
    book_context,
    book_decode,
    book_prefill,
    book_waiting,
    host_step_s,
    read_links,
)
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.steady import decode_split
from phasewise.analyzer.step_samples import with_step_samples
from phasewise.analyzer.stepwise import book_steps
from phasewise.collector.context import Attribute, Context
from phasewise.rules.load import Rulebook


def attributor(rulebook: Rulebook) -> Attribute:
    """The function the writer calls: one row a target, with the cause columns and what the context fills."""

    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        return attribute_instances(contexts, rulebook)

    return attribute


def attribute_instance(context: Context, rulebook: Rulebook) -> pl.DataFrame:
    """Attribution of the target rows of one instance, in order of their ends; see module docstring."""
    return attribute_instances([context], rulebook)


def attribute_instances(contexts: Sequence[Context], rulebook: Rulebook) -> pl.DataFrame:
    """Attribution of the target rows of several instances, in the order of these and of their ends: what each context alone would get.

    What requests do to each other, and what is calibrated on them, is found over the whole context, everything else for the targets.
    """
    given = [with_step_samples(context) for context in contexts if not context.requests.is_empty()]
    found: list[Found] = []
    if given:
        stack = Stack([context.requests for context in given])
        rows_of = stack.rows([context.targets for context in given])
        found = [
            _found(context, rows, model, rulebook)
            for context, rows, model in zip(given, rows_of, stack.models, strict=True)
            if rows.targets
        ]
    if not found:
        return pl.DataFrame(schema={"request_key": pl.String})
    keys = stack.series("request_key", np.concatenate([one.rows.places for one in found]))
    return answer_frame(keys, found)


def _found(context: Context, rows: Rows, model: str | None, rulebook: Rulebook) -> Found:
    samples = read_samples(context.samples, rows.origin_unix_ns)
    sampled = not context.samples.is_empty() and partly_seen(rows.frame, context.samples)
    around = Overlaps(rows, samples, sampled, context.samples)
    booked = Booked(rows.targets)
    stepped = book_steps(context, model, rows, rulebook)
    batch = np.full(rows.targets, np.nan)
    stalled = np.zeros(rows.targets)
    if stepped is None or not stepped.chosen.all():
        batch = around.batch_mean
        book_waiting(booked, rows, context.settings, samples, around)
        built = machine(context.settings, model, rulebook)
        links = read_links(rows, around, kernel_times(built))
        tokens = rows["input_tokens"], rows["output_tokens"]
        split = decode_split(context, built, around.batch_of(slice(None)), *tokens, rulebook, links)
        book_prefill(booked, rows, around, links, host_step_s(rows, split))
        stalled = book_decode(booked, rows, samples, around, split, links)
        batch = np.where(np.isfinite(rows.own("scheduled_unix_ns")), batch, np.nan)
    if stepped is not None:
        booked.replace(stepped.chosen, stepped.booked)
        stalled = np.where(stepped.chosen, 0.0, stalled)
    front = Booked(rows.targets)
    book_before_queue(front, rows, around)
    book_context(front, rows)
    front.add("host", known_s(rows.own("first_token_s")))
    for cause in front.filled:
        booked.add(cause, front[cause])
    booked.add("external", known_s(rows.own("external_s")))
    return Found.of(rows, booked, front, samples, around.together, batch, stepped, stalled)


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
