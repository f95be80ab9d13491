"""Which engine profile a span belongs to, and what it is there: the request itself, a part of it, a client's side, a tool.

First match by `order` wins. Attribute conditions look at the JSON text as the scanner writes it (compact, keys as they came), so
that no span has to be parsed to be recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from operator import and_, or_

import polars as pl

from phasewise.rules.engine_parts import Detector
from phasewise.rules.engine_profile import EngineProfile

UNMAPPED = "unmapped"
PART = "part"
PHASE = "phase"  # a part of whatever request its parent is


class Profiles:
    """The engine profiles in order of detection, and the conditions made from them once."""

    def __init__(self, engines: Mapping[str, EngineProfile]) -> None:
        self.by_id = dict(engines)
        self.ordered = sorted(engines.values(), key=lambda profile: (profile.order, profile.id))
        self._choose = _first_match([(p.id, p.detect) for p in self.ordered])
        self._choose_part = _first_match([(p.id, p.parts) for p in self.ordered])
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
        return (
            spans.with_columns(self._choose.alias("_own"), self._choose_part.alias("_part"))
            .with_columns(pl.coalesce("_own", "_part").alias("profile"), self._role.alias("role"))
            .drop("_own", "_part")
        )

    def for_metrics(self) -> list[EngineProfile]:
        """Profiles that know an exposition, in order."""
        return [profile for profile in self.ordered if profile.metrics is not None]

    def family(self, engine: str | None) -> str | None:
        profile = self.by_id.get(engine or "")
        return profile.family if profile else engine


def _first_match(groups: list[tuple[str, tuple[Detector, ...]]]) -> pl.Expr:
    chain: pl.Expr = pl.lit(None, dtype=pl.String)
    for profile_id, detectors in reversed(groups):
        if detectors:
            test = reduce(or_, (condition(detector) for detector in detectors))
            chain = pl.when(test).then(pl.lit(profile_id)).otherwise(chain)
    return chain


def condition(detector: Detector) -> pl.Expr:
    """Whether a span is one the detector means, by the columns of records.SPAN_SCHEMA."""
    name = pl.col("name")
    scope = pl.col("scope_name").fill_null("")
    tests: list[pl.Expr] = []
    if detector.names:
        tests.append(name.is_in(detector.names))
    if detector.name_prefixes:
        tests.append(reduce(or_, (name.str.starts_with(prefix) for prefix in detector.name_prefixes)))
    if detector.not_names:
        tests.append(~name.is_in(detector.not_names))
    if detector.scopes:
        tests.append(scope.is_in(detector.scopes))
    if detector.scope_prefixes:
        tests.append(reduce(or_, (scope.str.starts_with(prefix) for prefix in detector.scope_prefixes)))
    if detector.kinds:
        tests.append(pl.col("kind").is_in(detector.kinds))
    if detector.attributes_any:
        tests.append(reduce(or_, (_has("attributes", key) for key in detector.attributes_any)))
    tests += [_has("attributes", key) for key in detector.attributes_all]
    tests += [~_has("attributes", key) for key in detector.attributes_none]
    if detector.resource_any:
        tests.append(reduce(or_, (_has("resource", key) for key in detector.resource_any)))
    for key, values in detector.attribute_values.items():
        tests.append(reduce(or_, (_equals(key, value) for value in values)))
    for key, values in detector.attributes_contain.items():
        tests.append(reduce(or_, (_contains(key, value) for value in values)))
    if detector.dropped:
        tests.append(pl.col("dropped") > 0)
    return reduce(and_, tests)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _has(column: str, key: str) -> pl.Expr:
    return pl.col(column).str.contains(f"{_quoted(key)}:", literal=True)


def _equals(key: str, value: str) -> pl.Expr:
    wanted = _quoted(value)
    if value.endswith("*"):
        wanted = wanted[:-2]
    return pl.col("attributes").str.contains(f"{_quoted(key)}:{wanted}", literal=True)


def _contains(key: str, value: str) -> pl.Expr:
    return pl.col("attributes").str.contains(f'{re.escape(_quoted(key))}:"[^"]*{re.escape(value)}')
