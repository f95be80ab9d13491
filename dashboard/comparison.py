"""The answer of `compare` as text: which strategy, and what each one has against each limit, the tails always printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import clean
from phasewise.dashboard.format import NARROW

_MET = {True: "met", False: "BROKEN", None: "unknown"}


def comparison_lines(compared: Mapping[str, Any]) -> Iterator[str]:
    """Lines of `phasewise compare`: the sentence, then a table with a row a strategy."""
    yield clean(compared.get("headline") or "")
    yield ""
    limits = [clean(limit.get("text") or limit.get("metric")) for limit in compared.get("slo") or ()]
    rows = [["", *limits, "TTFT p50", "TTFT p99", "TPOT p95", "throughput"]]
    rows += [_row(compared, strategy) for strategy in compared.get("strategies") or ()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    for strategy in compared.get("strategies") or ():
        for check in strategy.get("checks") or ():
            if check.get("note"):
                yield f"{clean(strategy.get('id'))}, {clean(check['metric'])}: {clean(check['note'])}"


def _row(compared: Mapping[str, Any], strategy: Mapping[str, Any]) -> list[str]:
    mark = "> " if strategy.get("id") == compared.get("chosen") else "  "
    ttft, tpot = strategy.get("ttft") or {}, strategy.get("tpot") or {}
    times = [ttft.get("p50_s"), ttft.get("p99_s"), tpot.get("p95_s")]
    return [
        mark + clean(strategy.get("id")),
        *_checks(strategy.get("checks") or ()),
        *(fmt.seconds(value, "–").replace(NARROW, " ") for value in times),
        _throughput(strategy.get("throughput")),
    ]


def _checks(checks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for check in checks:
        unit = "ms" if str(check.get("metric")).endswith("_ms") else ""
        value = fmt.quantity(check.get("observed"), unit).replace(NARROW, " ")
        yield f"{_MET[check.get('met')]} ({value})" if check.get("observed") is not None else _MET[None]


def _throughput(told: Mapping[str, Any] | None) -> str:
    if not told or told.get("value") is None:
        return "–"
    unit = "tok/s" if "tok_per_s" in str(told.get("metric")) else "/s"
    return f"{fmt.number(told['value'])} {unit}"
