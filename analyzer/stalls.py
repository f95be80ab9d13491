"""Stalls of single requests: decodes that wait for something that those beside them do not wait for.

A step gives every sequence in it a token. What makes steps long, be it kernels, the host or links, makes them long for all sequences of
a batch of that size; a request whose tokens come far apart while others of its size of batch get theirs waits for a matter of its own
(a tool that holds its seat, a client that reads slowly, a grammar), and nothing in its span tells for which.
"""

from __future__ import annotations

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats

ENOUGH_BESIDE = 20
BESIDE = 100  # requests with the nearest batches, whose step says what is usual
USUAL_QUANTILE = 0.1  # low, since most requests of a service may call tools
STALL_RATIO = 1.0  # of the usual step above it: less may be who ran beside it
SHORTEST_STALL_S = 0.1


def stalled_s(decode_s: Floats, gaps: Floats, batch: Floats, kernels_s: Floats | None, chosen: Bools) -> Floats:
    """Part of each decode beyond what a usual step of its batch takes, where that is more than twice as long.

    decode_s: without others' prefill, preemption and first steps; kernels_s: what the kernels of such a step should take, None unknown:
    sequences of one batch may have contexts of different lengths; chosen: requests to judge and to judge by. All of one engine.
    """
    known = chosen & np.isfinite(batch) & (gaps > 0) & (decode_s > 0)
    if kernels_s is not None:
        known &= np.isfinite(kernels_s) & (kernels_s > 0)
    found = np.zeros(len(decode_s))
    if known.sum() < ENOUGH_BESIDE:
        return found
    step_s = decode_s[known] / gaps[known]
    unit_s = np.ones_like(step_s) if kernels_s is None else kernels_s[known]
    usual = _usual(batch[known], step_s / unit_s) * unit_s
    over = (step_s - usual) * gaps[known]
    found[known] = np.where((step_s - usual > STALL_RATIO * usual) & (over > SHORTEST_STALL_S), over, 0.0)
    return found


def _usual(batch: Floats, length: Floats) -> Floats:
    """A low quantile of the lengths of those with the nearest batches, in groups of BESIDE by rank."""
    order = np.lexsort((length, batch))
    groups = max(len(order) // BESIDE, 1)
    usual = np.empty(len(order))
    for part in np.array_split(order, groups):
        usual[part] = np.quantile(length[part], USUAL_QUANTILE)
    return usual
