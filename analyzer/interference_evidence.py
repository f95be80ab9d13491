"""Who takes the time, in the line of evidence that says how much is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.analyzer.evidence import OTHERS

MOST_NAMED = 2  # tenants and routes: a line of evidence stays a line


def with_culprits(evidence: Any, ledger: Mapping[str, Any]) -> list[dict[str, object]]:
    """The rows of a verdict's evidence, that of others' prefill with the largest takers of the window's ledger."""
    said = takers(ledger)
    return [row | {"name": f"{OTHERS}; most by {said}"} if said and row["name"] == OTHERS else row for row in evidence]


def takers(ledger: Mapping[str, Any]) -> str:
    """Tenants and routes of the requests that took most, with their prompts' lengths; "" where nobody is named."""
    found: dict[str, list[int | None]] = {}
    for one in ledger["culprits"]:
        who = " ".join(str(one[name]) for name in ("tenant", "route") if one[name] is not None)
        found.setdefault(who, []).append(one["input_tokens"])
    return ", ".join(
        f"{who} ({_lengths(tokens)})" if who else _lengths(tokens) for who, tokens in list(found.items())[:MOST_NAMED]
    )


def _lengths(tokens: list[int | None]) -> str:
    known = sorted(one for one in tokens if one is not None)
    if not known:
        return "prompts of unknown length"
    span = f"{known[0]:,}" if known[0] == known[-1] else f"{known[0]:,} to {known[-1]:,}"
    return f"prompts of {span} tokens"
