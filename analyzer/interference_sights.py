"""What interference is divided by, for the requests of one replica: their prompts, and where its requests lost time to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from phasewise.analyzer.blame import Axis, closed
from phasewise.analyzer.context_rows import Rows, Stack
from phasewise.analyzer.interference_spans import booked_by_overlap, time_axis
from phasewise.analyzer.interference_steps import PARTS, seen_anywhere, step_axis
from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.overlaps import Overlaps
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.step_table import Ints
from phasewise.analyzer.stepwise import Met, book_steps
from phasewise.collector.context import Context
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import cause_column

COLUMN = cause_column("interference")
# Where attribution divides a prefill it has met the others' prompts; of the rest it books no more than it sees overlap.
_WHOLE = np.array([name == "prefill" for name in PARTS])


@dataclass(frozen=True, slots=True)
class Sight:
    """One replica. rows: its requests, in order of time; booked_ns: of the targets, as stored; axes: losses are those of the targets."""

    rows: Rows
    booked_ns: Ints
    axes: tuple[Axis, ...]

    def seconds(self, column_of: Ints, columns: int) -> Floats:
        """[targets, 2 * columns] seconds lost to the rows of each column (one a row, -1: none); the even ones are those that steps
        tell, the odd ones those that an overlap does."""
        found = np.zeros((self.rows.targets, 2 * columns))
        for axis in self.axes:
            of = column_of[axis.prompts.row] * 2 + ~axis.prompts.measured
            of = np.where(column_of[axis.prompts.row] < 0, -1, of)
            for column in np.unique(of[of >= 0]).tolist():
                lost = axis.lost_s(of == column)
                found[:, column] += np.bincount(axis.losses.victim, weights=lost, minlength=len(found))
        return found

    def taken_ns(self) -> Ints:
        """Nanoseconds that each row's prompt took of all targets, rounded one by one."""
        found = np.zeros(len(self.rows))
        for axis in self.axes:
            found += np.bincount(axis.prompts.row, weights=axis.taken_s(), minlength=len(found))
        return np.rint(found * 1e9).astype(np.int64)

    def takers(self, target: int) -> Iterator[tuple[Ints, Floats, Bools]]:
        """Rows whose prompts took time of one target, the seconds, and whether steps tell it; a row may come more than once."""
        for axis in self.axes:
            for which, seconds in axis.takers(axis.losses.victim == target):
                yield axis.prompts.row[which], seconds, axis.prompts.measured[which]


def sight_of(context: Context, rulebook: Rulebook) -> Sight | None:
    """None where no target has any interference booked. context.requests has the column of it besides what attribution is given."""
    if context.requests.is_empty() or not len(context.targets):
        return None
    stack = Stack([context.requests])
    (rows,) = stack.rows([context.targets])
    booked = rows.chosen(rows.series(COLUMN).fill_null(0.0).fill_nan(0.0).to_numpy())
    booked_ns = np.rint(np.clip(booked, 0.0, None) * 1e9).astype(np.int64)
    if not booked_ns.any():
        return None
    booked_s = booked_ns * 1e-9
    mets: list[Met] = []
    book_steps(context, stack.models[0], rows, rulebook, mets)
    by_steps, stepped = _by_steps(mets, rows, booked_s)
    around = Overlaps(rows, Samples(*(np.empty(0) for _ in range(6))), sampled=False, frame=pl.DataFrame())
    by_overlap = booked_by_overlap(rows, around, booked_s)
    # What lies before the queue is found from spans, whatever the engine sends besides.
    front = by_overlap[:1]
    room = by_steps.sum(axis=(0, 1)) + front[0]
    scale = np.divide(booked_s, room, out=np.zeros_like(room), where=room > 0)
    by_steps = by_steps * scale
    by_overlap = np.where(stepped, 0.0, by_overlap)
    by_overlap[:1] = np.where(stepped, front * scale, by_overlap[:1])
    axes: list[Axis] = []
    seen = seen_anywhere(mets, len(rows))
    for met, asked in zip(mets, by_steps, strict=True):
        if asked.any():
            axes.append(closed(step_axis(met, rows, seen, asked), asked, np.ones_like(_WHOLE)))
    if by_overlap.any():
        axes.append(closed(time_axis(rows, by_overlap), by_overlap, _WHOLE))
    return Sight(rows, booked_ns, tuple(axes))


def _by_steps(mets: Sequence[Met], rows: Rows, booked_s: Floats) -> tuple[Floats, Bools]:
    """[processes, parts, targets] seconds as found from steps, and the targets for which there are any."""
    found = np.zeros((len(mets), len(PARTS), rows.targets))
    for place, met in enumerate(mets):
        for name, seconds in met.booked.items():
            found[place, PARTS.index(name)] = np.where(met.covered & (booked_s > 0), seconds, 0.0)
    return found, np.asarray(found.sum(axis=(0, 1)) > 0, dtype=np.bool_)
