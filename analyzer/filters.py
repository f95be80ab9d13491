"""Filters as users write them become conditions on `requests` with bound parameters.

Columns and operators come from the allow-list below, values are only ever bound: the text of a statement depends on the
keys and operators asked for and never on a value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from phasewise.analyzer.window import Filter, Window
from phasewise.rules.errors import InputError

Kind = Literal["text", "count", "seconds", "ratio", "truth"]


@dataclass(frozen=True, slots=True)
class FilterKey:
    """What a key of the URL means: an SQL expression over `requests`, and how its values are read."""

    sql: str
    kind: Kind
    text: str


def _keys(**entries: tuple[str, Kind, str]) -> Mapping[str, FilterKey]:
    return MappingProxyType({name: FilterKey(*entry) for name, entry in entries.items()})


FILTER_KEYS: Mapping[str, FilterKey] = _keys(
    model=('"model"', "text", "model name"),
    engine=('"engine"', "text", "engine profile"),
    engine_version=('"engine_version"', "text", "engine version"),
    instance=('"instance"', "text", "engine replica"),
    service=('"service"', "text", "service name"),
    tenant=('"tenant"', "text", "tenant"),
    route=('"route"', "text", "route"),
    priority=('"priority"', "count", "priority"),
    request_class=('"request_class"', "text", "interactive or offline"),
    source=('"source"', "text", "where the row came from"),
    dataset=('"dataset"', "text", "name of an import or recording"),
    cause=('"cause"', "text", "cause with most seconds"),
    primary=('"primary_class"', "text", "class with most seconds"),
    outcome=('"outcome"', "text", "ok, error, aborted or refused"),
    finish_reason=('"finish_reason"', "text", "why generation ended"),
    trace_id=('"trace_id"', "text", "trace id"),
    request_id=('"request_id"', "text", "gen_ai.request.id"),
    request_key=('"request_key"', "text", "row key"),
    input_tokens=('"input_tokens"', "count", "prompt length"),
    cached_tokens=('"cached_tokens"', "count", "prompt tokens found in the cache"),
    cached_ratio=('("cached_tokens"::DOUBLE / nullif("input_tokens", 0))', "ratio", "cached share of the prompt"),
    output_tokens=('"output_tokens"', "count", "generated tokens"),
    concurrency=('"concurrency_at_arrival"', "count", "requests in the engine at arrival"),
    preemptions=('"preemptions"', "count", "preemptions of the request"),
    e2e=('"e2e_s"', "seconds", "end-to-end time"),
    ttft=('"ttft_s"', "seconds", "time to first token"),
    tpot=('"tpot_s"', "seconds", "time per output token"),
    itl=('"itl_p95_s"', "seconds", "inter-token latency, 95th percentile of the request"),
    queue=('"queue_s"', "seconds", "queue time"),
    prefill=('"prefill_s"', "seconds", "prefill time"),
    decode=('"decode_s"', "seconds", "decode time"),
    final=('"final"', "truth", "attribution is final"),
)
# Names that other tools use for the same thing: column names, and the variables of common Grafana boards.
_ALIASES = {
    "model_name": "model",
    "job": "service",
    "primary_class": "primary",
    "class": "primary",
    "concurrency_at_arrival": "concurrency",
    "itl_p95": "itl",
}
_COMPARISONS = {"eq": "=", "gt": ">", "lt": "<", "ge": ">=", "le": "<="}
_NUMBER = re.compile(r"^(-?[0-9.]+(?:e-?[0-9]+)?)(ms|s|m|%|k)?$", re.IGNORECASE)
_SCALE = {"ms": 1e-3, "s": 1.0, "m": 60.0, "%": 1e-2, "k": 1e3, "": 1.0}
_UNITS: Mapping[Kind, frozenset[str]] = MappingProxyType(
    {"seconds": frozenset({"", "ms", "s", "m"}), "ratio": frozenset({"", "%"}), "count": frozenset({"", "k"})}
)


@dataclass(frozen=True, slots=True)
class Condition:
    """An SQL condition and the values of its question marks, in order."""

    sql: str
    parameters: tuple[object, ...]


def filter_key(name: str) -> FilterKey:
    """The key by its name or alias; InputError with a suggestion for anything else."""
    lowered = name.strip().lower()
    lowered = _ALIASES.get(lowered, lowered)
    if lowered not in FILTER_KEYS and lowered.endswith("_s"):
        lowered = lowered.removesuffix("_s")
    if (found := FILTER_KEYS.get(lowered)) is not None:
        return found
    close = difflib.get_close_matches(lowered, FILTER_KEYS, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"keys are {', '.join(FILTER_KEYS)}"
    raise InputError("filter", name, "is not a key to filter by", remedy)


def _value(filter_: Filter, key: FilterKey, text: str) -> object:
    if key.kind == "text":
        return text
    if key.kind == "truth":
        if text.lower() not in ("true", "false"):
            raise InputError("filter", filter_.key, f"{text!r} is neither true nor false", "write true or false")
        return text.lower() == "true"
    match = _NUMBER.match(text.strip())
    unit = (match[2] or "").lower() if match else ""
    try:
        number = float(match[1]) * _SCALE[unit] if match else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or unit not in _UNITS[key.kind]:
        example = {"seconds": "2s or 80ms", "ratio": "0.5 or 50%"}.get(key.kind, "4096 or 4k")
        raise InputError("filter", filter_.key, f"{text!r} is not a number it can be compared with", f"like {example}")
    return number


def condition(filter_: Filter) -> Condition:
    """One filter as a condition. `ne` keeps rows whose value is unknown; a comparison never does."""
    key = filter_key(filter_.key)
    if filter_.op == "exists":
        if filter_.value.lower() not in ("true", "false"):
            raise InputError("filter", filter_.key, "exists takes true or false", f"write {filter_.key}:exists:true")
        return Condition(f"{key.sql} IS {'NOT ' if filter_.value.lower() == 'true' else ''}NULL", ())
    if filter_.op == "in":
        values = tuple(_value(filter_, key, part) for part in filter_.value.split(","))
        return Condition(f"list_contains(?, {key.sql})", (list(values),))
    if filter_.op == "prefix":
        if key.kind != "text":
            raise InputError("filter", filter_.key, "has no prefix: it is not text", "use ge and le")
        return Condition(f"starts_with({key.sql}, ?)", (filter_.value,))
    value = _value(filter_, key, filter_.value)
    if filter_.op == "ne":
        return Condition(f"{key.sql} IS DISTINCT FROM ?", (value,))
    if filter_.op not in _COMPARISONS:
        raise InputError("filter", filter_.key, f"unknown operator {filter_.op!r}", "use eq, ne, in, gt, lt, ge, le")
    return Condition(f"{key.sql} {_COMPARISONS[filter_.op]} ?", (value,))


def conditions(filters: Sequence[Filter]) -> Condition:
    """All filters together. Several `eq` of one key mean any of them (a variable with several values)."""
    equal: dict[str, list[Filter]] = {}
    parts: list[Condition] = []
    for filter_ in filters:
        if filter_.op == "eq":
            equal.setdefault(filter_key(filter_.key).sql, []).append(filter_)
        else:
            parts.append(condition(filter_))
    for same in equal.values():
        found = [condition(filter_) for filter_ in same]
        joined = " OR ".join(part.sql for part in found)
        parts.append(Condition(f"({joined})", tuple(value for part in found for value in part.parameters)))
    sql = " AND ".join(part.sql for part in parts)
    return Condition(sql or "TRUE", tuple(value for part in parts for value in part.parameters))


NOT_FINISHED = ("aborted", "refused")  # outcomes
SERVED = f"coalesce(\"outcome\", 'ok') NOT IN ({', '.join(map(repr, NOT_FINISHED))})"


def rows_in(window: Window, filters: Sequence[Filter] = (), *, served: bool = True, overlap: bool = False) -> Condition:
    """The rows of a window: by completion time, or (`overlap`) every row that was in the engine during it."""
    chosen = conditions(filters)
    time = (
        '"arrival_unix_ns" < ? AND "finished_unix_ns" > ?'
        if overlap
        else '"finished_unix_ns" >= ? AND "finished_unix_ns" < ?'
    )
    ends = (window.to_unix_ns, window.from_unix_ns) if overlap else (window.from_unix_ns, window.to_unix_ns)
    sql = f"{time} AND {chosen.sql}" + (f" AND {SERVED}" if served else "")
    return Condition(sql, (*ends, *chosen.parameters))


_SAMPLE_COLUMNS = {"model": '"model"', "engine": '"engine"', "instance": '"replica"'}


def sample_conditions(filters: Sequence[Filter]) -> tuple[Condition, tuple[str, ...]]:
    """The filters that engine figures can answer (model, engine, instance), and the keys of those they cannot."""
    equal: dict[str, list[str]] = {}
    left: list[str] = []
    for filter_ in filters:
        if filter_.op in ("eq", "in") and filter_.key in _SAMPLE_COLUMNS:
            equal.setdefault(filter_.key, []).extend(
                filter_.value.split(",") if filter_.op == "in" else [filter_.value]
            )
        else:
            left.append(filter_.key)
    sql = " AND ".join(f"list_contains(?, {_SAMPLE_COLUMNS[key]})" for key in equal) or "TRUE"
    return Condition(sql, tuple(equal.values())), tuple(dict.fromkeys(left))
