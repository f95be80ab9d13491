"""What to change and what not, as the verdict card shows them: at most three changes with their ceilings, then what will not help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import clean
from phasewise.dashboard.panels import Child, badge, box, copyable, text

Verdict = Mapping[str, Any]


def section(name: str, *children: Child, names: str = "") -> html.Section:
    return html.Section(
        [html.H3(name, className="card-label"), box("card-content", *[c for c in children if c is not None])],
        className=f"card-section {names}",
    )


def sentence(value: object) -> str:
    """With a capital first and one full stop."""
    cleaned = clean(value or "").rstrip(". ")
    return f"{cleaned[:1].upper()}{cleaned[1:]}." if cleaned else ""


def changes(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("recommend") or () if isinstance(item, Mapping)]
    if not items:
        return None
    largest = max((_ceiling(item) or 0.0 for item in items), default=0.0)
    return section(
        "Change",
        text("quiet", "One at a time, the first one first." if len(items) > 1 else "One change, then measure again."),
        html.Ol(
            [_change(letter, item, largest) for letter, item in zip("ABC", items, strict=False)], className="changes"
        ),
    )


def _ceiling(item: Mapping[str, Any]) -> float | None:
    told = item.get("ceiling") or {}
    known = [part for part in (told.get("direct"), told.get("induced")) if part is not None]
    return min(1.0, sum(known)) if known else None


def _change(letter: str, item: Mapping[str, Any], largest: float) -> html.Li:
    risk = item.get("risk") or {}
    level = str(risk.get("level") or "unknown")
    ceiling = _ceiling(item)
    flags = item.get("flags") or {}
    return html.Li(
        [
            text("change-letter", letter),
            box(
                "change-body",
                box(
                    "change-line",
                    text("change-title", item.get("title") or item.get("technique")),
                    badge(f"{level} risk", f"risk-{level}", clean(risk.get("reason") or "")),
                    html.Span(className="grow"),
                    _gain(item, ceiling, largest),
                ),
                text("change-why", sentence(item["why"])) if item.get("why") else None,
                *[_flag(engine, flag) for engine, flag in flags.items()],
                _facts(item, risk),
            ),
        ],
        className="change",
    )


def _gain(item: Mapping[str, Any], ceiling: float | None, largest: float) -> Child:
    told = item.get("ceiling") or {}
    if ceiling is None:
        return text("quiet", "ceiling unknown")
    direct, induced = told.get("direct") or 0.0, told.get("induced") or 0.0
    width = max(largest, 1e-9)
    expected = item.get("expected") or {}
    text_expected = ""
    if isinstance(expected, Mapping) and expected.get("low") is not None and expected.get("high") is not None:
        text_expected = f"expect −{fmt.percent(expected['low'])} to −{fmt.percent(expected['high'])}"
    title = (
        f"Ceiling: share of the affected requests' end-to-end time. {fmt.percent(direct)} direct, "
        f"{fmt.percent(induced)} from waiting that drains. Expected: {clean(expected.get('source') or 'model estimate')}."
    )
    return html.Span(
        [
            html.Span(
                [
                    html.Span(className="gain-direct", style={"width": f"{direct / width * 100:.1f}%"}),
                    html.Span(className="gain-induced", style={"width": f"{induced / width * 100:.1f}%"}),
                ],
                className="gain-track",
            ),
            html.Span(
                [
                    text("strong", f"up to −{fmt.percent(ceiling)}"),
                    text("quiet gain-expected", text_expected) if text_expected else None,
                ],
                className="gain-text",
            ),
        ],
        className="gain",
        title=title,
    )


def _flag(engine: object, flag: object) -> html.Div:
    return box("flag-line", text("flag-engine", engine), copyable(clean(flag)))


def _facts(item: Mapping[str, Any], risk: Mapping[str, Any]) -> Child:
    facts: list[tuple[str, object]] = []
    current = item.get("current")
    if isinstance(current, Mapping) and current.get("value") is not None:
        source = f" (from {current['source']})" if current.get("source") else ""
        facts.append(("Now", f"{current['value']}{source}"))
    elif current is None and item.get("flags"):
        facts.append(("Now", "current value unknown"))
    if item.get("restart"):
        facts.append(("Restart", "yes" if item["restart"] is True else item["restart"]))
    if risk.get("reason"):
        facts.append(("Risk", risk["reason"]))
    if item.get("output_effect") not in (None, "exact", "none"):
        gate = f": {item['gate']}" if item.get("gate") else "; run your quality evaluation first"
        facts.append(("Output", f"{item['output_effect']}{gate}"))
    for key, word in (
        ("requires_with", "Together with"),
        ("does_not_change", "Does not change"),
        ("read_first", "Read first"),
    ):
        if item.get(key):
            facts.append((word, listed(item[key])))
    if not facts:
        return None
    return html.Dl(
        [part for name, value in facts for part in (html.Dt(name), html.Dd(clean(value)))], className="facts"
    )


def listed(value: object) -> str:
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return ", ".join(clean(item).replace("_", " ") for item in items)


def refused(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("will_not_help") or () if isinstance(item, Mapping)]
    if not items:
        return None
    # What is in force already is no wrong move, only none that is left.
    items.sort(key=lambda item: "in force" in str(item.get("reason") or ""))
    rows = [
        html.Li(
            [
                text("strong", item.get("title") or item.get("technique")),
                text("reason", sentence(item.get("reason"))),
                text("reason quiet", f"Starts to help {clean(item['starts_to_help_at'])}.")
                if item.get("starts_to_help_at")
                else None,
            ]
        )
        for item in items
    ]
    shown, rest = rows[:3], rows[3:]
    more = (
        html.Details(
            [html.Summary(f"{len(rest)} more that will not help"), html.Ul(rest, className="refused")], className="more"
        )
        if rest
        else None
    )
    return section("Do not", html.Ul(shown, className="refused"), more, names="do-not")
