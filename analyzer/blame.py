"""Seconds that some requests lost to others' prompts, divided among those whose prompts they were.

All lies on an axis of cells: the steps of an engine, or stretches of time. A cell tells how many seconds a request that stands in it
loses (`density`), and each culprit with a prompt there has a part of them in proportion to its rate. A victim's loss over a run of
cells to any set of culprits is then two look-ups in a running sum, and what one culprit took of all victims as well: the work
grows with requests, cells and sets, never with pairs of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.step_table import Ints

LEAST_RATIO = 1e-9  # of a loss before its own request was left out: less is what rounding left of nothing


@dataclass(frozen=True, slots=True)
class Prompts:
    """k runs of cells [low, high) with a prompt of request `row`. rate: its weight in each of them; measured: the engine says that it
    was there, else an overlap of times does."""

    row: Ints
    low: Ints
    high: Ints
    rate: Floats
    measured: Bools


@dataclass(frozen=True, slots=True)
class Losses:
    """m runs of cells [low, high) in which target `victim` lost time. part: of its phases, an index; kind: which density counts; scale:
    by how much it is multiplied."""

    victim: Ints
    low: Ints
    high: Ints
    part: Ints
    kind: Ints
    scale: Floats


@dataclass(frozen=True, slots=True)
class Axis:
    """density: [kinds, cells] seconds; nobody: [cells] rate of prompts that no request in sight had; but: pairs (loss, prompt) that do
    not count: a request's own, and its siblings' where they share the prompt. total, share: see `_total`, `_share`."""

    density: Floats
    nobody: Floats
    prompts: Prompts
    losses: Losses
    but: tuple[Ints, Ints]
    total: Floats = field(init=False)
    share: Floats = field(init=False)

    def __post_init__(self) -> None:
        cells = self.density.shape[1]
        total = _added(self.prompts, self.prompts.rate, cells) + self.nobody
        per_rate = np.divide(self.density, total, out=np.zeros_like(self.density), where=total > 0)
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "share", running(per_rate))  # [kinds, cells + 1] of seconds a unit of rate

    def lost_s(self, chosen: Bools | None = None) -> Floats:
        """Seconds of each loss that the chosen prompts took; None: all of them and those of nobody in sight."""
        losses, cells = self.losses, self.density.shape[1]
        if chosen is None:
            rate, own = self.total, np.ones(len(self.prompts.row), dtype=np.bool_)
        else:
            some = np.flatnonzero(chosen)
            rate, own = _added(self.prompts, self.prompts.rate, cells, some), chosen
        part = np.divide(rate, self.total, out=np.zeros(cells), where=self.total > 0)
        sums = running(self.density * part)
        found = (sums[losses.kind, losses.high] - sums[losses.kind, losses.low]) * losses.scale
        left_out = np.bincount(self.but[0], weights=self._without() * own[self.but[1]], minlength=len(found))
        return np.where(found - left_out > LEAST_RATIO * found, found - left_out, 0.0)

    def taken_s(self) -> Floats:
        """Seconds that each prompt took of all losses."""
        losses, prompts = self.losses, self.prompts
        found = np.zeros(len(prompts.row))
        for kind, sums in enumerate(self._loads()):
            if (losses.kind == kind).any():
                found += (sums[prompts.high] - sums[prompts.low]) * prompts.rate
        mine = np.bincount(self.but[1], weights=self._without(), minlength=len(found))
        return np.where(found - mine > LEAST_RATIO * found, found - mine, 0.0)

    def takers(self, chosen: Bools) -> Iterator[tuple[Ints, Floats]]:
        """Of each chosen loss the prompts that share cells with it, and the seconds each took. For few losses."""
        losses, prompts = self.losses, self.prompts
        for k in np.flatnonzero(chosen).tolist():
            low, high = np.maximum(prompts.low, losses.low[k]), np.minimum(prompts.high, losses.high[k])
            which = np.flatnonzero(high > low)
            sums = self.share[losses.kind[k]]
            seconds = (sums[high[which]] - sums[low[which]]) * prompts.rate[which] * losses.scale[k]
            allowed = ~np.isin(which, self.but[1][self.but[0] == k])
            yield which[allowed], seconds[allowed]

    def _loads(self) -> Iterator[Floats]:
        """By kind of density: running sum of what all victims together lose a unit of rate."""
        cells = self.density.shape[1]
        for kind in range(self.density.shape[0]):
            own = self.losses.kind == kind
            scale = np.where(own, self.losses.scale, 0.0)
            standing = _spread(self.losses.low, self.losses.high, scale, cells)
            yield running((np.diff(self.share[kind]) * standing)[None])[0]

    def _without(self) -> Floats:
        """Seconds of each pair that does not count."""
        loss, prompt = self.but
        low = np.maximum(self.losses.low[loss], self.prompts.low[prompt])
        high = np.maximum(np.minimum(self.losses.high[loss], self.prompts.high[prompt]), low)
        kind = self.losses.kind[loss]
        return np.asarray(
            (self.share[kind, high] - self.share[kind, low]) * self.prompts.rate[prompt] * self.losses.scale[loss]
        )


def running(values: Floats) -> Floats:
    """Running sums of each row with a 0 in front: [rows, n + 1]."""
    found = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=found[:, 1:])
    return found


def _added(prompts: Prompts, rate: Floats, cells: int, some: Ints | None = None) -> Floats:
    if some is None:
        return _spread(prompts.low, prompts.high, rate, cells)
    return _spread(prompts.low[some], prompts.high[some], rate[some], cells)


def _spread(low: Ints, high: Ints, weight: Floats, cells: int) -> Floats:
    """Sum of the weights of the runs that hold each cell."""
    if (high == low + 1).all():
        return np.bincount(low, weights=weight, minlength=cells).astype(np.float64)
    change = np.bincount(low, weights=weight, minlength=cells + 1)
    change = change - np.bincount(high, weights=weight, minlength=cells + 1)
    total = np.cumsum(change)[:cells]
    # A sum of floats that should be zero is not: where nobody stands, nothing weighs.
    count = np.bincount(low, minlength=cells + 1) - np.bincount(high, minlength=cells + 1)
    return np.where(np.cumsum(count)[:cells] > 0, np.maximum(total, 0.0), 0.0)


def closed(axis: Axis, booked: Floats, whole: Bools) -> Axis:
    """The same with every target's losses of each part made to add up to what is booked to it ([parts, targets] seconds); of parts that are
    not `whole` ([parts]) to no more than was lost: what overlaps less than is booked stays nobody's."""
    losses = axis.losses
    parts, targets = booked.shape
    place = losses.part * targets + losses.victim
    raw = np.bincount(place, weights=axis.lost_s(), minlength=parts * targets)
    factor = np.divide(booked.reshape(-1), raw, out=np.zeros(parts * targets), where=raw > 0)
    factor = np.where(np.repeat(whole.reshape(-1), targets), factor, np.minimum(factor, 1.0))
    scaled = Losses(losses.victim, losses.low, losses.high, losses.part, losses.kind, losses.scale * factor[place])
    return Axis(axis.density, axis.nobody, axis.prompts, scaled, axis.but)


def divided_ns(booked_ns: Ints, seconds: Floats) -> Ints:
    """Whole nanoseconds of each target by column, [targets, columns + 1]: the last is what no column explains. Each row adds up to what
    is booked; columns that hold more than that are cut in proportion."""
    booked = booked_ns * 1e-9
    total = seconds.sum(axis=1)
    factor = np.divide(booked, total, out=np.ones_like(total), where=total > booked)
    upto = np.rint(np.cumsum(seconds * factor[:, None], axis=1) * 1e9).astype(np.int64)
    upto = np.minimum(upto, booked_ns[:, None])
    if seconds.shape[1]:
        near = np.abs(upto[:, -1] - booked_ns) <= 1  # rounded on the way, not missing
        upto = np.where((upto == upto[:, -1:]) & near[:, None], booked_ns[:, None], upto)
    edges = np.concatenate((np.zeros((len(booked_ns), 1), dtype=np.int64), upto, booked_ns[:, None]), axis=1)
    return np.asarray(np.diff(edges, axis=1))
