"""The verdict card as a page shows it: what is slow, the evidence for and against, what to change, what not, and the proof.

The words come from `dashboard.cards.card_of`, the same as in the terminal and in Markdown; here stands their shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import Card, card_of, clean, markdown, open_word
from phasewise.dashboard.panels import Child, attrs, badge, box, copyable, link, text
from phasewise.dashboard.state import View
from phasewise.dashboard.verdict_changes import Verdict, changes, listed, refused, section
from phasewise.dashboard.wording import cause_text, class_title

_EVIDENCE_SHOWN = 7


def verdict_card(verdict: Verdict, view: View, rank: int = 1, *, current: bool = True) -> html.Article:
    """Card number `rank`, full size. current: the window ends now (`cards.ends_now`), so that what is open is open still."""
    card = card_of(verdict, current=current)
    sections = [
        _affected(verdict, card, view, current),
        _evidence(verdict),
        changes(verdict),
        refused(verdict),
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
    return section("Affected", *lines)


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
    return section("Evidence", shown, more)


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
    facts = [part for word, rule in rules if rule for part in (html.Dt(word), html.Dd(listed(rule)))]
    if facts:
        lines.append(html.Dl(facts, className="facts"))
    return section("Verify", *lines)


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
        return section("Turn on", body)
    return section(
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
