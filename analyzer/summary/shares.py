"""Where the time of a typical request went, as far as the summary's numbers reach; the rest is unexplained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phasewise.analyzer.summary.decode import decode_share
from phasewise.analyzer.summary.hypothesis import Hypothesis, computed
from phasewise.analyzer.summary.points import Summary, first, ratio
from phasewise.rules.vocabulary import CAUSES

# Below this share of end to end a phase is not what makes a request slow.
_HARDLY_ANY_RATIO = 0.05
# Queues that the engine's own queue time does not hold.
_OF_ANOTHER_PLACE = ("stage_queue",)


def whole_s(summary: Summary) -> float | None:
    """End-to-end seconds of a typical request, as the client waits for it: as given, else TTFT + (N - 1) x TPOT."""
    given = summary.felt_s("e2e")
    if given:
        return given
    ttft, pace, tokens = summary.felt_s("ttft"), summary.typical_s("tpot"), summary.output_tokens
    if ttft is None:
        return None
    if pace is not None and tokens:
        return ttft + max(tokens - 1, 0.0) * pace
    return ttft if tokens is not None and tokens <= 1 else None


def winner_share(summary: Summary, winner: Hypothesis | None) -> float | None:
    """Share of end to end that the chosen explanation holds; None where the numbers do not tell.

    A measured time of that very phase goes before what the mechanism estimates.
    """
    if winner is None:
        return None
    held = _measured_share(summary, winner)
    if held is not None:
        return held
    if winner.share is None:
        return None
    share = min(max(winner.share, 0.0), 1.0)
    whole, ttft = whole_s(summary), summary.felt_s("ttft")
    if winner.phase == "e2e":
        return share
    if winner.phase == "ttft":
        part = ratio(ttft, whole)
        return None if part is None else share * min(part, 1.0)
    part = decode_share(summary)
    return None if part is None else share * part


def _measured_share(summary: Summary, winner: Hypothesis) -> float | None:
    """Share of end to end of the phase that is the cause itself, where it was timed.

    Of waits the median request's; where that one does not wait, the tail's, if both are told.
    """
    whole = whole_s(summary)
    if winner.mechanism not in _OF_ANOTHER_PLACE and (winner.category == "queueing" or winner.cause == "kv.wait"):
        share = ratio(summary.seconds("queue_p50"), whole)
        if share is None or share < _HARDLY_ANY_RATIO:
            tail = ratio(summary.seconds("queue_p99"), summary.seconds("e2e_p99"))
            share = tail if tail is not None else share
    elif winner.mechanism in ("before_admission", "preprocessing"):
        share = ratio(_prepared_s(summary), whole)
    elif winner.mechanism in ("own_prompt", "small_chunks"):
        share = ratio(summary.typical_s("prefill"), whole)
    elif winner.mechanism == "kv_transfer":
        share = ratio(summary.seconds("kv_transfer"), whole)
    else:
        return None
    return None if share is None else min(share, 1.0)


def _prepared_s(summary: Summary) -> float | None:
    return first((summary.typical_s("frontend"), summary.seconds("preprocess_p50"), summary.seconds("validation_p50")))


def of_consequence(summary: Summary, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """What holds next to nothing of the request does not explain that it is slow, unless that phase is what is asked about."""
    asked = summary.text("workload.objective")
    weighed: list[Hypothesis] = []
    for one in hypotheses:
        share = winner_share(summary, one)
        if share is not None and share < _HARDLY_ANY_RATIO and one.phase != asked:
            one = one.weakened(
                share / _HARDLY_ANY_RATIO,
                (computed("share", share, None, "ratio", "of end to end", "hardly any of the request", against=True),),
            )
        weighed.append(one)
    return weighed


def shares_of(summary: Summary, winner: Hypothesis | None) -> dict[str, float]:
    """Cause -> share of end-to-end seconds, sum 1: the winner's share, the measured phases, and what is left unexplained."""
    whole = whole_s(summary)
    found: dict[str, float] = {}
    held = winner_share(summary, winner)
    if winner is not None and held:
        found[winner.cause] = held
    if whole:
        measured = {
            "context": _prepared_s(summary),
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
