"""The boundary between client and engine: what each side of it sees of one run, and what neither holds."""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.analyzer.summary.hypothesis import Hypothesis, computed
from phasewise.analyzer.summary.points import Point, Summary

# From this share of the client's wait on, what the engine's view does not hold is what has to be explained.
WORTH_A_NAME_RATIO = 0.3
_ENGINE_CLASSES = frozenset({"queueing", "kv", "compute", "bandwidth"})


def has_gateway(point: Point) -> bool:
    """Something stands between client and engine."""
    gateway = point.text("engine.gateway")
    return gateway is not None and gateway.strip().lower() not in ("none", "no", "direct")


def views_of(summary: Summary) -> tuple[Point, Point] | None:
    """(client view, server view) of the observed run; where one of them is missing, the observed numbers stand for it."""
    if summary.server is None and summary.client is None:
        return None
    return summary.client or summary.observed, summary.server or summary.observed


def delay_s(client: Point, server: Point) -> float | None:
    """Seconds by which the client sees the first token after the engine made it, of one statistic where both give it."""
    for statistic in ("p50", "mean", "p95", "p99"):
        late, early = client.seconds(f"ttft_{statistic}"), server.seconds(f"ttft_{statistic}")
        if late is not None and early is not None:
            return late - early
    late, early = client.typical_s("ttft"), server.typical_s("ttft")
    return None if late is None or early is None else late - early


def outside_share(summary: Summary) -> float | None:
    """Share of what the client waits that the server's view does not hold; None where one of the views does not tell.

    Of the whole request where both views time it, else of the time to first token.
    """
    pair = views_of(summary)
    if pair is None:
        return None
    for phase in ("e2e", "ttft"):
        outer, inner = pair[0].typical_s(phase), pair[1].typical_s(phase)
        if outer and inner is not None:
            return max(0.0, 1 - inner / outer)
    return None


def outside_s(summary: Summary) -> float:
    """Seconds of a typical request that the client waits and the server's view does not hold; 0 where no view tells."""
    pair = views_of(summary)
    if pair is None:
        return 0.0
    waits = [(pair[0].typical_s(phase), pair[1].typical_s(phase)) for phase in ("e2e", "ttft")]
    return max((late - early for late, early in waits if late is not None and early is not None), default=0.0)


def within_the_engine(summary: Summary, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """What the engine does explains at most the part of the client's wait that the engine's own view holds."""
    lost = outside_share(summary)
    if lost is None or lost < WORTH_A_NAME_RATIO:
        return list(hypotheses)
    said = computed(
        "outside_share", lost, 0.0, "ratio", "client and server", "of the client's wait the engine's view does not hold",
        against=True,
    )  # fmt: skip
    return [h.weakened(1 - lost, (said,)) if h.category in _ENGINE_CLASSES else h for h in hypotheses]
