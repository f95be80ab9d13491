"""When requests come: gaps of a public trace or of a renewal process, scaled so that their mean is one.

The shape of a burst survives the scaling, the rate is set by the scenario (a multiple of what its deployment can serve).
"""

from __future__ import annotations

import csv
import gzip
import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from phasewise.instrumented_engine.recording import Floats
from phasewise.instrumented_engine.truth.published import AZURE_CODE_CV, SERVEGEN_CV_QUANTILES

PATTERNS = ("even", "poisson", "azure_conv", "azure_code", "mooncake", "servegen")
_AZURE = {
    "azure_conv": "azure2023/AzureLLMInferenceTrace_conv.first40min.csv.gz",
    "azure_code": "azure2023/AzureLLMInferenceTrace_code.first35min.csv.gz",
}
_MOONCAKE = "mooncake/conversation_trace.first40min.jsonl.gz"
_SERVEGEN = "servegen/m-large.days1-3.rates.csv.gz"
_TICK_S = 3.0  # Mooncake rounds its times down to this


def unit_gaps(pattern: str, rng: np.random.Generator, count: int, folder: Path | None) -> Floats:
    """`count` gaps before the arrivals, mean 1, in order; `pattern` one of PATTERNS, `folder` as in `lengths`.

    A trace is entered at a random place. ValueError for another pattern.
    """
    gaps = _gaps(pattern, rng, count, folder)
    return np.asarray(gaps / gaps.mean(), dtype=np.float64)


def _gaps(pattern: str, rng: np.random.Generator, count: int, folder: Path | None) -> Floats:
    if pattern == "even":
        return np.ones(count)
    if pattern == "poisson":
        return rng.exponential(1.0, count)
    if pattern == "servegen":
        return _servegen(rng, count, folder)
    if pattern in _AZURE:
        if folder is None:
            return rng.exponential(1.0, count) if pattern == "azure_conv" else gamma_gaps(rng, count, AZURE_CODE_CV)
        return _slice(_azure_times(folder / _AZURE[pattern]), rng, count)
    if pattern == "mooncake":
        if folder is None:
            return rng.exponential(1.0, count)
        return _slice(_spread(_mooncake_ticks(folder / _MOONCAKE), rng), rng, count)
    raise ValueError(f"{pattern!r} is not one of {', '.join(PATTERNS)}")


def gamma_gaps(rng: np.random.Generator, count: int, cv: float) -> Floats:
    """Renewal gaps of mean 1 and coefficient of variation `cv`: Gamma with shape 1/cv^2."""
    shape = 1.0 / cv**2
    return np.maximum(rng.gamma(shape, 1.0 / shape, count), 1e-9)


def _slice(times_s: Floats, rng: np.random.Generator, count: int) -> Floats:
    gaps = np.diff(times_s)
    start = int(rng.integers(0, max(1, len(gaps) - count)))
    return np.resize(np.roll(gaps, -start), count)


def _spread(ticks_s: Floats, rng: np.random.Generator) -> Floats:
    """Uniform within the tick, else every report would find a burst every three seconds."""
    return np.sort(ticks_s + rng.uniform(0.0, _TICK_S, len(ticks_s)))


@lru_cache(maxsize=4)
def _azure_times(path: Path) -> Floats:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        table = csv.reader(file)
        next(table)
        moments = np.array([row[0] for row in table], dtype="datetime64[ns]")
    return np.asarray((moments - moments[0]).astype(np.int64) / 1e9, dtype=np.float64)


@lru_cache(maxsize=4)
def _mooncake_ticks(path: Path) -> Floats:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return np.array([json.loads(line)["timestamp"] / 1000 for line in file], dtype=np.float64)


@lru_cache(maxsize=4)
def _client_windows(path: Path) -> tuple[tuple[str, float, float], ...]:
    """(pattern, shape, cv) of every 10-minute window of a client that sent something."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if float(row["rate"]) > 0 and row["pattern"]]
    return tuple((row["pattern"], float(row["arg1"]), float(row["cv"])) for row in rows)


def _servegen(rng: np.random.Generator, count: int, folder: Path | None) -> Floats:
    """Gaps of one client window. Only the shape is used: a Weibull fit's scale gives the wrong rate, so gaps are rescaled."""
    if folder is None:
        levels, cvs = zip(*SERVEGEN_CV_QUANTILES, strict=True)
        return gamma_gaps(rng, count, float(np.exp(np.interp(rng.random(), levels, np.log(cvs)))))
    windows = _client_windows(folder / _SERVEGEN)
    pattern, shape, _ = windows[int(rng.integers(0, len(windows)))]
    drawn = rng.weibull(shape, count) if pattern == "Weibull" else rng.gamma(shape, 1.0, count)
    return np.maximum(drawn, 1e-9 * max(1.0, float(drawn.mean())))
