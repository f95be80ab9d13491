"""Where the time of a typical request went, as far as the summary's numbers reach; the rest is unexplained."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.decode import decode_share
from phasewise.analyzer.summary.hypothesis import Hypothesis
from phasewise.analyzer.summary.points import Summary, first, ratio
from phasewise.rules.vocabulary import CAUSES


def whole_s(summary: Summary) -> float | None:
    """End-to-end seconds of a typical request: as given, else TTFT + (N - 1) x TPOT."""
    given = summary.typical_s("e2e")
    if given:
        return given
    ttft, pace, tokens = summary.typical_s("ttft"), summary.typical_s("tpot"), summary.output_tokens
    if ttft is None:
        return None
    if pace is not None and tokens:
        return ttft + max(tokens - 1, 0.0) * pace
    return ttft if tokens is not None and tokens <= 1 else None


def winner_share(summary: Summary, winner: Hypothesis | None) -> float | None:
    """Share of end to end that the chosen explanation holds; None where the numbers do not tell."""
    if winner is None or winner.share is None:
        return None
    share = min(max(winner.share, 0.0), 1.0)
    whole, ttft = whole_s(summary), summary.typical_s("ttft")
    if winner.phase == "e2e":
        return share
    if winner.phase == "ttft":
        part = ratio(ttft, whole)
        return None if part is None else share * min(part, 1.0)
    part = decode_share(summary)
    return None if part is None else share * part


def shares_of(summary: Summary, winner: Hypothesis | None) -> dict[str, float]:
    """Cause -> share of end-to-end seconds, sum 1: the winner's share, the measured phases, and what is left unexplained."""
    whole = whole_s(summary)
    found: dict[str, float] = {}
    held = winner_share(summary, winner)
    if winner is not None and held:
        found[winner.cause] = held
    if whole:
        measured = {
            "context": first(
                (summary.typical_s("frontend"), summary.seconds("preprocess_p50"), summary.seconds("validation_p50"))
            ),
            "queue.capacity": summary.seconds("queue_p50"),
            "prefill.compute": first(
                (summary.typical_s("prefill"), ratio(summary.input_tokens, summary.number("prefill_rate_tok_per_s")))
            ),
            "communication.network": summary.seconds("kv_transfer"),
        }
        left = 1 - sum(found.values())
        for cause, seconds in measured.items():
            if (
                seconds is None
                or winner is None
                or winner.cause == cause
                or winner.category == "kv"
                or cause == _same_place(winner)
            ):
                continue
            part = min(seconds / whole, left)
            if part > 0:
                found[cause] = found.get(cause, 0.0) + part
                left -= part
    return _to_one(found)


def _same_place(winner: Hypothesis) -> str | None:
    """The measured phase that the winner's seconds already are part of."""
    if winner.category == "queueing":
        return "queue.capacity"
    return "prefill.compute" if winner.category in ("compute", "external", "host") else None


def _to_one(found: Mapping[str, float]) -> dict[str, float]:
    """Six digits after the point; what rounding and the numbers left over is unexplained."""
    total = sum(found.values())
    scale = 1 / total if total > 1 else 1.0
    cut = {cause: round(found[cause] * scale, 6) for cause in CAUSES if found.get(cause, 0.0) > 0}
    rest = round(1.0 - sum(cut.values()), 6)
    if rest > 0 or not cut:
        cut["unexplained"] = round(cut.get("unexplained", 0.0) + rest, 6) if cut else 1.0
    elif rest < 0:
        largest = max(cut, key=lambda cause: cut[cause])
        cut[largest] = round(cut[largest] + rest, 6)
    return cut
