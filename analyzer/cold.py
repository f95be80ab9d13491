"""The first steps of a process: how much longer they took than later ones of as many tokens.

Engines count their steps since they started (vLLM `iteration_tokens_total`), so the counter itself tells whether a scrape shows first
steps; a new process start, or a counter that falls, begins anew.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from phasewise.analyzer.intervals import Floats, Steps, or_zero

FIRST_STEPS = 1000  # more have warmed every engine we know of
ENOUGH_LATER = 8  # stretches between scrapes of the same process, to say what is usual
LEAST_STEPS = 5  # in a later stretch, before its mean step says anything
SLOWER_RATIO = 2.0  # than usual: less may be the mix of requests
COLUMNS = ("unix_ns", "steps", "step_tokens", "process_start_unix_s")
_NOTHING = Steps(np.empty(0), np.empty(0))


def cold_share(samples: pl.DataFrame, origin_unix_ns: int, running: Steps) -> Steps:
    """Share of the time, from the first step of a process on, by which its steps exceed what later ones take; 0 elsewhere.

    samples: of one instance; running: sequences at work, so that idle time is no step's. Seconds since the origin.
    """
    if samples.is_empty() or not set(COLUMNS) <= set(samples.columns) or not len(running.time):
        return _NOTHING
    told = (
        samples.filter(pl.col("steps").is_not_null())
        .sort("unix_ns")
        .unique("unix_ns", keep="first", maintain_order=True)
    )
    if len(told) < ENOUGH_LATER + 2:
        return _NOTHING
    time, counted, tokens, started = (
        told[name].cast(pl.Float64).fill_null(float("nan")).to_numpy() for name in COLUMNS
    )
    time = (told["unix_ns"].to_numpy() - origin_unix_ns) / 1e9
    begins = (np.diff(counted, prepend=counted[0]) < 0) | (np.abs(or_zero(np.diff(started, prepend=started[0]))) > 1.0)
    edges = np.concatenate(([0], np.flatnonzero(begins), [len(time)]))
    busy = Steps(running.time, (running.value > 0.5).astype(float))
    found = [
        _of_process(time[low:high], counted[low:high], tokens[low:high], busy)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    times = np.concatenate([one.time for one in found])
    return Steps(times, np.concatenate([one.value for one in found])) if len(times) else _NOTHING


def _of_process(time: Floats, counted: Floats, tokens: Floats, busy: Steps) -> Steps:
    if len(time) < ENOUGH_LATER + 2 or counted[0] > FIRST_STEPS:
        return _NOTHING
    steps, busy_s = np.diff(counted), busy.integral(time[:-1], time[1:])
    worked = (steps > 0) & (busy_s > 0)
    length = np.divide(busy_s, steps, out=np.full(len(steps), np.nan), where=worked)
    size = np.divide(np.diff(tokens), steps, out=np.full(len(steps), np.nan), where=worked)
    first = counted[:-1] < FIRST_STEPS
    later = worked & ~first & (steps >= LEAST_STEPS)
    if later.sum() < ENOUGH_LATER:
        return _NOTHING
    usual = _usual_s(length[later], size[later], size)
    slow = worked & first & (length > SLOWER_RATIO * usual)
    if not slow[np.flatnonzero(worked)[0]]:
        return _NOTHING
    # Slow from the first step on, without a break but for stretches in which nothing ran.
    broken = np.flatnonzero(worked & ~slow)
    until = int(broken[0]) if len(broken) else len(steps)
    share = np.where(slow[:until], 1.0 - np.divide(usual[:until], length[:until]), 0.0)
    return Steps(time[: until + 1], np.append(or_zero(share), 0.0))


def _usual_s(length: Floats, size: Floats, wanted: Floats) -> Floats:
    """A usual step of so many tokens: the median one, and what more tokens add (the median slope over pairs, Theil 1950 and Sen 1968,
    here of each stretch with the middle of all)."""
    middle, usual = float(np.nanmedian(size)), float(np.median(length))
    if not np.isfinite(middle):
        return np.full(len(wanted), usual)
    off = size - middle
    sure = np.abs(off) > 0.25 * middle
    slope = max(float(np.median((length - usual)[sure] / off[sure])), 0.0) if sure.any() else 0.0
    return np.asarray(usual + slope * np.maximum(or_zero(wanted) - middle, 0.0))
