"""The roofline of a window: the typical prefill and decode step of its requests, judged per operator group."""

from __future__ import annotations

import numpy as np
import polars as pl

from phasewise.analyzer.machine import Machine
from phasewise.analyzer.roofline import Judgement, judge_decode, judge_prefill
from phasewise.analyzer.statistics import floats, rounded
from phasewise.rules.load import Rulebook


def judge_phases(rows: pl.DataFrame, built: Machine, rulebook: Rulebook) -> dict[str, Judgement]:
    """A decode step at the mean batch and context, a prefill step of the median uncached prompt; nothing without a model."""
    if built.model is None or rows.is_empty():
        return {}
    known = tuple(rulebook.gpus.values())
    bits = (built.precision.weight_bits, built.precision.kv_bits)
    found = {}
    batch = floats(rows, "decode_batch_mean")
    given, made = floats(rows, "input_tokens"), floats(rows, "output_tokens")
    context = given + made / 2
    if np.isfinite(batch).any() and np.isfinite(context).any():
        sequences, tokens = max(1, round(float(np.nanmean(batch)))), max(1, round(float(np.nanmean(context))))
        found["decode"] = judge_decode(
            built.model, built.gpu, sequences, tokens, *bits, built.dtype, built.devices, known=known
        )
    cached = np.nan_to_num(floats(rows, "cached_tokens"))
    fresh = given - cached
    if np.isfinite(fresh).any():
        tokens, past = max(1, round(float(np.nanmedian(fresh)))), round(float(np.median(cached)))
        found["prefill"] = judge_prefill(
            built.model, built.gpu, tokens, past, *bits, built.dtype, built.devices, known=known
        )
    return found


def judgement_json(judged: Judgement, built: Machine) -> dict[str, object]:
    """For the verdict and the pages: numbers with six digits, and the refusal with what would decide it."""
    return {
        "bound": judged.bound,
        "reason": judged.reason,
        "offer": judged.offer,
        "dtype": judged.dtype,
        "model": built.model.id if built.model else None,
        "accelerator": built.gpu.id if built.gpu else None,
        "flops": rounded(judged.flops),
        "weight_bytes": rounded(judged.weight_bytes),
        "kv_bytes": rounded(judged.kv_bytes),
        "ridge_flop_per_byte": rounded(judged.ridge_flop_per_byte),
        "roof": None if judged.time_s is None else "measured" if judged.measured else "data sheet",
        "least_time_s": rounded(judged.least_time_s),
        "reached_time_s": rounded(judged.time_s) if judged.measured else None,
        "groups": [
            {"name": one.name, "intensity_flop_per_byte": rounded(one.intensity_flop_per_byte), "bound": one.bound}
            for one in judged.groups
        ],
    }
