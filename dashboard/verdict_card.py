"""The verdict card as a page shows it: what is slow, the evidence for and against, what to change, what not, and the proof.

The words come from `dashboard.cards.card_of`, the same as in the terminal and in Markdown; here stands their shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import Card, card_of, clean, markdown, open_word
from phasewise.dashboard.panels import Child, attrs, badge, box, copyable, link, text
from phasewise.dashboard.state import View
from phasewise.dashboard.wording import cause_text, class_title

Verdict = Mapping[str, Any]
_EVIDENCE_SHOWN = 7


def verdict_card(verdict: Verdict, view: View, rank: int = 1, *, current: bool = True) -> html.Article:
    """Card number `rank`, full size. current: the window ends now (`cards.ends_now`), so that what is open is open still."""
    card = card_of(verdict, current=current)
    sections = [
        _affected(verdict, card, view, current),
        _evidence(verdict),
        _changes(verdict),
        _refused(verdict),
        _verify(verdict, card),
        _missing(verdict),
    ]
    return html.Article(
        [_head(verdict, card, rank), *[part for part in sections if part is not None], _foot(verdict, card, view)],
        className=f"panel card tone-{card.tone}",
        **attrs(data_cause=str(verdict.get("cause") or "")),
    )


def _head(verdict: Verdict, card: Card, rank: int) -> html.Header:
    primary = verdict.get("primary")
    return html.Header(
        [
            box(
                "card-line",
                text("card-rank", f"#{rank}"),
                badge(class_title(primary), f"class-{primary}") if primary else None,
                html.Span(className="grow"),
                _confidence(verdict.get("confidence") or {}),
            ),
            html.H2(clean(card.title), className="card-title"),
            text("card-standing", card.standing),
        ],
        className="card-head",
    )


def _confidence(told: Mapping[str, Any]) -> html.Details:
    level = str(told.get("level") or "unknown")
    rows = []
    for check in told.get("checks") or ():
        if not isinstance(check, Mapping):
            rows.append(html.Tr([html.Td(clean(check)), html.Td(), html.Td()]))
            continue
        name, value = str(check.get("check") or ""), check.get("value")
        share = isinstance(value, float) and ("requests with" in name or "margin" in name)
        shown = fmt.share(value) if share else fmt.quantity(value, "count")
        grade = str(check.get("level") or "")
        rows.append(
            html.Tr([html.Td(clean(name)), html.Td(shown, className="num"), html.Td(badge(grade, f"level-{grade}"))])
        )
    return html.Details(
        [
            html.Summary([text("", "Confidence"), badge(level, f"level-{level}")], className="confidence"),
            box(
                "popover right",
                html.H3("How well the data support this"),
                html.Table(html.Tbody(rows), className="plain-table"),
                text("popover-note", "The level is that of the worst check. It never changes the status."),
            ),
        ],
        className="pop",
    )


def _section(name: str, *children: Child, names: str = "") -> html.Section:
    return html.Section(
        [html.H3(name, className="card-label"), box("card-content", *[c for c in children if c is not None])],
        className=f"card-section {names}",
    )


def _affected(verdict: Verdict, card: Card, view: View, current: bool) -> html.Section:
    lines: list[Child] = [text("card-strong", card.affected[:1].upper() + card.affected[1:] + ".")]
    flight = verdict.get("in_flight") or {}
    if flight.get("open"):
        lines.append(_flight(flight, current))
    baseline = verdict.get("baseline")
    if isinstance(baseline, Mapping) and baseline.get("e2e_p50_s") is not None:
        how = "same prompt and output lengths" if baseline.get("matched") else "baseline not matched in shape"
        span = fmt.interval(int(baseline["from"]), int(baseline["to"]))
        lines.append(text("quiet", f"Before ({span}): E2E p50 {fmt.seconds(baseline['e2e_p50_s'])}, {how}."))
    examples = [one for one in verdict.get("examples") or () if isinstance(one, Mapping)]
    if examples:
        links = [
            link(
                str(one.get("trace_id") or one.get("request_key"))[:8],
                view.link("trace", identifier=str(one.get("request_key"))),
                "text-link mono",
                title=f"E2E {fmt.seconds(one.get('e2e_s'))}, {cause_text(one.get('cause')).short}",
            )
            for one in examples
        ]
        lines.append(box("examples", text("quiet", "Examples"), *links))
    return _section("Affected", *lines)


def _flight(flight: Mapping[str, Any], current: bool) -> html.Div:
    """Evidence of requests that had not ended with the window: it leads while that is open, and is marked as what it is."""
    parts = []
    for key, word, unit in (
        ("running", "running", "count"),
        ("waiting", "waiting", "count"),
        ("kv_usage_ratio", "of KV in use", "ratio"),
        ("waiting_ratio", "of their time spent waiting", "ratio"),
    ):
        if flight.get(key) is not None:
            parts.append(f"{fmt.quantity(flight[key], unit)} {word}")
    return box(
        "in-flight",
        badge("in flight", "live"),
        text("", f"{fmt.counted(flight.get('open'), 'request')} {open_word(current)}: {', '.join(parts)}."),
    )


def _evidence(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("evidence") or () if isinstance(item, Mapping)]
    if not items:
        return None
    rows = [_evidence_row(item, str(verdict.get("primary"))) for item in items]
    head = html.Tr([html.Th("Observation"), html.Th("Now", className="num"), html.Th("Held against"), html.Th("Says")])
    shown = html.Table([html.Thead(head), html.Tbody(rows[:_EVIDENCE_SHOWN])], className="plain-table evidence")
    more = (
        html.Details(
            [
                html.Summary(fmt.counted(len(rows) - _EVIDENCE_SHOWN, "more observation")),
                html.Table(html.Tbody(rows[_EVIDENCE_SHOWN:]), className="plain-table evidence"),
            ],
            className="more",
        )
        if len(rows) > _EVIDENCE_SHOWN
        else None
    )
    return _section("Evidence", shown, more)


def _evidence_row(item: Mapping[str, Any], primary: str) -> html.Tr:
    says = str(item.get("says") or item.get("for/against") or "context")
    about = str(item.get("about") or primary)
    name = str(item.get("name") or "")
    in_flight = name.startswith("in-flight")
    unit = str(item.get("unit") or "")
    expected = item.get("expected")
    marks: list[Child] = []
    if in_flight:
        marks.append(badge("in flight", "live"))
        name = name.removeprefix("in-flight: ")
    if item.get("status") == "inferred":
        marks.append(badge("inferred", "quiet", "Computed by a model from what was measured"))
    word = {"for": "for", "against": "against"}.get(says, "context")
    target = class_title(about) if word != "context" and about != primary else ""
    return html.Tr(
        [
            html.Td([text("", name[:1].upper() + name[1:]), *marks]),
            html.Td(fmt.quantity(item.get("observed"), unit), className="num strong"),
            html.Td("" if expected is None else clean(fmt.quantity(expected, unit)), className="quiet"),
            html.Td([badge(word, f"says-{word}"), text("quiet small-gap", target) if target else None]),
        ],
        title=f"Source: {clean(item.get('source') or 'unknown')}",
    )


def _changes(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("recommend") or () if isinstance(item, Mapping)]
    if not items:
        return None
    largest = max((_ceiling(item) or 0.0 for item in items), default=0.0)
    return _section(
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
                text("change-why", _sentence(item["why"])) if item.get("why") else None,
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
            facts.append((word, _listed(item[key])))
    if not facts:
        return None
    return html.Dl(
        [part for name, value in facts for part in (html.Dt(name), html.Dd(clean(value)))], className="facts"
    )


def _listed(value: object) -> str:
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return ", ".join(clean(item).replace("_", " ") for item in items)


def _refused(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("will_not_help") or () if isinstance(item, Mapping)]
    if not items:
        return None
    # What is in force already is no wrong move, only none that is left.
    items.sort(key=lambda item: "in force" in str(item.get("reason") or ""))
    rows = [
        html.Li(
            [
                text("strong", item.get("title") or item.get("technique")),
                text("reason", _sentence(item.get("reason"))),
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
    return _section("Do not", html.Ul(shown, className="refused"), more, names="do-not")


def _sentence(value: object) -> str:
    """With a capital first and one full stop."""
    cleaned = clean(value or "").rstrip(". ")
    return f"{cleaned[:1].upper()}{cleaned[1:]}." if cleaned else ""


def _verify(verdict: Verdict, card: Card) -> html.Section | None:
    told = verdict.get("verify") or {}
    if not isinstance(told, Mapping) or not told:
        return None
    lines: list[Child] = []
    arms = " against ".join(clean(arm) for arm in told.get("arms") or ())
    minutes = told.get("minutes")
    if arms:
        length = f", {fmt.number(float(minutes))} min each" if isinstance(minutes, int | float) else ""
        lines.append(text("", f"Same load{length}: {arms}."))
    if command := told.get("command"):
        lines.append(copyable(clean(command)))
    rules = [
        (word, told.get(key)) for key, word in (("pass", "Proven if"), ("refute", "Refuted if"), ("guard", "Guard"))
    ]
    facts = [part for word, rule in rules if rule for part in (html.Dt(word), html.Dd(_listed(rule)))]
    if facts:
        lines.append(html.Dl(facts, className="facts"))
    return _section("Verify", *lines)


def _missing(verdict: Verdict) -> html.Section | None:
    items = [item for item in verdict.get("missing") or () if isinstance(item, Mapping)]
    if not items:
        return None
    rows = []
    for item in items:
        name = clean(item.get("signal") or "").replace("_", " ")
        how = item.get("how") or item.get("how_to_turn_on") or item.get("turn_on")
        why = f": {clean(item['why'])}" if item.get("why") else ""
        rows.append(html.Li([text("strong", name), text("", why), text("quiet", f" {clean(how)}") if how else None]))
    body = html.Ul(rows, className="refused")
    if verdict.get("status") == "unknown" or verdict.get("primary") == "inconclusive":
        return _section("Turn on", body)
    return _section(
        "Missing",
        html.Details([html.Summary(f"{fmt.counted(len(rows), 'signal')} would sharpen this"), body], className="more"),
    )


def _foot(verdict: Verdict, card: Card, view: View) -> html.Footer:
    cause = verdict.get("cause")
    narrowed = view.link("requests", sort="e2e:desc")
    return html.Footer(
        [
            box(
                "card-actions",
                link("Slow requests", narrowed, "button"),
                link("What is different about them", view.link("slices"), "button"),
                html.Button(
                    "Copy as Markdown", className="button quiet", type="button", **attrs(data_copy=markdown(card))
                ),
                html.Span(className="grow"),
                text("quiet", "Was this right?"),
                html.Button(
                    "Yes",
                    className="button quiet small",
                    type="button",
                    **attrs(data_judge="yes", data_cause=str(cause or "inconclusive")),
                ),
                html.Button(
                    "No",
                    className="button quiet small",
                    type="button",
                    **attrs(data_judge="no", data_cause=str(cause or "inconclusive")),
                ),
            ),
            text("provenance", card.provenance),
        ],
        className="card-foot",
    )
