"""Time of calls that passes outside their engine: between the outer boundary, a server's or the client's, and the engine's."""

from __future__ import annotations

import numpy as np
import polars as pl

from phasewise.analyzer.intervals import Bools
from phasewise.analyzer.statistics import floats, known

HELD_RATIO = 0.25  # of the end-to-end time: so late a first token is no matter of the way to the client


def outside_s(rows: pl.DataFrame, metric: str = "e2e") -> dict[str, float]:
    """Seconds between the caller's boundary and the engine's, by cause; durations only, never a difference of two clocks.

    Where the outer boundary is a server span around the engine, the time belongs to the host in front of it; where it is the
    client's own record, to the client's side (its network, buffers and load generator are in it). metric: e2e, or ttft, which only a
    client tells: of that, what a server's span holds before the engine's begins is the host's.
    """
    if rows.is_empty():
        return {}
    outer, inner = ("entry_ttft_s", "ttft_s") if metric == "ttft" else ("entry_e2e_s", "e2e_s")
    with np.errstate(invalid="ignore"):  # of two that are infinite: unknown as well
        gap = np.clip(known(floats(rows, outer) - floats(rows, inner)), 0.0, None)
    client = told_by_client(rows)
    host = np.where(client, 0.0, gap)
    if metric == "ttft":
        host = np.minimum(host, known(floats(rows, "entry_before_s")))
    found = {"host": float(host.sum()), "client": float((gap - host).sum())}
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def told_by_client(rows: pl.DataFrame) -> Bools:
    """Which outer boundaries are clients' own. Rows of earlier releases do not say whose it is: those with a client's TTFT are."""
    client = pl.coalesce(pl.col("entry_side") == "client", pl.col("entry_ttft_s").is_not_null())
    return rows.select(client).to_series().to_numpy()


def held_back_s(rows: pl.DataFrame) -> float | None:
    """Median seconds by which the client's first token comes after the engine's; None where that is under HELD_RATIO of the median
    end-to-end time, or nobody tells both."""
    held = floats(rows, "entry_ttft_s") - floats(rows, "ttft_s")
    both = np.isfinite(held)
    if not both.any():
        return None
    median, e2e = float(np.median(held[both])), float(np.nanmedian(floats(rows, "e2e_s")))
    return median if median >= HELD_RATIO * e2e > 0 else None
