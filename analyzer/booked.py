"""Seconds of some requests by cause, while they are added up and closed to what each request took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats
from phasewise.rules.vocabulary import CAUSES

CLAMP_S = 0.002  # known phases may exceed end to end by this or by 1 %: the longest is cut
CLAMP_RATIO = 0.01
ROUNDING_S = 1e-9  # a smaller excess is that of sums of floats, and no contradiction


class Booked:
    """Seconds of n requests by cause. Most engines fill few of the causes; what nobody fills costs nothing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._part: dict[str, Floats] = {}
        self._nothing = np.zeros(rows)
        self._nothing.setflags(write=False)

    @classmethod
    def joined(cls, parts: Sequence[Booked]) -> Booked:
        """The requests of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        whole = cls(sum(part.rows for part in parts))
        filled = {cause for part in parts for cause in part._part}
        whole._part = {cause: np.concatenate([part[cause] for part in parts]) for cause in CAUSES if cause in filled}
        return whole

    def part(self, cut: slice) -> Booked:
        """Some of the requests."""
        some = Booked(len(self._nothing[cut]))
        some._part = {cause: seconds[cut] for cause, seconds in self._part.items()}
        return some

    def with_more(self, seconds: Mapping[str, Floats]) -> Booked:
        """All requests, with more seconds of some causes."""
        whole = self.part(slice(None))
        for cause, more in seconds.items():
            whole.add(cause, more)
        return whole

    @property
    def filled(self) -> tuple[str, ...]:
        """Causes that something was booked to, in the order of CAUSES: sums over them are the same whoever booked first."""
        return tuple(cause for cause in CAUSES if cause in self._part)

    def __getitem__(self, cause: str) -> Floats:
        return self._part.get(cause, self._nothing)

    def add(self, cause: str, seconds: Floats) -> None:
        there = self._part.get(cause)
        self._part[cause] = seconds if there is None else there + seconds

    def replace(self, chosen: Bools, other: Mapping[str, Floats]) -> None:
        """Takes the chosen rows of all causes from `other`."""
        if chosen.all():
            self._part = dict(other)
            return
        for cause in CAUSES:
            if cause in self._part or cause in other:
                self._part[cause] = np.where(chosen, other.get(cause, self._nothing), self[cause])

    def total(self, causes: Iterable[str]) -> Floats:
        """Seconds of several causes together, added in their order."""
        return sum((self._part[cause] for cause in causes if cause in self._part), start=self._nothing)

    def close(self, e2e_s: Floats) -> Bools:
        """Makes the parts of each row add up to its end-to-end time; returns which rows were cut."""
        over = self.total(CAUSES) - e2e_s
        known = np.isfinite(e2e_s)
        fits = known & (over <= np.maximum(CLAMP_S, CLAMP_RATIO * e2e_s))
        cut = fits & (over > 0)
        self._cut(np.flatnonzero(cut), over)
        self.add("unexplained", np.where(fits & (over < 0), -over, 0.0))
        if not fits.all():
            for cause, seconds in self._part.items():
                self._part[cause] = np.where(fits, seconds, 0.0)
            self._part["unexplained"] = np.where(known & ~fits, e2e_s, self._part["unexplained"])
        return np.asarray(cut & (over > ROUNDING_S), dtype=np.bool_)

    def _cut(self, which: np.ndarray[tuple[int], np.dtype[np.intp]], over: Floats) -> None:
        """Takes what is too much from the longest part of some rows."""
        if not len(which):
            return
        causes = self.filled
        parts = np.stack([self._part[cause][which] for cause in causes])
        longest = parts.argmax(axis=0)
        for k, cause in enumerate(causes):
            here = longest == k
            if here.any():
                rows, seconds = which[here], self._part[cause].copy()
                seconds[rows] -= np.minimum(over[rows], seconds[rows])
                self._part[cause] = seconds
