"""Spans `engine.steps` to rows of `engine_steps`: one span carries up to 256 scheduler iterations as arrays."""

from __future__ import annotations

import json

import polars as pl

from phasewise.collector.durations import seconds
from phasewise.collector.records import EngineStep
from phasewise.collector.schemas import polars_schema

STEP_SCHEMA = polars_schema(EngineStep)
_PREFIX = "phasewise.step."
# column <- array attribute (without the prefix), factor
_ARRAYS = {
    "start_unix_ns": "start_unix_ns",
    "duration_s": "duration_ns",
    "prefill_tokens": "prefill_tokens",
    "decode_sequences": "decode_seqs",
    "context_tokens": "context_tokens",
    "running": "running",
    "waiting": "waiting",
    "waiting_slot": "waiting_slot",
    "waiting_kv": "waiting_kv",
    "waiting_budget": "waiting_budget",
    "waiting_window": "waiting_window",
    "waiting_policy": "waiting_policy",
    "slots_reserved": "slots_reserved",
    "kv_blocks_used": "kv_blocks_used",
    "preemptions": "preemptions",
    "schedule_s": "schedule_ns",
}
_NEEDED = ("start_unix_ns",)  # the rest is what an engine may not tell


def steps_of(spans: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Rows of `engine_steps` and the number of spans that could not be read (arrays missing or of unequal length).

    spans: those of role steps, with `instance`.
    """
    frames, broken = [], 0
    for instance, text in spans.select("instance", "attributes").iter_rows():
        frame = _steps_of_one(str(instance), json.loads(text))
        broken += frame is None
        if frame is not None:
            frames.append(frame)
    return (pl.concat(frames) if frames else pl.DataFrame(schema=STEP_SCHEMA)), broken


def _steps_of_one(instance: str, attributes: dict[str, object]) -> pl.DataFrame | None:
    first = attributes.get(_PREFIX + "first")
    arrays = {column: attributes.get(_PREFIX + name) for column, name in _ARRAYS.items()}
    present = {column: values for column, values in arrays.items() if isinstance(values, list)}
    lengths = {len(values) for values in present.values()}
    if not isinstance(first, int) or len(lengths) != 1 or not all(name in present for name in _NEEDED):
        return None
    rows = lengths.pop()
    total = attributes.get(_PREFIX + "kv_blocks_total")
    try:
        frame = pl.DataFrame(present, schema=dict.fromkeys(present, pl.Int64))
    except (TypeError, pl.exceptions.PolarsError):
        return None
    in_seconds = [seconds(pl.col(c)).alias(c) for c in ("duration_s", "schedule_s") if c in present]
    missing = [pl.lit(None, dtype=kind).alias(c) for c, kind in STEP_SCHEMA.items() if c not in present]
    return (
        frame.with_columns(in_seconds)
        .with_columns(missing)
        .with_columns(
            pl.lit(instance).alias("instance"),
            (first + pl.int_range(rows, dtype=pl.Int64)).alias("step"),
            pl.lit(total if isinstance(total, int) else None, dtype=pl.Int64).alias("kv_blocks_total"),
        )
        .select(pl.col(c).cast(kind) for c, kind in STEP_SCHEMA.items())
    )
