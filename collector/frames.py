"""Arrow tables and expositions as Polars frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl
import pyarrow as pa

from phasewise.collector.devices import GPU_SCHEMA
from phasewise.collector.exposition import SAMPLE_SCHEMA, Exposition

SeenSettings = tuple[str, int, Mapping[str, object]]  # name of a scrape, Unix nanoseconds, setting -> value


def frame_of(rows: pa.Table | pl.DataFrame) -> pl.DataFrame:
    """The same rows, without copying where types allow."""
    if isinstance(rows, pl.DataFrame):
        return rows
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    return frame


def samples_frame(
    samples: pa.Table | pl.DataFrame | Iterable[Exposition],
) -> tuple[pl.DataFrame, list[SeenSettings]]:
    """Samples as one frame (SAMPLE_SCHEMA), and the settings that came with them."""
    if isinstance(samples, pa.Table | pl.DataFrame):
        frame = frame_of(samples)
        missing = [
            pl.lit(None, dtype=kind).alias(name) for name, kind in SAMPLE_SCHEMA.items() if name not in frame.columns
        ]
        full = frame.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in SAMPLE_SCHEMA.items())
        return full.with_columns(pl.col("joined").fill_null(True)), []
    found = list(samples)
    if not found:
        return pl.DataFrame(schema=SAMPLE_SCHEMA), []
    settings: list[SeenSettings] = []
    latest: dict[str, Mapping[str, object]] = {}
    for one in found:
        if one.samples.is_empty():  # a page of devices
            continue
        name = str(one.samples["instance"][0])
        if one.settings and latest.get(name) != one.settings:  # most scrapes show what the one before showed
            settings.append((name, int(one.samples["unix_ns"][0]), one.settings))
            latest[name] = one.settings
    return pl.concat([one.samples for one in found]), settings


def devices_frame(found: Iterable[Exposition]) -> pl.DataFrame:
    """Readings of devices that came with some expositions (GPU_SCHEMA)."""
    frames = [one.devices for one in found if one.devices is not None]
    return pl.concat(frames) if frames else pl.DataFrame(schema=GPU_SCHEMA)
