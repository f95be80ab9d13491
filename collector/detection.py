"""Which of many detectors matches a span first, looking at attributes only where name, scope and kind leave it open.

Attribute conditions look at the JSON text as the scanner writes it (compact, keys as they came), so that no span has to be parsed to
be recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

import polars as pl

from phasewise.rules.engine_parts import Detector

_KINDS = ["scope_name", "name", "kind"]
_READ = [*_KINDS, "attributes", "resource", "dropped"]  # all that detectors look at
_MOST_KINDS = 4096  # more kinds of spans than that in one batch (ids in names): each span is looked at by itself
_MOST_KNOWN = 8192  # kinds of which is remembered what to ask
_NOTHING = ("", "")
Kind = tuple[str | None, str, int]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What has to be asked of the spans of one kind. groups: whose attributes have to be looked at; otherwise: the profile where none
    of them matches, which is the first that matches whatever the attributes are."""

    groups: tuple[int, ...]
    otherwise: str | None


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
        self._hints: dict[tuple[int, ...], pl.Expr | None] = {}
        self._known: dict[Kind, _Asked] = {}

    def of(self, spans: pl.DataFrame) -> pl.Series:
        """Profile id of each span (columns of records.SPAN_SCHEMA); null where none matches."""
        kinds = spans.select(_KINDS).unique()
        if kinds.height > _MOST_KINDS or not self._groups:
            return self._matched(spans, tuple(range(len(self._groups))))
        asked = self._asked(kinds)
        if len(set(asked)) == 1:
            return self._told(spans, asked[0])
        numbers = {one: number for number, one in enumerate(dict.fromkeys(asked))}
        numbered = kinds.with_columns(pl.Series("asked", [numbers[one] for one in asked], dtype=pl.UInt32))
        told = spans.select(_KINDS).join(numbered, on=_KINDS, how="left", maintain_order="left", nulls_equal=True)
        found = [pl.DataFrame(schema={"row": pl.UInt32, "profile": pl.String})]
        for one, number in numbers.items():
            rows = (told["asked"] == number).arg_true().alias("row")
            profiles = self._told(spans.select(_READ)[rows], one) if one.groups else _same(one.otherwise, len(rows))
            found.append(pl.DataFrame([rows, profiles]))
        return pl.concat(found).sort("row")["profile"]

    def _told(self, spans: pl.DataFrame, asked: _Asked) -> pl.Series:
        """Profiles of spans of which the same has to be asked. Most have none of the attributes in question: one look tells."""
        if not asked.groups:
            return _same(asked.otherwise, spans.height)
        hint = self._hint(asked.groups)
        if hint is None:
            return self._matched(spans, asked.groups, asked.otherwise)
        rows = spans.select(hint.alias("may")).to_series().arg_true()
        if rows.is_empty():
            return _same(asked.otherwise, spans.height)
        if len(rows) == spans.height:
            return self._matched(spans, asked.groups, asked.otherwise)
        profiles = _same(asked.otherwise, spans.height)
        return profiles.scatter(rows, self._matched(spans.select(_READ)[rows], asked.groups, asked.otherwise))

    def _matched(self, spans: pl.DataFrame, candidates: tuple[int, ...], otherwise: str | None = None) -> pl.Series:
        if not candidates:
            return _same(otherwise, spans.height)
        # Lazily, because then a condition that several detectors share is looked at once.
        told = self._chain(candidates).fill_null(pl.lit(otherwise, dtype=pl.String))
        return spans.lazy().select(told.alias("profile")).collect().to_series()

    def _asked(self, kinds: pl.DataFrame) -> list[_Asked]:
        """By kind what has to be asked; it depends on nothing else, so it is found out once."""
        rows: list[Kind] = kinds.rows()
        if len(self._known) > _MOST_KNOWN:
            self._known = {}
        known = self._known
        strange = [place for place, kind in enumerate(rows) if kind not in known]
        if strange:
            told = kinds[strange].select(*self._possible, *self._certain)
            known |= {rows[place]: self._of_kind(one) for place, one in zip(strange, told.iter_rows(), strict=True)}
        return [known[kind] for kind in rows]

    def _of_kind(self, told: tuple[bool | None, ...]) -> _Asked:
        asked: list[int] = []
        for k in range(len(self._groups)):
            if told[len(self._groups) + k]:
                return _Asked(tuple(asked), self._groups[k][0])
            if told[k]:
                asked.append(k)
        return _Asked(tuple(asked), None)

    def _hint(self, groups: tuple[int, ...]) -> pl.Expr | None:
        """Holds for every span that a detector of these groups may match by what is in it, and for few others; much cheaper than the
        detectors themselves. None where one matches by what is not in a span."""
        if groups not in self._hints:
            inside = [one for k in groups for one in self._groups[k][1] if _inside(one)]
            signs = dict.fromkeys(sign for one in inside for sign in _signs(one))
            self._hints[groups] = _any(map(_shows, signs)) if _NOTHING not in signs else None
        return self._hints[groups]

    def _chain(self, candidates: tuple[int, ...]) -> pl.Expr:
        if candidates not in self._chains:
            chain: pl.Expr = pl.lit(None, dtype=pl.String)
            for k in reversed(candidates):
                profile, detectors = self._groups[k]
                test = _any(condition(one) for one in detectors)
                chain = pl.when(test).then(pl.lit(profile)).otherwise(chain)
            self._chains[candidates] = chain
        return self._chains[candidates]


def _same(profile: str | None, rows: int) -> pl.Series:
    return pl.Series("profile", [profile], dtype=pl.String).new_from_index(0, rows)


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


def _signs(detector: Detector) -> list[tuple[str, str]]:
    """Columns and keys of which a span has at least one if the detector matches it; without a key, the column is a count."""
    for keys in (detector.attribute_values, detector.attributes_contain, detector.attributes_all):
        for key in keys:
            return [("attributes", key)]
    if detector.attributes_any:
        return [("attributes", key) for key in detector.attributes_any]
    if detector.resource_any:
        return [("resource", key) for key in detector.resource_any]
    return [("dropped", "")] if detector.dropped else [_NOTHING]


def _shows(sign: tuple[str, str]) -> pl.Expr:
    column, key = sign
    return _has(column, key) if key else pl.col(column) > 0


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
