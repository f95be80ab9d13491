"""Reading the parts of an engine profile out of TOML; every fault is a RuleError naming file and key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

from phasewise.rules.engine_parts import (
    COMBINE,
    PHASES,
    SAMPLE_COUNTERS,
    SAMPLE_GAUGES,
    SAMPLE_HISTOGRAMS,
    SUFFIX,
    TIME_FIELDS,
    UNIT_SECONDS,
    Agreement,
    Derivation,
    Detector,
    Distrust,
    Example,
    Info,
    Key,
    Metrics,
    Moment,
    Release,
    Series,
    Slice,
    release_numbers,
)
from phasewise.rules.errors import RuleError
from phasewise.rules.toml_table import TomlTable, did_you_mean

T = TypeVar("T")


def _finished(table: TomlTable, value: T) -> T:
    table.finish()
    return value


def texts(table: TomlTable, key: str) -> tuple[str, ...]:
    """A list of texts, blanks kept (a span name may start with one); one text alone stands for a list of one."""
    value = table.raw(key)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise table.error(key, f"must be a text or a list of texts, not {value!r}")
    return tuple(values)


def _some_texts(table: TomlTable, key: str) -> tuple[str, ...]:
    found = texts(table, key)
    if not found:
        raise table.error(key, "is missing")
    return found


def word_or(table: TomlTable, key: str, known: Collection[str], default: str) -> str:
    return table.word(key, known) if table.has(key) else default


def named_tables(table: TomlTable, key: str, known: Collection[str]) -> Iterator[tuple[str, TomlTable]]:
    """The entries of a table of tables that are named by columns (or by working values)."""
    holder = table.table_or_none(key)
    for name in holder.keys() if holder else ():
        assert holder is not None
        _check_column(holder, name, name, known)
        yield name, holder.table(name)


def named_texts(table: TomlTable, key: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    holder = table.table_or_none(key)
    for name in holder.keys() if holder else ():
        assert holder is not None
        _check_column(holder, name, name, known)
        yield name, holder.text(name)


def _check_column(table: TomlTable, key: str, name: str, known: Collection[str]) -> None:
    if name not in known and not name.startswith("own_"):
        raise table.error(key, f"unknown column {name!r}{did_you_mean(name, known)}")


def _labels(table: TomlTable, key: str) -> Mapping[str, tuple[str, ...]]:
    """A table of lists: label or attribute name to the values that count."""
    holder = table.table_or_none(key)
    return MappingProxyType({name: _some_texts(holder, name) for name in list(holder.keys())} if holder else {})


def _kinds(table: TomlTable) -> tuple[int, ...]:
    value = table.raw("kind")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and 0 <= item <= 5 for item in values):
        raise table.error("kind", f"must be span kinds of OTLP, whole numbers 0 to 5, not {value!r}")
    return tuple(values)


def detector(table: TomlTable) -> Detector:
    found = Detector(
        names=texts(table, "name"),
        name_prefixes=texts(table, "name_prefix"),
        scopes=texts(table, "scope"),
        scope_prefixes=texts(table, "scope_prefix"),
        kinds=_kinds(table),
        attributes_any=texts(table, "attributes_any"),
        attributes_all=texts(table, "attributes_all"),
        attributes_none=texts(table, "attributes_none"),
        resource_any=texts(table, "resource_any"),
        not_names=texts(table, "not_name"),
        attribute_values=_labels(table, "attribute"),
        attributes_contain=_labels(table, "attributes_contain"),
        dropped=table.truth("dropped"),
    )
    table.finish()
    conditions = (getattr(found, part.name) for part in fields(Detector))
    if not any(conditions):
        raise RuleError(table.path, table.prefix, "has no condition, so it would match every span")
    return found


def keys(table: TomlTable, key: str, known: Collection[str], timed: bool = False) -> Mapping[str, Key]:
    found = {}
    for name, part in named_tables(table, key, known):
        unit = part.word("unit", (*UNIT_SECONDS, SUFFIX)) if timed else ""
        scale = UNIT_SECONDS.get(unit, 1.0)
        events = texts(part, "events") if timed else ()
        own = Key(texts(part, "from"), texts(part, "resource"), scale, events, suffixed=unit == SUFFIX)
        found[name] = _finished(part, own)
        if not found[name].attributes and not found[name].resource:
            raise RuleError(part.path, part.prefix, "needs `from` (attribute names) or `resource`")
    return MappingProxyType(found)


def moment(table: TomlTable) -> Moment:
    found = Moment(
        start_of=texts(table, "start_of"),
        end_of=texts(table, "end_of"),
        event=texts(table, "event"),
        sole=table.truth("sole"),
        at=table.text_or_none("at") or "",
        plus=texts(table, "plus"),
        minus=texts(table, "minus"),
    )
    table.finish()
    if sum(map(bool, (found.start_of, found.end_of, found.event, found.at))) != 1:
        raise RuleError(table.path, table.prefix, "needs exactly one of start_of, end_of, event, at")
    if found.sole and not found.event:
        raise table.error("sole", "is about an event, and there is none")
    return found


def derivation(table: TomlTable) -> Derivation:
    close = table.table_or_none("close")
    column = table.text("field")
    _check_column(table, "field", column, TIME_FIELDS)
    found = Derivation(
        field=column,
        plus=texts(table, "plus"),
        minus=texts(table, "minus"),
        between=texts(table, "between"),
        per_gap=table.text_or_none("per_gap") or "",
        unless=texts(table, "unless"),
        needs=texts(table, "needs"),
        close_left=_some_texts(close, "left") if close else (),
        close_right=_some_texts(close, "right") if close else (),
        close_tolerance_s=close.number("tolerance_s") if close else 0.0,
        close_tolerance_ratio=close.number("tolerance_ratio") if close else 0.0,
        covers=table.text_or_none("covers") or "",
        quality=table.text_or_none("quality") or "",
        scopes=texts(table, "scope"),
        before=_release_or_none(table, "before"),
    )
    if close:
        close.finish()
    table.finish()
    if sum(map(bool, (found.plus, found.between, found.per_gap))) != 1:
        raise RuleError(table.path, table.prefix, "needs exactly one of plus (and minus), between, per_gap")
    if found.between and len(found.between) != 2:
        raise table.error("between", "must name two moments")
    if (found.field == "combined_s") != bool(found.covers):
        raise table.error("covers", "is needed for combined_s, and for nothing else")
    for phase in filter(None, found.covers.split(",")):
        if phase not in PHASES:
            raise table.error("covers", f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
    return found


def _release_or_none(table: TomlTable, key: str) -> str:
    text = table.text_or_none(key) or ""
    if text and not re.fullmatch(r"\d+(\.\d+){1,2}", text):
        raise table.error(key, f'must be a release such as "0.17" or "0.9.2", not {text!r}')
    return text


def release(table: TomlTable) -> Release:
    found = Release(
        since=_release_or_none(table, "since"),
        before=_release_or_none(table, "before"),
        says=table.text("says"),
        source=table.text("source"),
    )
    table.finish()
    if not found.since and not found.before:
        raise RuleError(table.path, table.prefix, "needs since or before: which releases is it about?")
    if found.since and found.before and release_numbers(found.since) >= release_numbers(found.before):
        raise table.error("before", f"{found.before!r} is not after since, {found.since!r}")
    return found


def distrust(table: TomlTable) -> Distrust:
    column = table.text("field")
    _check_column(table, "field", column, TIME_FIELDS)
    return _finished(
        table,
        Distrust(
            field=column,
            of=table.text("of"),
            above=table.number("above"),
            tokens=table.count_or_none("tokens") or 0,
            quality=table.text("quality"),
        ),
    )


def agreement(table: TomlTable) -> Agreement:
    return _finished(
        table,
        Agreement(
            left=_some_texts(table, "left"),
            right=_some_texts(table, "right"),
            tolerance_s=table.positive("tolerance_s"),
            quality=table.text("quality"),
        ),
    )


def _series(table: TomlTable, key: str, known: Collection[str]) -> Mapping[str, Series]:
    found = {}
    for name, part in named_tables(table, key, known):
        found[name] = Series(
            names=_some_texts(part, "from"),
            combine=word_or(part, "combine", COMBINE, "sum"),
            where=_labels(part, "where"),
            without=_labels(part, "without"),
            moves_with=word_or(part, "moves_with", SAMPLE_COUNTERS, ""),
            needs=word_or(part, "needs", SAMPLE_COUNTERS, ""),
            part=word_or(part, "part", ("count", "sum"), ""),
        )
        part.finish()
    return MappingProxyType(found)


def metrics(table: TomlTable) -> Metrics:
    settings: dict[str, list[Info]] = {}
    for part in table.tables("setting"):
        info = Info(
            metric=part.text("from"),
            label=part.text_or_none("label") or "",
            times=part.text_or_none("times") or "",
            unset=part.text_or_none("unset") or "",
            kind=word_or(part, "type", ("text", "integer", "number", "truth"), "text"),
            where=_labels(part, "where"),
            scale=part.number_or_none("scale") or 1.0,
            each_rank=part.truth("each_rank"),
        )
        settings.setdefault(part.text("name"), []).append(info)
        part.finish()
    found = Metrics(
        prefixes=_some_texts(table, "prefixes"),
        model_labels=texts(table, "model_labels"),
        rank_labels=texts(table, "rank_labels"),
        data_parallel_label=table.text_or_none("data_parallel_label") or "",
        gauges=_series(table, "gauges", SAMPLE_GAUGES),
        counters=_series(table, "counters", SAMPLE_COUNTERS),
        histograms=_series(table, "histograms", SAMPLE_HISTOGRAMS),
        settings=MappingProxyType({name: tuple(parts) for name, parts in settings.items()}),
    )
    table.finish()
    return found


def _raw_table(table: TomlTable, key: str) -> Mapping[str, Any] | None:
    """Expected values of an example, as TOML gives them; None where absent."""
    value = table.raw(key)
    if value is not None and not isinstance(value, dict):
        raise table.error(key, f"must be a table, not {value!r}")
    return None if value is None else MappingProxyType(value)


def example(table: TomlTable) -> Example:
    spans = table.raw("spans") or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise table.error("spans", "must be a list of tables")
    requests_count = table.count_or_none("requests_count")
    found = Example(
        name=table.text("name"),
        spans=tuple(MappingProxyType(span) for span in spans),
        request=_raw_table(table, "request"),
        absent=texts(table, "absent"),
        requests_count=(1 if spans else 0) if requests_count is None else requests_count,
        scrape=table.text_or_none("scrape") or "",
        sample=_raw_table(table, "sample") or {},
        settings=_raw_table(table, "settings") or {},
        source=table.text_or_none("source") or "",
    )
    table.finish()
    if bool(found.spans) == bool(found.scrape):
        raise RuleError(table.path, table.prefix, "needs either spans or scrape")
    return found


def slice_of(table: TomlTable) -> Slice:
    return _finished(
        table, Slice(_some_texts(table, "names"), word_or(table, "how", ("extent", "union", "first"), "extent"))
    )
