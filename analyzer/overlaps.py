"""What the requests of a context did to each other, each found when it is first asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Floats, Index, Steps, covered, level, or_zero, valid
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.siblings import Siblings, siblings_of


class Overlaps:
    """sampled: a good part of the requests sends no spans; those that do then say nothing of how many ran together, samples do."""

    def __init__(self, rows: Rows, samples: Samples, sampled: bool) -> None:
        self._rows = rows
        self._samples = samples
        self.sampled = sampled

    @cached_property
    def running(self) -> Steps:
        if self.sampled:
            return self._samples.step(self._samples.running)
        return level(self._rows["scheduled_unix_ns"], self._rows["finished_unix_ns"])

    @cached_property
    def together(self) -> Steps:
        """Requests in the engine, waiting or running."""
        if self.sampled:
            return self._samples.step(self._samples.running + or_zero(self._samples.waiting))
        return level(self._rows["arrival_unix_ns"], self._rows["finished_unix_ns"])

    @cached_property
    def prefills(self) -> Steps:
        """1 while some prompt is prefilled."""
        return covered(self._rows["scheduled_unix_ns"], self._rows["first_token_unix_ns"])

    @cached_property
    def siblings(self) -> Siblings:
        if not self._rows.shares_calls:
            return Siblings()
        return siblings_of(self._rows.series("call_key"))

    @cached_property
    def batch_mean(self) -> Floats:
        """Requests that ran beside each target while it decoded, itself among them, mean over time; NaN where nothing tells."""
        start, end = self._rows.own("first_token_unix_ns"), self._rows.own("finished_unix_ns")
        unknown = np.full(len(end), np.nan)
        if not len(self.running.time):
            return unknown
        np.divide(self.running.integral(start, end), end - start, out=unknown, where=valid(start, end))
        return unknown

    def others_prefill_s(self, which: Index | slice, start: Floats, end: Floats) -> Floats:
        """Seconds of some [start, end) that prefills of other calls cover; the sequences of one call share its prompt.

        start, end: of all rows; which: those that are wanted.
        """
        found = or_zero(self.prefills.integral(start[which], end[which]))
        if self.siblings.groups:
            scheduled, first = self._rows["scheduled_unix_ns"], self._rows["first_token_unix_ns"]
            found = np.maximum(found - self.siblings.covered_s(scheduled, first, start, end)[which], 0.0)
        return found
