"""Whose prompts took the time that requests lost, from spans alone: those that were prefilled meanwhile on the same replica."""

from __future__ import annotations

import numpy as np
import polars as pl

from phasewise.analyzer.blame import Axis, Losses, Prompts
from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.interference_steps import PARTS
from phasewise.analyzer.intervals import Floats, or_zero, rates, valid
from phasewise.analyzer.overlaps import Overlaps, known_s
from phasewise.analyzer.phase_causes import book_before_queue, book_prefill
from phasewise.analyzer.step_table import Ints


def booked_by_overlap(rows: Rows, around: Overlaps, booked_s: Floats) -> Floats:
    """[parts, targets] seconds that attribution books from spans, by where they lie; together `booked_s`, the seconds that are stored.

    What lies before the queue and in the prefill follows from the spans, the rest lies in the decode.
    """
    front, prefill = Booked(rows.targets), Booked(rows.targets)
    book_before_queue(front, rows, around)
    book_prefill(
        prefill, rows, around, links=None, host_s=0.0
    )  # what links and first steps had of it is not in booked_s
    found = np.zeros((len(PARTS), rows.targets))
    found[PARTS.index("front")] = np.minimum(front["interference"], booked_s)
    left = booked_s - found[PARTS.index("front")]
    found[PARTS.index("prefill")] = np.minimum(prefill["interference"], left)
    found[PARTS.index("decode")] = left - found[PARTS.index("prefill")]
    return found


def time_axis(rows: Rows, asked: Floats) -> Axis:
    """Cells are stretches of time in which the same prompts are prefilled, each counting by its tokens a second as in attribution
    (`own_share_s`). asked: [parts, targets] booked seconds."""
    start, end = rows["scheduled_unix_ns"], rows["first_token_unix_ns"]
    culprit = np.flatnonzero(valid(start, end))
    uncached = rows["input_tokens"] - or_zero(rows["cached_tokens"])
    call = _calls(rows.series("call_key"))
    together = np.bincount(call)[call]
    rate = rates((end - start)[culprit], (uncached / together)[culprit])
    runs = _runs(rows, asked)
    moments = np.unique(np.concatenate((start[culprit], end[culprit], *(one for _, _, *ends in runs for one in ends))))
    if len(moments) < 2:
        moments = np.array([0.0, 0.0])

    def cell(moment: Floats) -> Ints:
        return np.searchsorted(moments, moment).astype(np.int64)

    n = [len(victim) for _, victim, _, _ in runs]
    losses = Losses(
        victim=np.concatenate([victim for _, victim, _, _ in runs]),
        low=cell(np.concatenate([low for _, _, low, _ in runs])),
        high=cell(np.concatenate([high for _, _, _, high in runs])),
        part=np.repeat([part for part, _, _, _ in runs], n).astype(np.int64),
        kind=np.zeros(sum(n), dtype=np.int64),
        scale=np.ones(sum(n)),
    )
    prompts = Prompts(
        culprit.astype(np.int64),
        cell(start[culprit]),
        cell(end[culprit]),
        rate,
        np.zeros(len(culprit), dtype=np.bool_),
    )
    target = np.arange(len(rows)) if rows.target is None else rows.target
    but = _pairs(call[target[losses.victim]], call[prompts.row])
    return Axis(np.diff(moments)[None], np.zeros(len(moments) - 1), prompts, losses, but)


def _runs(rows: Rows, asked: Floats) -> list[tuple[int, Ints, Floats, Floats]]:
    """Part, targets, and begin and end of where each lost time."""
    scheduled, first = rows.own("scheduled_unix_ns"), rows.own("first_token_unix_ns")
    prefilled = np.minimum(first, scheduled + known_s(rows.own("prefill_s")))
    where = {
        "front": (rows.own("arrival_unix_ns"), rows.own("queued_unix_ns")),
        "prefill": (scheduled, prefilled),
        "decode": (first, rows.own("finished_unix_ns")),
    }
    found = []
    for name, (low, high) in where.items():
        part = PARTS.index(name)
        some = np.flatnonzero((asked[part] > 0) & valid(low, high))
        found.append((part, some.astype(np.int64), low[some], high[some]))
    return found


def _calls(call_key: pl.Series) -> Ints:
    """A number for each row's call; a row without a key is a call of its own."""
    keys = call_key.to_frame("key").with_row_index("row")
    first = keys.with_columns(pl.col("row").min().over("key").alias("call"))
    own = pl.when(pl.col("key").is_null()).then(pl.col("row")).otherwise(pl.col("call"))
    return first.select(call=own.cast(pl.Int64))["call"].to_numpy()


def _pairs(losing: Ints, taking: Ints) -> tuple[Ints, Ints]:
    """All pairs of a loss and a prompt of one call: sequences of one call share its prompt, and no request loses time to itself."""
    order = np.argsort(taking, kind="stable")
    low = np.searchsorted(taking[order], losing, side="left")
    count = np.searchsorted(taking[order], losing, side="right") - low
    inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    loss = np.repeat(np.arange(len(losing)), count)
    return loss.astype(np.int64), order[np.repeat(low, count) + inside].astype(np.int64)
