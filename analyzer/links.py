"""Links between the devices of one node, told from prompts: what a prompt takes beyond its kernels, and by how much more a longer one.

The bytes that the devices of a tensor-parallel group exchange grow with the tokens of a step, as its compute does; curves of measured
kernels say how long the compute takes, and what they leave is the links'. A constant per prompt is the host's, not theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats, or_zero
from phasewise.analyzer.kernel_times import KernelTimes, Parts

ENOUGH_PROMPTS = 30
SLOWER_RATIO = 1.5  # than stated: less may be the error of the curves
OVER_RATIO = 0.25  # of a longer prompt's expected time: the same
MOST_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Links:
    """slow_ratio: how much longer collectives take than stated (1: nothing says so)."""

    kernels: KernelTimes
    slow_ratio: float

    def share(self, tokens: Floats) -> Floats:
        """Of a prompt of so many tokens the part that its devices exchange bytes."""
        parts = self.prompts(tokens)
        return np.divide(parts.links, parts.total, out=np.zeros_like(tokens), where=parts.total > 0)

    def prompts(self, tokens: Floats) -> Parts:
        """Steps of nothing but a prompt of so many tokens, without its attention."""
        return self.slowed(self.kernels.linear(tokens, np.ones_like(tokens)))

    def slowed(self, parts: Parts) -> Parts:
        return Parts(parts.weights, parts.kv, parts.compute, parts.links * self.slow_ratio, parts.floors)


def links_of(kernels: KernelTimes, tokens: Floats, prefill_s: Floats, alone: Bools) -> Links:
    """From the prompts that had their steps to themselves. tokens: computed, NaN unknown."""
    known = alone & np.isfinite(tokens) & (tokens > 0) & (prefill_s > 0)
    if known.sum() < ENOUGH_PROMPTS:
        return Links(kernels, 1.0)
    tokens, seconds = tokens[known], prefill_s[known]
    parts = kernels.linear(tokens, np.ones_like(tokens))
    rest = seconds - (parts.total - parts.links)
    middle = np.median(tokens)
    short, long = tokens <= middle, tokens > middle
    if short.sum() < ENOUGH_PROMPTS // 3 or long.sum() < ENOUGH_PROMPTS // 3:
        return Links(kernels, 1.0)
    run = float(np.median(parts.links[long]) - np.median(parts.links[short]))
    rise = float(np.median(rest[long]) - np.median(rest[short]))
    ratio = min(rise / run, MOST_RATIO) if run > 0 else 1.0
    expected, over = float(np.median(parts.total[long])), (ratio - 1.0) * float(np.median(parts.links[long]))
    return Links(kernels, ratio if ratio >= SLOWER_RATIO and over >= OVER_RATIO * expected else 1.0)


def divided(seconds: Floats, share: Floats, *, others: bool) -> tuple[Floats, Floats]:
    """Seconds of prompts as (compute or others' prompts, links). Without the prompts of others their bytes would not be sent either:
    what both would save is divided half and half, as in `kernel_times`."""
    links = seconds * or_zero(share) * (0.5 if others else 1.0)
    return seconds - links, links
