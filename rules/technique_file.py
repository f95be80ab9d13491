"""Reading `rules/techniques/*.toml`. Every name in a file is checked: signals, causes, settings, other techniques."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

from phasewise.rules.engine_settings import SETTINGS
from phasewise.rules.errors import RuleError
from phasewise.rules.hardware_file import read_sources
from phasewise.rules.schema import (
    CATEGORIES,
    DIRECT_GAINS,
    EFFORTS,
    EXPECTATIONS,
    INDUCED_GAINS,
    OPERATORS,
    OUTPUT_EFFECTS,
    RISK_LEVELS,
    TERMS,
    Condition,
    Example,
    Flag,
    Gain,
    InForce,
    Risk,
    Scalar,
    Technique,
    Verify,
)
from phasewise.rules.toml_table import TomlTable, did_you_mean
from phasewise.rules.vocabulary import CAUSES, CLASSES, SIGNALS

DIRECTIONS: tuple[str, ...] = ("up", "down", "on", "off", "set")
LEAST_TEMPTATION = 0.1
_ORDERED = ("lt", "le", "gt", "ge")


def read_technique(identity: str, root: TomlTable) -> Technique:
    """One technique. Raises RuleError for anything unknown, missing or contradictory."""
    gain, verify, risk = root.table("gain"), root.table("verify"), root.table("risk")
    technique = Technique(
        id=identity,
        title=root.text("title"),
        aliases=root.texts("aliases"),
        categories=root.words("categories", CATEGORIES),
        acts_on=root.words("acts_on", CAUSES),
        acts_on_waiting=root.truth("acts_on_waiting"),
        likelihood=_probability(root, "likelihood"),
        temptation=_probability(root, "temptation") if root.has("temptation") else LEAST_TEMPTATION,
        effort=root.word("effort", EFFORTS),
        terms=root.words("terms", TERMS),
        why=root.text("why"),
        does_not_change=root.text("does_not_change"),
        output_effect=root.word("output_effect", OUTPUT_EFFECTS),
        gate=root.text("gate"),
        risk=_risk(risk),
        restart=root.truth("restart"),
        requires_with=root.texts("requires_with"),
        preconditions=tuple(read_condition(table) for table in root.tables("precondition")),
        contraindications=tuple(read_condition(table) for table in root.tables("contraindication")),
        in_force=_in_force(root.table_or_none("in_force")),
        gain=_gain(gain),
        flags=MappingProxyType(_flags(root.table_or_none("flags"))),
        tempting_for=root.words("tempting_for", (*CAUSES, *CLASSES)),
        not_acting=root.text_or_none("not_acting") or "",
        verify=_verify(verify),
        sources=read_sources(root),
        examples=tuple(_example(table) for table in root.tables("example")),
    )
    root.finish()
    if not technique.categories:
        raise root.error("categories", "is missing")
    if technique.tempting_for and not technique.not_acting:
        raise root.error("not_acting", "is missing: what tempting_for says when the technique does not act")
    _check_format(root, "not_acting", technique.not_acting, {"share", "causes"})
    if len(technique.examples) < 2:
        raise root.error("example", "at least two are needed: one where it is offered, one where it is not")
    return technique


def read_condition(table: TomlTable) -> Condition:
    signal = table.text("signal")
    check_signal(table, signal)
    op = table.word("op", OPERATORS)
    condition = Condition(
        signal=signal,
        op=op,
        value=_operand(table, op),
        reason=table.text("reason"),
        starts_to_help_at=table.text_or_none("starts_to_help_at"),
        required=table.truth("required"),
        ranks_last=table.truth("ranks_last"),
        only_for=table.words("only_for", (*CAUSES, *CLASSES)),
    )
    table.finish()
    _check_format(table, "reason", condition.reason, {"observed", "value"})
    return condition


def check_signal(table: TomlTable, name: str, key: str = "signal") -> None:
    """A signal is one of the vocabulary, `share:<cause>` or `share:class:<class>`."""
    head, _, rest = name.partition(":")
    if head == "share" and rest:
        group, _, member = rest.partition(":")
        known: tuple[str, ...] = CLASSES if group == "class" else CAUSES
        chosen = member if group == "class" else rest
        if chosen not in known:
            raise table.error(key, f"unknown share {name!r}{did_you_mean(chosen, known)}")
    elif name not in SIGNALS:
        raise table.error(key, f"unknown signal {name!r}{did_you_mean(name, SIGNALS)}")


def check_references(paths: Mapping[str, Path], techniques: Mapping[str, Technique]) -> None:
    """Names of other techniques, which can be checked only once all files are read."""
    for technique in techniques.values():
        for name in technique.requires_with:
            if name not in techniques:
                raise RuleError(
                    paths[technique.id],
                    "requires_with",
                    f"unknown technique {name!r}{did_you_mean(name, techniques)}",
                )


def _check_format(table: TomlTable, key: str, text: str, fields: set[str]) -> None:
    try:
        used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise table.error(key, f"is no format string: {error}") from None
    if unknown := used - fields:
        raise table.error(key, f"unknown field {sorted(unknown)[0]!r} in braces; known: {', '.join(sorted(fields))}")


def _operand(table: TomlTable, op: str) -> Scalar | tuple[Scalar, ...]:
    if op in ("in", "not_in"):
        values = table.raw("value")
        if not isinstance(values, list) or not values or not all(isinstance(v, str | int | float) for v in values):
            raise table.error("value", f"must be a list of texts or numbers for {op!r}, not {values!r}")
        return tuple(v if isinstance(v, bool | str) else float(v) for v in values)
    value = table.scalar("value")
    if op in _ORDERED and (isinstance(value, bool) or not isinstance(value, float)):
        raise table.error("value", f"must be a number for {op!r}, not {value!r}")
    return value


def _probability(root: TomlTable, key: str) -> float:
    value = root.number(key)
    if not 0 < value <= 1:
        raise root.error(key, f"must lie above 0 and up to 1, not {value!r}")
    return value


def _risk(table: TomlTable) -> Risk:
    risk = Risk(level=table.word("level", RISK_LEVELS), reason=table.text("reason"))
    table.finish()
    return risk


def _in_force(table: TomlTable | None) -> InForce | None:
    if table is None:
        return None
    signal, setting = table.text_or_none("signal"), table.text_or_none("setting")
    if (signal is None) == (setting is None):
        raise table.error("signal", "name either a signal or a setting")
    if signal is not None:
        check_signal(table, signal)
    elif setting not in SETTINGS:
        raise table.error("setting", f"unknown setting {setting!r}{did_you_mean(str(setting), SETTINGS)}")
    op = table.word_or_none("op", OPERATORS) or "eq"
    state = InForce(op=op, value=_operand(table, op), read=table.text("read"), signal=signal, setting=setting)
    table.finish()
    return state


def _gain(table: TomlTable) -> Gain:
    parameters = table.table_or_none("parameters")
    gain = Gain(
        direct=table.word_or_none("direct", DIRECT_GAINS),
        induced=table.word_or_none("induced", INDUCED_GAINS),
        parameters=MappingProxyType({key: parameters.number(key) for key in parameters.keys()} if parameters else {}),  # noqa: SIM118
    )
    table.finish()
    return gain


def _flags(table: TomlTable | None) -> dict[str, Flag]:
    if table is None:
        return {}
    found = {}
    for engine in table.keys():  # noqa: SIM118 (not a dict)
        entry = table.table(engine)
        setting = entry.word_or_none("setting", SETTINGS)
        direction = entry.word_or_none("direction", DIRECTIONS)
        found[engine] = Flag(
            text=entry.text("text"),
            source=entry.text("source"),
            setting=setting,
            direction=cast("Literal['up', 'down', 'on', 'off', 'set'] | None", direction),
            since=entry.text_or_none("since"),
            until=entry.text_or_none("until"),
        )
        entry.finish()
    table.finish()
    return found


def _verify(table: TomlTable) -> Verify:
    verify = Verify(
        pass_rule=table.text("pass"),
        refute_rule=table.text("refute"),
        guard=table.text("guard"),
        minutes=table.positive("minutes"),
    )
    table.finish()
    return verify


def _check_names(table: TomlTable | None, known: tuple[str, ...], what: str) -> None:
    for name in table.keys() if table is not None else []:
        if name not in known:
            assert table is not None
            raise table.error(name, f"unknown {what}{did_you_mean(name, known)}")


def _example(table: TomlTable) -> Example:
    signals, shares, settings = (table.table_or_none(key) for key in ("signals", "shares", "settings"))
    if signals is not None:
        for name in signals.keys():  # noqa: SIM118 (not a dict)
            check_signal(signals, name, name)
    _check_names(shares, CAUSES, "cause")
    _check_names(settings, SETTINGS, "setting")
    example = Example(
        primary=table.word("primary", CLASSES),
        cause=table.word_or_none("cause", CAUSES),
        signals=MappingProxyType(signals.scalars() if signals else {}),
        shares=MappingProxyType({name: shares.number(name) for name in shares.keys()} if shares else {}),  # noqa: SIM118
        settings=MappingProxyType(settings.scalars() if settings else {}),
        engine=table.text_or_none("engine"),
        expect=table.word("expect", EXPECTATIONS),
        because=table.text("because"),
    )
    table.finish()
    return example
