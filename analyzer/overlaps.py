"""What the requests of a context did to each other, each found when it is first asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from phasewise.analyzer.cold import cold_share
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Floats, Index, Steps, covered, level, or_zero, own_share_s, valid
from phasewise.analyzer.queueing import Samples
from phasewise.analyzer.siblings import Siblings, siblings_of


def known_s(values: Floats) -> Floats:
    """Negative and unknown count as nothing; what they hide lands in the residual."""
    return np.fmax(values, 0.0)


class Overlaps:
    """frame: samples with all their columns; sampled: a good part of the requests sends no spans; those that do then say nothing of how
    many ran together, samples do."""

    def __init__(self, rows: Rows, samples: Samples, sampled: bool, frame: pl.DataFrame) -> None:
        self._rows = rows
        self._frame = frame
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
    def uncached_tokens(self) -> Floats:
        """Of each prompt; where nothing tells of the cache, the whole of it."""
        return self._rows["input_tokens"] - or_zero(self._rows["cached_tokens"])

    @cached_property
    def prompts(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of all rows: seconds of prefill, when it began and ended, and its own share of the steps it shared with other prompts."""
        prefill = known_s(self._rows["prefill_s"])
        start, end = self._rows["scheduled_unix_ns"], self._rows["first_token_unix_ns"]
        end = np.where(np.isfinite(prefill), np.minimum(end, start + prefill), end)
        together = self.siblings.counts(len(self._rows)) if self.siblings.groups else 1.0
        own = np.minimum(own_share_s(start, end, self.uncached_tokens / together) * together, end - start)
        share = np.divide(own, end - start, out=np.ones_like(prefill), where=valid(start, end))
        return prefill, start, end, share

    @cached_property
    def siblings(self) -> Siblings:
        if not self._rows.shares_calls:
            return Siblings()
        return siblings_of(self._rows.series("call_key"))

    @cached_property
    def cold(self) -> Steps:
        """Share of the time by which the first steps of the engine's process exceed its later ones."""
        return cold_share(self._frame, self._rows.origin_unix_ns, self.running)

    def cold_s(self, which: Index | slice, start: Floats, end: Floats) -> Floats:
        """Seconds of some [start, end) that are more than such steps take later. start, end: of all rows; which: those that are wanted."""
        if not self.cold.value.any():
            return np.zeros(len(start[which]))
        return or_zero(self.cold.integral(start[which], end[which]))

    @cached_property
    def batch_mean(self) -> Floats:
        """Requests that ran beside each target while it decoded, itself among them, mean over time; NaN where nothing tells."""
        return self.batch_of(slice(None) if self._rows.target is None else self._rows.target)

    def batch_of(self, which: Index | slice) -> Floats:
        """The same of some rows."""
        start, end = self._rows["first_token_unix_ns"][which], self._rows["finished_unix_ns"][which]
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
