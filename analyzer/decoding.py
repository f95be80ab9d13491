"""What a decode phase is made of when the engine sends it whole: clean steps, others' prefill, preemption, and the bytes read.

Rows are requests, arrays of length n; seconds; NaN is unknown.
"""

from __future__ import annotations

import numpy as np

from phasewise.analyzer.intervals import Bools, Floats, or_zero

CLEAN_OVERLAP_RATIO = 0.05  # a decode that others' prefill covers by less is called clean
ENOUGH_CLEAN = 3
BANDWIDTH_EFFICIENCY = 0.6  # achieved over datasheet bandwidth in decode, roofline.md 4.1 (0.5-0.8)


def clean_tpot_s(decode_s: Floats, gaps: Floats, overlap_s: Floats, preempting: bool) -> float | None:
    """Seconds of one decode step without others' prefill, from the requests of one instance and hour.

    decode_s: first to last token; gaps: output tokens - 1; overlap_s: part of it that others' prefill covers.
    The median of the clean requests where there are at least three; else the non-negative least-squares fit
    decode = tpot x gaps + rate x overlap. While sequences are preempted hardly a request is clean of that: then the lowest
    tenth. None without a request of two tokens.
    """
    ok = np.isfinite(decode_s) & (gaps > 0) & (decode_s > 0)
    if not ok.any():
        return None
    d, n, o = decode_s[ok], gaps[ok], or_zero(overlap_s[ok])
    if preempting:
        return float(np.quantile(d / n, 0.1))
    clean = o / d < CLEAN_OVERLAP_RATIO
    if clean.sum() >= ENOUGH_CLEAN:
        return float(np.median((d / n)[clean]))
    nn, no, oo, nd, od = (float((x * y).sum()) for x, y in ((n, n), (n, o), (o, o), (n, d), (o, d)))
    determinant = nn * oo - no * no
    if determinant <= 1e-9 * max(nn * oo, 1e-12):
        return float(nd / nn)
    tpot, rate = (nd * oo - od * no) / determinant, (od * nn - nd * no) / determinant
    if rate < 0:
        return float(nd / nn)
    floor = float(np.quantile(np.maximum(d - o, 0.0) / n, 0.1))
    return max(tpot, floor)


def interference_s(decode_s: Floats, gaps: Floats, overlap_s: Floats, clean_s: float | None) -> Floats:
    """Part of each decode that others' prefill steps took: what clean steps do not explain, at most the overlap.

    A step that carries a prefill chunk still gives each decoding sequence its token, so the overlap alone counts too much.
    """
    if clean_s is None:
        return np.zeros_like(decode_s)
    return or_zero(np.minimum(np.maximum(decode_s - clean_s * gaps, 0.0), np.minimum(overlap_s, decode_s)))


def preempted_s(
    decode_s: Floats, gaps: Floats, interference: Floats, clean_s: float | None, preempting: Bools
) -> Floats:
    """Part of each decode lost to preemption and recomputation: the rest beyond clean steps, where the engine's preemption
    counter moved during that decode."""
    if clean_s is None:
        return np.zeros_like(decode_s)
    rest = np.maximum(decode_s - interference - clean_s * gaps, 0.0)
    return or_zero(np.where(preempting, rest, 0.0))
