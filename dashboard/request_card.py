"""One request as text: its phases, where its seconds were booked, and what holds most of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import clean
from phasewise.dashboard.wording import PHASES, cause_text

TINY_RATIO = 0.001  # causes with less of a request's time are added up
Report = Mapping[str, Any]


def request_lines(report: Report) -> Iterator[str]:
    """Lines of `phasewise explain ID`; what the telemetry does not tell is "unknown"."""
    yield f"request  {clean(report.get('request_key'))}"
    names = [clean(report[key]) for key in ("request_id", "engine", "model", "instance", "tenant") if report.get(key)]
    yield f"         {', '.join(names)}" if names else "         of an unknown engine"
    yield f"         finished {fmt.moment(report.get('finished_unix_ns'), day=True)} UTC, {_outcome(report)}"
    yield "times    " + ", ".join(
        f"{word} {fmt.seconds(report.get(key))}"
        for key, word in (("e2e_s", "E2E"), ("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
    )
    yield f"tokens   {_tokens(report)}"
    yield from _phases(report)
    yield from _booked(report)
    verdict = report.get("verdict") or {}
    yield f"verdict  {clean(verdict.get('sentence') or 'unknown')}"
    if report.get("missing_signals"):
        yield f"missing  {', '.join(clean(name) for name in report['missing_signals'])}"
    if report.get("final") is False:
        yield "         provisional: neighbours may still report"


def _outcome(report: Report) -> str:
    outcome = clean(report.get("outcome") or "outcome unknown")
    return f"{outcome} ({clean(report['finish_reason'])})" if report.get("finish_reason") else outcome


def _tokens(report: Report) -> str:
    cached = report.get("cached_tokens")
    inside = f"{fmt.count(report.get('input_tokens'))} in"
    inside += f" ({fmt.count(cached)} cached)" if cached is not None else " (cached: unknown)"
    return f"{inside}, {fmt.count(report.get('output_tokens'))} out"


def _phases(report: Report) -> Iterator[str]:
    phases, whole = report.get("phases") or {}, report.get("e2e_s")
    rows = [(phase.title, phases.get(phase.column)) for phase in PHASES.values()]
    yield from _table("phases", [row for row in rows if row[1] is not None], whole)


def _booked(report: Report) -> Iterator[str]:
    rows = sorted((report.get("partition") or {}).items(), key=lambda item: -item[1])
    whole = report.get("e2e_s")
    shown = [
        (cause_text(cause).short, seconds) for cause, seconds in rows if not whole or seconds >= TINY_RATIO * whole
    ]
    rest = sum(seconds for _, seconds in rows[len(shown) :])
    yield from _table("causes", [*shown, ("all others", rest)] if rest else shown, whole)


def _table(label: str, rows: list[tuple[str, Any]], whole: float | None) -> Iterator[str]:
    if not rows:
        yield f"{label:8} unknown"
        return
    width = max(len(name) for name, _ in rows)
    for number, (name, seconds) in enumerate(rows):
        share = fmt.percent(seconds / whole) if whole else ""
        yield f"{label if number == 0 else '':8} {name:{width}}  {fmt.seconds(seconds):>9}  {share:>6}".rstrip()
