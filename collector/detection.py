"""Which of many detectors matches a span first, looking at attributes only where name, scope and kind leave it open.

Attribute conditions look at the JSON text as the scanner writes it (compact, keys as they came), so that no span has to be parsed to
be recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_, or_

import polars as pl

from phasewise.rules.engine_parts import Detector

_KINDS = ["scope_name", "name", "kind"]
_MOST_KINDS = 4096  # more kinds of spans than that in one batch (ids in names): each span is looked at by itself


class FirstMatch:
    """Detectors by profile id, in the order in which they are asked."""

    def __init__(self, groups: Sequence[tuple[str, tuple[Detector, ...]]]) -> None:
        self._groups = [(profile, detectors) for profile, detectors in groups if detectors]
        numbered = [(k, own) for k, (_, own) in enumerate(self._groups)]
        self._possible = [_any(map(_outside, own)).alias(f"possible {k}") for k, own in numbered]
        self._certain = [
            _any(_outside(one) for one in own if not _inside(one)).alias(f"certain {k}") for k, own in numbered
        ]
        self._chains: dict[tuple[int, ...], pl.Expr] = {}

    def of(self, spans: pl.DataFrame) -> pl.Series:
        """Profile id of each span (columns of records.SPAN_SCHEMA); null where none matches."""
        kinds = spans.select(_KINDS).unique()
        if kinds.height > _MOST_KINDS or not self._groups:
            return self._matched(spans, tuple(range(len(self._groups))))
        asked = [self._asked(row) for row in kinds.select(*self._possible, *self._certain).iter_rows()]
        numbers = {candidates: number for number, candidates in enumerate(dict.fromkeys(asked))}
        if len(numbers) == 1:
            return self._matched(spans, asked[0])
        numbered = kinds.with_columns(pl.Series("asked", [numbers[one] for one in asked], dtype=pl.UInt32))
        told = spans.select(_KINDS).join(numbered, on=_KINDS, how="left", maintain_order="left", nulls_equal=True)
        found = [pl.DataFrame(schema={"row": pl.UInt32, "profile": pl.String})]
        for candidates, number in numbers.items():
            rows = (told["asked"] == number).arg_true().alias("row")
            found.append(pl.DataFrame([rows, self._matched(spans[rows], candidates)]))
        return pl.concat(found).sort("row")["profile"]

    def _matched(self, spans: pl.DataFrame, candidates: tuple[int, ...]) -> pl.Series:
        if not candidates:
            return pl.Series("profile", [None], dtype=pl.String).new_from_index(0, spans.height)
        # Lazily, because then a condition that several detectors share is looked at once.
        return spans.lazy().select(self._chain(candidates).alias("profile")).collect().to_series()

    def _asked(self, told: tuple[bool | None, ...]) -> tuple[int, ...]:
        """Groups whose attributes have to be looked at for one kind of span, up to the first that matches whatever they are."""
        asked = []
        for k in range(len(self._groups)):
            if told[k]:
                asked.append(k)
            if told[len(self._groups) + k]:
                break
        return tuple(asked)

    def _chain(self, candidates: tuple[int, ...]) -> pl.Expr:
        if candidates not in self._chains:
            chain: pl.Expr = pl.lit(None, dtype=pl.String)
            for k in reversed(candidates):
                profile, detectors = self._groups[k]
                test = _any(condition(one) for one in detectors)
                chain = pl.when(test).then(pl.lit(profile)).otherwise(chain)
            self._chains[candidates] = chain
        return self._chains[candidates]


def condition(detector: Detector) -> pl.Expr:
    """Whether a span is one the detector means, by the columns of records.SPAN_SCHEMA."""
    return reduce(and_, [_outside(detector), *_inside(detector)])


def _any(tests: Iterable[pl.Expr]) -> pl.Expr:
    return reduce(or_, tests, pl.lit(False))


def _outside(detector: Detector) -> pl.Expr:
    """What name, scope and kind of a span tell."""
    name = pl.col("name")
    scope = pl.col("scope_name").fill_null("")
    tests: list[pl.Expr] = []
    if detector.names:
        tests.append(name.is_in(detector.names))
    if detector.name_prefixes:
        tests.append(_any(name.str.starts_with(prefix) for prefix in detector.name_prefixes))
    if detector.not_names:
        tests.append(~name.is_in(detector.not_names))
    if detector.scopes:
        tests.append(scope.is_in(detector.scopes))
    if detector.scope_prefixes:
        tests.append(_any(scope.str.starts_with(prefix) for prefix in detector.scope_prefixes))
    if detector.kinds:
        tests.append(pl.col("kind").is_in(detector.kinds))
    return reduce(and_, tests, pl.lit(True))


def _inside(detector: Detector) -> list[pl.Expr]:
    """What has to be read in a span itself."""
    tests: list[pl.Expr] = []
    if detector.attributes_any:
        tests.append(_any(_has("attributes", key) for key in detector.attributes_any))
    tests += [_has("attributes", key) for key in detector.attributes_all]
    tests += [~_has("attributes", key) for key in detector.attributes_none]
    if detector.resource_any:
        tests.append(_any(_has("resource", key) for key in detector.resource_any))
    for key, values in detector.attribute_values.items():
        tests.append(_any(_equals(key, value) for value in values))
    for key, values in detector.attributes_contain.items():
        tests.append(_any(_contains(key, value) for value in values))
    if detector.dropped:
        tests.append(pl.col("dropped") > 0)
    return tests


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
