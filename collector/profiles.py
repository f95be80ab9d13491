"""Which engine profile a span belongs to, and what it is there: the request itself, a part of it, a client's side, a tool.

First match by `order` wins.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from phasewise.collector.detection import FirstMatch
from phasewise.rules.engine_profile import EngineProfile

UNMAPPED = "unmapped"
PART = "part"
PHASE = "phase"  # a part of whatever request its parent is


class Profiles:
    """The engine profiles in order of detection, and the conditions made from them once."""

    def __init__(self, engines: Mapping[str, EngineProfile]) -> None:
        self.by_id = dict(engines)
        self.ordered = sorted(engines.values(), key=lambda profile: (profile.order, profile.id))
        self._own = FirstMatch([(p.id, p.detect) for p in self.ordered])
        self._part = FirstMatch([(p.id, p.parts) for p in self.ordered])
        roles = {profile.id: profile.role for profile in self.ordered}
        shapes = [profile.id for profile in self.ordered if profile.of_parts]
        self._role = (
            pl.when(pl.col("_own").is_not_null())
            .then(pl.col("_own").replace_strict(roles, default=None, return_dtype=pl.String))
            .when(pl.col("_part").is_in(shapes))
            .then(pl.lit(PHASE))
            .when(pl.col("_part").is_not_null())
            .then(pl.lit(PART))
            .otherwise(pl.lit(UNMAPPED))
        )

    def classify(self, spans: pl.DataFrame) -> pl.DataFrame:
        """`spans` (records.SPAN_SCHEMA) with `profile` (null where unmapped) and `role`
        (engine, client, wrapper, tool, startup, steps, part, phase, unmapped)."""
        own = self._own.of(spans)
        part = self._part.of(spans) if own.null_count() else own.clear(spans.height)  # what is a request is no part
        return (
            spans.with_columns(own.alias("_own"), part.alias("_part"))
            .with_columns(pl.coalesce("_own", "_part").alias("profile"), self._role.alias("role"))
            .drop("_own", "_part")
        )

    def for_metrics(self) -> list[EngineProfile]:
        """Profiles that know an exposition, in order."""
        return [profile for profile in self.ordered if profile.metrics is not None]

    def family(self, engine: str | None) -> str | None:
        profile = self.by_id.get(engine or "")
        return profile.family if profile else engine
