"""What an engine's telemetry looks like and what it means: one TOML file of ``rules/engines`` an engine.

A profile says how to recognise its spans (`detect`, first match over all files by `order` wins), which attribute or child
span carries which quantity and in which unit, what follows from them (`derive`, `moments`), how its Prometheus metrics map
to ``EngineSample`` columns, and it carries examples that one test runs. The collector interprets it; nothing here reads spans.

Names that start with ``own_`` are working values: derivations see them, the row does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from phasewise.rules import engine_reading as read
from phasewise.rules.engine_facts import Facts, read_facts
from phasewise.rules.engine_parts import (
    COUNT_FIELDS,
    MOMENT_FIELDS,
    ROLES,
    TEXT_FIELDS,
    TIME_FIELDS,
    Agreement,
    Derivation,
    Detector,
    Disaggregated,
    Distrust,
    Example,
    Key,
    Metrics,
    Moment,
    Release,
    Slice,
)
from phasewise.rules.engine_settings import SPAN_SETTINGS
from phasewise.rules.errors import RuleError
from phasewise.rules.toml_table import TomlTable, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine (or client, tool, wrapper) as its telemetry shows it."""

    id: str
    title: str
    family: str  # spans and scrapes of one family may be the same replica
    role: str
    order: int
    versions: str
    sources: tuple[str, ...]
    releases: tuple[Release, ...]  # what differs between those of `versions`
    detect: tuple[Detector, ...]
    settle: str  # span: the row is complete with one span; trace: child spans follow
    parts: tuple[Detector, ...]  # spans that belong to a request of this engine, known and not unmapped
    times: Mapping[str, Key]
    counts: Mapping[str, Key]
    texts: Mapping[str, Key]
    slices: Mapping[str, Slice]
    events: Mapping[str, str]  # count column <- name of a span event, counted over the request's spans
    interrupted_by: str  # the slice field whose intervals are taken out of the phases they fall into
    moments: Mapping[str, Moment]
    derive: tuple[Derivation, ...]
    distrust: tuple[Distrust, ...]
    agree: tuple[Agreement, ...]
    call_boundary: bool  # the span of a client, gateway or HTTP server around a call
    alone: bool  # a client's span is a request of its own where no engine span stands below it
    serves: (
        bool  # the span of a router or worker: the request itself where no engine span stands below, else its boundary
    )
    recorded: bool  # a server's own record of a call, sent beside its spans: no client's boundary
    of_parts: bool  # whatever nobody knows and has at least two of the slices as children is a request
    supplement: str  # truth attribute: the span fills another row's empty columns and makes none of its own
    kv_tier: bool  # its requests are lookups and loads of KV for those of an engine, which share their identifier: no rows of their own
    id_tail: str  # regular expression: what the engine adds to an identifier inside, and its own spans do not show
    error_outcome: str  # outcome of a span with error status
    id_prefixes: tuple[str, ...]
    id_suffixes: tuple[str, ...]
    span_settings: Mapping[str, str]  # setting <- resource attribute of the engine's spans
    disaggregated: Disaggregated | None
    metrics: Metrics | None
    facts: Facts | None
    examples: tuple[Example, ...]

    @property
    def slice_names(self) -> frozenset[str]:
        """Names of every child span that this profile reads."""
        found = {name for part in self.slices.values() for name in part.names}
        for moment in self.moments.values():
            found |= {*moment.start_of, *moment.end_of}
        return frozenset(found)


def load_engine(path: Path) -> EngineProfile:
    """The profile in `path`; raises RuleError naming file and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RuleError(path, "encoding", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    table = TomlTable.parse(path, text)
    metrics = table.table_or_none("metrics")
    profile = EngineProfile(
        id=path.stem,
        title=table.text("title"),
        family=table.text_or_none("family") or path.stem,
        role=read.word_or(table, "role", ROLES, "engine"),
        order=table.count("order"),
        versions=table.text_or_none("versions") or "",
        sources=table.texts("sources"),
        releases=tuple(read.release(part) for part in table.tables("release")),
        detect=tuple(read.detector(part) for part in table.tables("detect")),
        settle=read.word_or(table, "settle", ("span", "trace"), "span"),
        parts=tuple(read.detector(part) for part in table.tables("part")),
        times=read.keys(table, "time", TIME_FIELDS, timed=True),
        counts=read.keys(table, "count", COUNT_FIELDS),
        texts=read.keys(table, "text", TEXT_FIELDS),
        slices=MappingProxyType(
            {name: read.slice_of(part) for name, part in read.named_tables(table, "slices", TIME_FIELDS)}
        ),
        events=MappingProxyType(dict(read.named_texts(table, "events", COUNT_FIELDS))),
        interrupted_by=read.word_or(table, "interrupted_by", ("external_s",), ""),
        moments=MappingProxyType(
            {name: read.moment(part) for name, part in read.named_tables(table, "moments", MOMENT_FIELDS)}
        ),
        derive=tuple(read.derivation(part) for part in table.tables("derive")),
        distrust=tuple(read.distrust(part) for part in table.tables("distrust")),
        agree=tuple(read.agreement(part) for part in table.tables("agree")),
        call_boundary=table.truth("call_boundary"),
        alone=table.truth("alone"),
        serves=table.truth("serves"),
        recorded=table.truth("recorded"),
        of_parts=table.truth("of_parts"),
        supplement=table.text_or_none("supplement") or "",
        kv_tier=table.truth("kv_tier"),
        id_tail=_pattern(table, "id_tail"),
        error_outcome=read.word_or(table, "error_outcome", ("error", "aborted", "refused"), "error"),
        id_prefixes=read.texts(table, "id_prefixes"),
        id_suffixes=read.texts(table, "id_suffixes"),
        span_settings=MappingProxyType(dict(read.named_texts(table, "span_settings", SPAN_SETTINGS))),
        disaggregated=_disaggregated(table.table_or_none("disaggregated")),
        metrics=read.metrics(metrics) if metrics else None,
        facts=read_facts(table.table_or_none("facts")),
        examples=tuple(read.example(part) for part in table.tables("example")),
    )
    table.finish()
    _check(table, profile)
    return profile


def _pattern(table: TomlTable, key: str) -> str:
    text = table.text_or_none(key) or ""
    try:
        re.compile(text)
    except re.error as error:
        raise table.error(key, f"is no regular expression: {error}") from None
    return text


def _disaggregated(table: TomlTable | None) -> Disaggregated | None:
    if table is None:
        return None
    found = Disaggregated(
        prefill=read.detector(table.table("prefill")),
        decode=read.detector(table.table("decode")),
        key=table.text_or_none("key") or "",
    )
    table.finish()
    return found


def _check(table: TomlTable, profile: EngineProfile) -> None:
    """References inside one file: every operand is something the file makes, and nothing is made from itself."""
    uses = dependencies(profile)
    made = {*profile.times, *profile.slices, *uses, "arrival_unix_ns", "finished_unix_ns", "e2e_s"}
    for column, operands in uses.items():
        for name in operands - made:
            raise table.error(column, f"needs {name!r}, which is made nowhere in this file{did_you_mean(name, made)}")
    for agreement in profile.agree:
        for name in {*agreement.left, *agreement.right} - made:
            raise table.error("agree", f"{name!r} is made nowhere in this file{did_you_mean(name, made)}")
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        raise table.error("derive", f"goes in a circle: {' <- '.join(error.args[1])}") from None
    if not profile.sources:
        raise table.error("sources", "is missing: where was this read?")
    if profile.serves and (profile.role != "client" or not profile.call_boundary):
        raise table.error(
            "serves", 'needs role = "client" and call_boundary: below it an engine\'s span is the same call'
        )
    if profile.of_parts and (len(profile.slices) < 2 or profile.settle != "trace"):
        raise table.error(
            "of_parts", 'needs settle = "trace" and at least two slices: they are how the request is known'
        )
    if profile.kv_tier and (profile.role != "engine" or profile.settle != "trace" or "context_s" not in profile.slices):
        raise table.error(
            "kv_tier", 'needs role = "engine", settle = "trace" and slices.context_s: what is loaded, and when'
        )
    if profile.kv_tier and "request_id" not in profile.texts:
        raise table.error("kv_tier", "needs text.request_id: it is what the tier and the engine share")
    if profile.id_tail and not profile.kv_tier:
        raise table.error("id_tail", "is about the identifiers of a KV tier, and this is none (kv_tier)")
    if not profile.detect and not profile.of_parts and profile.metrics is None:
        raise table.error("detect", "is missing, and so is metrics: the profile would never be used")
    if not profile.examples:
        raise table.error("example", "is missing: every profile carries at least one")


def dependencies(profile: EngineProfile) -> dict[str, set[str]]:
    """Column or moment -> what must be known before it can be made."""
    uses: dict[str, set[str]] = {}
    for step in profile.derive:
        operands = (
            *step.plus,
            *step.minus,
            *step.between,
            *filter(None, (step.per_gap,)),
            *step.unless,
            *step.needs,
            *step.close_left,
            *step.close_right,
        )
        uses.setdefault(step.field, set()).update(operands)
    for doubt in profile.distrust:
        uses.setdefault(doubt.field, set()).add(doubt.of)
    for column, moment in profile.moments.items():
        uses.setdefault(column, set()).update(filter(None, (moment.at, *moment.plus, *moment.minus)))
    return uses
