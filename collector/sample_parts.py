"""Samples whose page came in parts: a Collector that cuts what it sends (`send_batch_max_size`) sends one scrape in several requests.

What the stored sample lacks is taken from the later part. A metric that was cut through its own middle keeps what its first part adds
up to: a part that is sent again cannot be told from one that goes on.
"""

from __future__ import annotations

import json

import polars as pl

from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.profiles import Profiles
from phasewise.collector.transaction import Transaction

_KEY = ["instance", "unix_ns", "engine"]
_SHAPES = "histograms"


def complete_samples(transaction: Transaction, samples: pl.DataFrame, profiles: Profiles) -> pl.DataFrame:
    """Stored samples of the same instances and times with what `samples` tell besides; those that changed by it, as they are now."""
    parts = samples.filter(pl.col("source") == "otlp")
    if parts.is_empty():
        return parts
    stored = transaction.query(
        "SELECT s.* FROM engine_samples s SEMI JOIN parts p USING (instance, unix_ns, engine) "
        "WHERE s.unix_ns BETWEEN ? AND ? AND s.source = 'otlp'",
        [parts["unix_ns"].min(), parts["unix_ns"].max()],
        parts=parts.select(_KEY),
    )
    typed = stored.select(pl.col(name).cast(kind) for name, kind in SAMPLE_SCHEMA.items())
    joined = typed.join(parts.unique(_KEY, keep="first"), on=_KEY, suffix=":part")
    told = [name for name in SAMPLE_SCHEMA if name not in (*_KEY, _SHAPES)]
    both = joined.with_columns(
        pl.struct(_SHAPES, f"{_SHAPES}:part").map_elements(_united, return_dtype=pl.String).alias("_shapes"),
    ).filter(
        pl.any_horizontal(
            *(pl.col(name).is_null() & pl.col(f"{name}:part").is_not_null() for name in told),
            pl.col("_shapes").ne_missing(pl.col(_SHAPES)),
        )
    )
    if both.is_empty():
        return parts.clear()
    filled = both.with_columns(
        *(pl.coalesce(name, f"{name}:part").alias(name) for name in told), pl.col("_shapes").alias(_SHAPES)
    ).select(list(SAMPLE_SCHEMA))
    completed = pl.concat(
        _without_what_is_off(own, profiles, str(engine))
        for (engine,), own in filled.group_by("engine", maintain_order=True)
    )
    transaction.run(
        "DELETE FROM engine_samples s USING completed c WHERE s.instance = c.instance AND s.unix_ns = c.unix_ns",
        completed=completed.select(_KEY),
    )
    transaction.insert("engine_samples", completed)
    return completed


def _united(pair: dict[str, str | None]) -> str | None:
    """Histograms of both by name; those of the first stay."""
    first, later = pair[_SHAPES], pair[f"{_SHAPES}:part"]
    if not first or not later:
        return first or later
    return json.dumps({**json.loads(later), **json.loads(first)}, separators=(",", ":"))


def _without_what_is_off(samples: pl.DataFrame, profiles: Profiles, engine: str) -> pl.DataFrame:
    """Counters that never moved while those beside them do are not enabled: now that both are seen together."""
    profile = profiles.by_id.get(engine)
    counters = profile.metrics.counters if profile and profile.metrics else {}
    off = {
        name: (pl.col(name) == 0) & (pl.col(series.moves_with) > 0)
        for name, series in counters.items()
        if series.moves_with
    }
    samples = samples.with_columns(
        pl.when(~test.fill_null(False)).then(pl.col(name)).alias(name) for name, test in off.items()
    )
    needs = {name: series.needs for name, series in counters.items() if series.needs}
    return samples.with_columns(
        pl.when(pl.col(other).is_not_null()).then(pl.col(name)).alias(name) for name, other in needs.items()
    )
