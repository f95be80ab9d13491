"""The interference ledger as text: whose prompts took how much of whose time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import clean

_BY = {"measured": "by steps", "inferred": "by overlap", "mixed": "by steps and overlap"}
Told = Mapping[str, Any]


def ledger_lines(told: Told) -> Iterator[str]:
    """Lines of `phasewise explain --interference`."""
    window = told["window"]
    yield (
        f"window   {fmt.interval(window['from_unix_ns'], window['to_unix_ns'])} UTC, "
        f"{fmt.counted(told['requests'], 'request')}"
    )
    yield f"lost     {fmt.seconds(told['interference_s'])} to others' prompts by {fmt.counted(told['victims'], 'request')}"
    if told["read"] is not None:
        part = told["read"]
        yield f"         below: {fmt.seconds(part['interference_s'])} of it, by {fmt.counted(part['victims'], 'request')}"
    if not told["victims"]:
        return
    yield from _named(told)
    rows = [
        (f"{_who(pair['culprit'])} → {_who(pair['victim'])}", pair, fmt.counted(pair["victims"], "victim"))
        for pair in told["pairs"]
    ]
    yield from _rows("who", rows)
    left = told["pairs_left_out"]
    if left["pairs"]:
        yield f"         and {fmt.counted(left['pairs'], 'more pair')}: {fmt.seconds(left['took_s'])}"
    yield from _rows(
        "most", [(_prompt(one), one, f"of {fmt.counted(one['victims'], 'other')}") for one in told["culprits"]]
    )
    more = told["culprits_count"] - len(told["culprits"])
    if more > 0:
        yield f"         and {fmt.counted(more, 'more request')} that took some"


def request_interference_lines(told: Told) -> Iterator[str]:
    """Lines of `phasewise explain ID` on who took time of it, and of whom it did; none where nobody took any."""
    if told["interference_s"] > 0:
        yield f"lost     {fmt.seconds(told['interference_s'])} to others' prompts"
        yield from _named(told)
        yield from _rows("to", [(_prompt(one), one, "") for one in told["culprits"]])
        yield from _rest(told["culprits_left_out"])
    took = told["took"]
    if took["took_s"] > 0:
        yield f"took     {fmt.seconds(took['took_s'])} of {fmt.counted(took['victims_count'], 'other')} by its own prompt"
        yield from _rows("of", [(_prompt(one), one, "") for one in took["victims"]])
        yield from _rest(took["victims_left_out"])


def _named(told: Told) -> Iterator[str]:
    parts = [
        f"{fmt.seconds(told[name])} {text}"
        for name, text in (
            ("measured_s", "named by steps"),
            ("inferred_s", "named by overlap"),
            ("unnamed_s", "of nobody in sight"),
        )
        if told[name] > 0
    ]
    if parts:
        yield f"         {', '.join(parts)}"


def _rows(label: str, rows: Sequence[tuple[str, Told, str]]) -> Iterator[str]:
    width = max((len(name) for name, _, _ in rows), default=0)
    for number, (name, one, more) in enumerate(rows):
        how = _BY.get(one["provenance"] or "", "")
        told = ", ".join(text for text in (more, how) if text)
        share = fmt.percent(one["share"])
        yield (
            f"{label if number == 0 else '':8} {name:{width}}  {fmt.seconds(one['took_s']):>9}  {share:>6}  {told}".rstrip()
        )


def _rest(left: Told) -> Iterator[str]:
    if left["requests"]:
        yield f"         and {fmt.counted(left['requests'], 'more request')}: {fmt.seconds(left['took_s'])}"


def _who(group: Told) -> str:
    if group.get("others") is not None:
        return f"{group['others']} other tenants and routes"
    named = [clean(group[name]) for name in ("tenant", "route") if group[name] is not None]
    return " ".join(named) or "no tenant or route"


def _prompt(one: Told) -> str:
    tokens = one["input_tokens"]
    length = "prompt of unknown length" if tokens is None else f"{fmt.count(tokens)} tokens in"
    named = [clean(one[name]) for name in ("tenant", "route") if one[name] is not None]
    return ", ".join([clean(one["request_id"] or one["request_key"]), *([" ".join(named)] if named else []), length])
