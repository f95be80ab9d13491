"""Verdict cards: what a verdict object says, in the order a person on call reads it, and the same as Markdown.

`card_of` is the one place that reads the verdict object; `dashboard/terminal.py` draws what it makes. Texts that came from
telemetry are data from strangers: control characters are cut here, Markdown is escaped where it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.wording import OBJECTIVES, cause_text, class_title, dataset_kind

Verdict = Mapping[str, Any]
FEW = 30  # below this many affected requests percentages of them say more than is known
SHOWN_SHARES = 5
RUNS_SHOWN = 2  # of more recordings behind the rows, only how many there are
STRONGEST = 2
CURRENT_NS = 120 * 10**9  # a window that ended no longer ago ends now
LETTERS = "ABC"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+")


@dataclass(frozen=True, slots=True)
class Row:
    """One observation. says: for, against or context; about: the class it speaks of, where that is another one."""

    name: str
    observed: str
    expected: str
    says: str


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to try: what, the flags of the engine, what it can bring at best, and what it costs."""

    letter: str
    title: str
    flags: tuple[str, ...]
    gain: str
    risk: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """Everything a card shows, as text. tone: slow, healthy or unknown; shares_of: the requests whose time `shares` divides."""

    title: str
    category: str
    tone: str
    confidence: str
    badge: str | None
    sentence: str
    standing: str
    affected: str
    shares_of: str
    shares: tuple[tuple[str, str], ...]
    evidence: tuple[Row, ...]
    changes: tuple[Change, ...]
    refused: tuple[str, ...]
    verify: tuple[str, ...]
    missing: tuple[str, ...]
    provenance: str

    @property
    def strongest(self) -> tuple[Row, ...]:
        """The two observations that speak for the verdict most directly."""
        return tuple(row for row in self.evidence if row.says == "for")[:STRONGEST]


def clean(value: object) -> str:
    """Text without control and direction characters: a terminal or a page must not be steered by a span attribute."""
    return _CONTROL.sub(" ", str(value)).strip()


def ends_now(verdict: Verdict, now_unix_ns: int) -> bool:
    """The window of a verdict ends now: what it says of requests in flight holds still. A summary has no window."""
    window = verdict.get("window")
    end = window.get("to_unix_ns") if isinstance(window, Mapping) else None
    return not isinstance(end, int) or end >= now_unix_ns - CURRENT_NS


def open_word(current: bool) -> str:
    """How requests without an end are called."""
    return "still open" if current else "open at the end of the window"


def card_of(verdict: Verdict, badge: str | None = None, *, current: bool = True) -> Card:
    """The card of a verdict object. badge: what tells a recording or a named summary from live traffic; current: the
    window ends now (`ends_now`)."""
    status = str(verdict.get("status") or "unknown")
    cause = verdict.get("cause")
    confidence = verdict.get("confidence") or {}
    return Card(
        title=_title(status, verdict.get("primary"), cause),
        category=class_title(verdict.get("primary")),
        tone=status,
        confidence=str(confidence.get("level") or "unknown"),
        badge=clean(badge) if badge else _recorded(verdict.get("recorded") or {}),
        sentence=clean(verdict.get("headline") or ""),
        standing=_standing(verdict),
        affected=_affected(verdict, current),
        shares_of=_whose(verdict),
        shares=_shares(verdict.get("shares") or {}),
        evidence=tuple(_row(item, verdict.get("primary")) for item in verdict.get("evidence") or ()),
        changes=tuple(
            _change(letter, item) for letter, item in zip(LETTERS, verdict.get("recommend") or (), strict=False)
        ),
        refused=tuple(_refused(item) for item in verdict.get("will_not_help") or ()),
        verify=tuple(_verify(verdict.get("verify") or {})),
        missing=tuple(_missing(item) for item in verdict.get("missing") or ()),
        provenance=_provenance(verdict),
    )


def _recorded(facts: Mapping[str, Any]) -> str | None:
    """The badges of the recordings behind the rows; of more than a few, how many of each kind."""
    if len(facts) > RUNS_SHOWN:
        return "; ".join(f"{kind}, {fmt.counted(len(names), 'run')}" for kind, names in by_kind(facts).items())
    badges = [clean(told.get("badge") or f"recorded: {name}") for name, told in facts.items()]
    return "; ".join(badges) or None


def by_kind(names: Iterable[object]) -> dict[str, list[str]]:
    """Data sets by what tells them from live traffic: recorded, simulated."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(dataset_kind(name), []).append(clean(name))
    return found


def _title(status: str, primary: str | None, cause: str | None) -> str:
    if status == "unknown":
        return "Not enough evidence to name a cause"
    if primary in (None, "inconclusive"):
        return "No single cause explains it"
    text = cause_text(cause)
    return f"Healthy; {_lower(text.title)}" if status == "healthy" else text.title


def _lower(text: str) -> str:
    """The first letter small, unless the first word is an abbreviation."""
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _standing(verdict: Verdict) -> str:
    """How far the finding has come; "caused by" is said only after an ablation."""
    stage = str(verdict.get("stage") or "")
    if stage in ("ablated", "validated", "gated"):
        return f"proven by ablation ({stage})"
    rows = _about_primary(verdict)
    against = sum(_says(item) == "against" for item in rows)
    if against:
        return f"contradicted by {against} of {fmt.counted(len(rows), 'observation')}; not proven by ablation"
    return "consistent with the data; not yet proven by ablation"


def _says(item: Mapping[str, Any]) -> str:
    return str(item.get("says") or item.get("for/against") or "context")


def _about_primary(verdict: Verdict) -> list[Mapping[str, Any]]:
    primary = verdict.get("primary")
    return [item for item in verdict.get("evidence") or () if item.get("about", primary) == primary]


def _whose(verdict: Verdict) -> str:
    n = verdict.get("requests")
    return f"all {fmt.count(n)} requests" if isinstance(n, int) and n > 1 else "all requests"


def _affected(verdict: Verdict, current: bool) -> str:
    told = verdict.get("affected") or {}
    count, of = told.get("count"), told.get("of", verdict.get("requests"))
    if verdict.get("requests") is None and not count:
        return ""
    if not count or not of:
        text = fmt.counted(verdict.get("requests") or 0, "request")
    elif told.get("over_limit") and told.get("slo"):
        share = f" ({fmt.share(count / of)})" if count >= FEW else ""
        breaks = "breaks" if count == 1 else "break"
        text = f"{fmt.count(count)} of {fmt.counted(of, 'request')}{share} {breaks} {_limit(told['slo'])}"
    else:
        text = f"the slowest {fmt.count(count)} of {fmt.counted(of, 'request')}" if of != 1 else "the only request"
    if count and told.get("matching") is not None and verdict.get("primary") not in (None, "inconclusive"):
        text += f", {fmt.count(told['matching'])} of them bound by {class_title(verdict['primary'])}"
    for key, word in (("open", open_word(current)), ("refused", "refused"), ("aborted", "aborted")):
        if verdict.get(key):
            text += f"; {fmt.count(verdict[key])} {word}"
    return text


def _limit(limit: object) -> str:
    metric, _, rest = clean(limit).partition(" ")
    return f"{OBJECTIVES.get(metric, metric)} {rest}".strip()


def _shares(shares: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """The largest causes of end-to-end time, and the rest in one."""
    if set(shares) <= {"unexplained"}:
        return ()
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    shown = [(cause_text(cause).short, fmt.percent(share)) for cause, share in ordered[:SHOWN_SHARES] if share >= 0.005]
    rest = 1 - sum(share for _, share in ordered[: len(shown)])
    return (*shown, ("other", fmt.percent(rest))) if shown and rest >= 0.005 else tuple(shown)


def _row(item: Mapping[str, Any], primary: object) -> Row:
    unit = item.get("unit")
    says, about = _says(item), item.get("about")
    if about and says != "context" and (says == "against" or about != primary):
        says = f"{says} {class_title(about)}"
    expected = item.get("expected")
    return Row(
        clean(item.get("name", "")),
        clean(fmt.quantity(item.get("observed"), unit)),
        "" if expected is None else clean(fmt.quantity(expected, unit)),
        says,
    )


def _change(letter: str, item: Mapping[str, Any]) -> Change:
    risk = item.get("risk") or {}
    reason = f" ({clean(risk['reason'])})" if risk.get("reason") else ""
    notes = []
    if current := _current(item.get("current")):
        notes.append(current)
    if item.get("read_first"):
        notes.append(f"not known here, read it first: {_listed(item['read_first'])}")
    if item.get("restart"):
        notes.append("needs a restart of the engine; its caches are cold afterwards")
    if item.get("output_effect") not in (None, "exact", "none"):
        notes.append(f"output effect: {clean(item['output_effect'])}; run your quality evaluation first")
    if item.get("requires_with"):
        notes.append(f"together with {_listed(item['requires_with'])}")
    if item.get("does_not_change"):
        notes.append(f"does not change {_listed(item['does_not_change'])}")
    return Change(
        letter,
        clean(item.get("title") or item.get("technique", "")),
        tuple(f"{clean(engine)}: {clean(flag)}" for engine, flag in (item.get("flags") or {}).items()),
        _gain(item.get("ceiling") or {}, item.get("expected")),
        f"{clean(risk.get('level', 'unknown'))}{reason}",
        tuple(notes),
    )


def _current(current: object) -> str:
    if current is None:
        return ""
    if isinstance(current, Mapping):
        if current.get("value") is None:
            return ""
        source = clean(str(current.get("source") or "").replace("_", " "))
        others = [
            f"{clean(str(one.get('source')).replace('_', ' '))} says {clean(one.get('value'))}"
            for one in current.get("others") or ()
        ]
        told = "; ".join([*([source] if source else []), *others])
        return f"now {clean(current.get('value'))}{f' ({told})' if told else ''}"
    return f"now {clean(current)}"


def _listed(value: object) -> str:
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return ", ".join(clean(item) for item in items)


def _gain(ceiling: Mapping[str, Any], expected: object) -> str:
    """At best, and by which way: direct work saved, waiting that drains."""
    direct, induced = ceiling.get("direct"), ceiling.get("induced")
    known = [part for part in (direct, induced) if part is not None]
    if not known:
        return "no ceiling known"
    text = f"at best −{fmt.percent(min(1.0, sum(known)))} of affected end-to-end time"
    if direct is not None and induced:
        text += f" ({fmt.percent(direct)} direct, {fmt.percent(induced)} from waiting that drains)"
    if isinstance(expected, Mapping) and expected.get("low") is not None and expected.get("high") is not None:
        source = clean(expected.get("source") or "model estimate")
        text += f"; expect −{fmt.percent(expected['low'])} to −{fmt.percent(expected['high'])} ({source})"
    return text


def _refused(item: Mapping[str, Any]) -> str:
    text = f"{clean(item.get('title') or item.get('technique', ''))}: {clean(item.get('reason', ''))}"
    start = item.get("starts_to_help_at")
    return f"{text}; starts to help {clean(start)}" if start else text


def _verify(told: Mapping[str, Any]) -> Iterator[str]:
    if command := told.get("command"):
        minutes = (
            f"{told['minutes']:g} min each, the same load: " if isinstance(told.get("minutes"), (int, float)) else ""
        )
        yield f"{minutes}{clean(command)}"
    if told.get("arms"):
        yield f"arms: {_listed(told['arms'])}"
    for key, word in (("pass", "proven if"), ("refute", "refuted if"), ("guard", "guard")):
        if told.get(key):
            yield f"{word} {_listed(told[key])}"


def _missing(item: object) -> str:
    if not isinstance(item, Mapping):
        return clean(item)
    name, why, how = (clean(item.get(key) or "") for key in ("signal", "why", "how"))
    return f"{name.replace('_', ' ')}{f' ({why})' if why else ''}{f': {how}' if how else ''}"


def _provenance(verdict: Verdict) -> str:
    told = verdict.get("provenance") or {}
    parts = [f"{name} {clean(told[name])}" for name in ("rules", "analyzer") if told.get(name)]
    window = verdict.get("window")
    if isinstance(window, Mapping) and window.get("from_unix_ns") and window.get("to_unix_ns"):
        parts.append(f"data {fmt.interval(window['from_unix_ns'], window['to_unix_ns'])} UTC")
    if verdict.get("requests") is not None:
        parts.append(fmt.counted(verdict["requests"], "request"))
    drawn = told.get("drawn")
    if isinstance(drawn, Mapping) and drawn.get("read") != drawn.get("of"):
        parts.append(f"{fmt.count(drawn.get('read'))} of them read")
    if isinstance(told.get("coverage"), (int, float)):
        parts.append(f"{fmt.percent(told['coverage'])} with phase data")
    baseline = verdict.get("baseline")
    if isinstance(baseline, Mapping) and baseline.get("matched") is False:
        parts.append("baseline not matched")
    return ", ".join(parts)


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", text)


def markdown(card: Card) -> str:
    """The full card for a ticket, a wiki or a pull request."""
    lines = [f"### {_md(card.category)}: {_md(card.title)}", ""]
    lines += [f"> {_md(card.badge)}", ""] if card.badge else []
    lines += [f"{_md(card.sentence)}", ""] if card.sentence else []
    lines += [f"**{card.tone}**, confidence {card.confidence}; {_md(card.standing)}", ""]
    lines += [f"{_md(card.affected)}.", ""] if card.affected else []
    if card.shares:
        lines += [f"Time of {card.shares_of}: " + ", ".join(f"{_md(name)} {share}" for name, share in card.shares), ""]
    if card.evidence:
        lines += ["| evidence | observed | expected | says |", "|---|---|---|---|"]
        lines += [f"| {_md(r.name)} | {_md(r.observed)} | {_md(r.expected)} | {_md(r.says)} |" for r in card.evidence]
        lines.append("")
    for change in card.changes:
        lines.append(f"- **{change.letter}: {_md(change.title)}**, {_md(change.gain)}; risk {_md(change.risk)}")
        lines += [f"  - {_md(text)}" for text in (*change.flags, *change.notes)]
    for heading, texts in (("Will not help", card.refused), ("Verify", card.verify), ("Missing", card.missing)):
        if texts:
            lines += ["", f"{heading}:", "", *(f"- {_md(text)}" for text in texts)]
    return "\n".join([*lines, "", f"*{_md(card.provenance)}*"]).strip() + "\n"
