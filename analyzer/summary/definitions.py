"""Numbers that cannot all be true under one definition: the clock, the load generator, the physics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, Tempting, computed, configured, either
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most, first, near, ratio

# No single stream of a large model has been served faster than this (tokens per second).
_FASTEST_STREAM_TOK_PER_S = 1000.0
_WORK_ADVICE = (
    Tempting("prefix_caching", "acts on prefill, which the time to first token here does not measure"),
    Tempting("shorten_prompt", "acts on prefill, which the time to first token here does not measure"),
    Tempting("add_replicas", "relieves a queue; no queue was measured"),
)


def first_token_clock(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The clock of TTFT stops at something other than the first generated token."""
    point = summary.observed
    tokens, reasoning = summary.output_tokens, summary.count("workload.reasoning_tokens")
    ttft, e2e = point.typical_s("ttft"), point.typical_s("e2e")
    early = first((point.seconds("first_chunk_p50"), *(p.seconds("first_chunk_p50") for p in summary.views)))
    other = summary.client.typical_s("ttft") if summary.client is not None else None
    if early is None and other is not None and ttft is not None and other < 0.2 * ttft:
        early = other  # the client, who cannot be earlier than the engine, saw something long before
    strength = 0.0
    evidence: list[Evidence] = []
    if ttft and early is not None and early < 0.3 * ttft:
        strength = 0.6
        evidence.append(
            computed(
                "first_chunk_s",
                early,
                ttft,
                "s",
                point.source("first_chunk_p50_ms"),
                "output arrives long before the first token is counted",
            )
        )
    literal = ratio(tokens, e2e - ttft) if tokens and e2e and ttft is not None else None
    real = ratio(tokens, e2e - early) if tokens and e2e and early is not None else None
    if literal is not None and literal > _FASTEST_STREAM_TOK_PER_S and (real is None or literal > 3 * real):
        strength = either(strength, 0.6)
        evidence.append(
            computed(
                "decode_rate_as_reported",
                literal,
                real,
                "tokens/s",
                "workload.output_tokens / (e2e - ttft)",
                "no such model decodes one stream so fast",
            )
        )
    thought = ratio(reasoning, tokens)
    if thought is not None and thought >= 0.3 and ttft and e2e and near(ttft / e2e, thought, 0.15):
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "ttft_share_of_e2e",
                ttft / e2e,
                thought,
                "ratio",
                "ttft / e2e",
                "TTFT covers the share of the output that is reasoning",
            )
        )
    elif evidence and reasoning:
        evidence.extend(configured(point, "workload.reasoning_tokens", "reasoning is streamed before the answer"))
    whole = ratio(ttft, e2e)
    unstreamed = summary.truth("workload.streaming") is False
    if not evidence and at_least(whole, 0.95) and at_least(tokens, 16):
        strength = 0.75 if unstreamed else 0.4
        evidence.append(
            computed("ttft_share_of_e2e", whole, None, "ratio", "ttft / e2e", "the first token comes with the last")
        )
        evidence.extend(configured(point, "workload.streaming", "without streaming TTFT is the whole response"))
    if not evidence:
        return
    yield Hypothesis(
        cause="client",
        mechanism="ttft_definition",
        strength=min(strength, 0.95),
        sentence="TTFT does not measure the first generated token, so the split into phases is wrong.",
        evidence=tuple(evidence),
        techniques=("fix_ttft_definition", "collect_missing_signals"),
        tempting=_WORK_ADVICE,
        symptoms=frozenset({"compute", "queueing", "bandwidth"}),
        phase="ttft",
    )


def impossible_numbers(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Numbers of one run that contradict each other or the hardware, whatever the engine does."""
    strength = 0.0
    evidence: list[Evidence] = []
    for found in (*_unordered(summary), *_over_the_whole(summary), *_too_fast(summary, machine)):
        strength = either(strength, 0.6)
        evidence.append(found)
    if not evidence:
        return
    evidence.extend(configured(summary.observed, "workload.load_generator", "the tool that reports these numbers"))
    yield Hypothesis(
        cause="client",
        mechanism="contradicting_numbers",
        strength=min(strength, 0.9),
        sentence="The reported numbers cannot all be true under one definition.",
        evidence=tuple(evidence),
        techniques=("fix_load_generator", "fix_ttft_definition", "collect_missing_signals"),
        tempting=_WORK_ADVICE,
        phase="e2e",
    )


def _unordered(summary: Summary) -> Iterator[Evidence]:
    for point in summary.views:
        for phase in ("ttft", "tpot", "itl", "e2e"):
            names = [f"{phase}_{s}" for s in ("min", "p50", "p90", "p95", "p99", "max")]
            known = [(n, v) for n in names if (v := point.seconds(n)) is not None]
            for (low, a), (high, b) in pairwise(known):
                if a > 1.02 * b:
                    yield computed(low, a, b, "s", f"{point.place}.{low}_ms", f"is above {high}")


def _over_the_whole(summary: Summary) -> Iterator[Evidence]:
    for point in summary.views:
        for statistic in ("p50", "mean"):
            ttft, tpot, e2e = (point.seconds(f"{name}_{statistic}") for name in ("ttft", "tpot", "e2e"))
            if ttft is not None and e2e is not None and ttft > 1.05 * e2e:
                yield computed(
                    "ttft_s", ttft, e2e, "s", f"{point.place}.ttft_{statistic}_ms", "is longer than the whole request"
                )
            tokens = point.output_tokens
            if ttft is not None and tpot is not None and e2e is not None and tokens and tokens > 1:
                parts = ttft + (tokens - 1) * tpot
                # medians of parts need not add up to the median of the whole, but hardly miss it by half
                if not near(parts, e2e, 0.5):
                    yield computed(
                        "sum_of_phases_s",
                        parts,
                        e2e,
                        "s",
                        f"{point.place}: ttft + (N - 1) x tpot",
                        "does not add up to end to end",
                    )
    client, server = summary.client, summary.server
    if client is not None and server is not None:
        outside, inside = client.typical_s("ttft"), server.typical_s("ttft")
        if outside is not None and inside is not None and outside < 0.8 * inside:
            yield computed(
                "client_ttft_s",
                outside,
                inside,
                "s",
                "client.ttft",
                "the client cannot see a token before the engine has made it",
            )


def _too_fast(summary: Summary, machine: Machine) -> Iterator[Evidence]:
    if summary.text("engine.speculation.method") not in (None, "none") or machine.rates_measured:
        return  # drafted tokens cost no step of their own; and what was reached once can be surpassed
    for point in summary.views:
        token_s = point.typical_s("tpot") or ratio(1.0, point.number("decode_rate_p50_tok_per_s"))
        floor = machine.floor_s() if machine.stated_reads else None
        if token_s and floor and token_s < 0.8 * floor:
            yield computed(
                "tpot_s", token_s, floor, "s", f"{point.place}.tpot", "is below what reading the weights takes"
            )
        tokens, ttft = point.input_tokens, point.typical_s("ttft")
        least = machine.prefill_floor_s(tokens) if tokens and machine.stated_reads else None
        reused = summary.number("prefix_cache_hit_ratio") or summary.number("prefix_cache_hit_tokens_count")
        if least and ttft and ttft < 0.5 * least and not reused:
            yield computed(
                "ttft_s",
                ttft,
                least,
                "s",
                f"{point.place}.ttft",
                "is below what computing the prompt takes: prompts were repeated",
            )


def load_generator(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The tool does not send what it says: too few requests in flight, a clock that starts early, a client that is full."""
    strength = 0.0
    evidence: list[Evidence] = []
    load = summary.count("workload.concurrency")
    in_engine = _in_engine(summary)
    clients_wait = summary.typical_s("ttft")
    if load and load >= 8 and in_engine is not None and in_engine < 0.5 * load and clients_wait:
        strength = either(strength, 0.45)
        evidence.append(
            computed(
                "requests_in_engine",
                in_engine,
                load,
                "count",
                "requests_running + requests_waiting",
                "most of the declared requests never reach the engine",
            )
        )
    held = _littles_law(summary)
    if held is not None and load and held < 0.5 * load and load >= 4 and _long_enough(summary, load):
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "requests_in_flight",
                held,
                load,
                "count",
                "throughput x end to end",
                "by Little's law fewer requests were in flight than declared",
            )
        )
    offered, done = summary.count("workload.request_rate_per_s"), summary.number("request_throughput_per_s")
    if (
        offered
        and done
        and done < 0.8 * offered
        and at_most(summary.waiting, 0.5)
        and not at_least(summary.preemptions, 1)
    ):
        strength = either(strength, 0.45)
        evidence.append(
            computed(
                "requests_per_s",
                done,
                offered,
                "1/s",
                "observed.request_throughput_per_s",
                "less arrives than is offered, and nothing waits in the engine",
            )
        )
    early = _early_clock(summary)
    if early is not None:
        strength = either(strength, 0.5)
        evidence.append(early)
    swapped = _other_tool(summary)
    if swapped is not None:
        strength = either(strength, 0.8)
        evidence.append(swapped)
    if not evidence:
        return
    evidence.extend(configured(summary.observed, "workload.load_generator", "the tool that sends and measures"))
    gateway = (summary.text("engine.gateway") or "none").lower() != "none"
    yield Hypothesis(
        cause="external" if gateway and early is None and swapped is None else "client",
        mechanism="load_generator",
        strength=min(strength, 0.92),
        sentence="The load generator holds requests back, or its clock starts before a request is sent.",
        evidence=tuple(evidence),
        techniques=("raise_gateway_connection_limit", "fix_load_generator") if gateway and early is None and swapped is None
        else ("fix_load_generator", "collect_missing_signals"),
        tempting=(
            Tempting("raise_max_num_seqs", "the engine is not offered enough requests to need more slots"),
            Tempting("add_replicas", "the engine is not offered enough requests to need another"),
            Tempting("prefix_caching", "acts on prefill, which is not what the clock measures"),
        ),
        symptoms=frozenset({"queueing", "compute"}),
        phase="ttft",
    )  # fmt: skip


def _in_engine(summary: Summary) -> float | None:
    running = summary.peak("requests_running")
    return None if running is None else running + (summary.waiting or 0.0)


def _littles_law(summary: Summary) -> float | None:
    """Requests in flight = completed per second x end-to-end time (Little 1961); None where one of them is unknown."""
    for point in summary.views:
        per_s = point.number("request_throughput_per_s") or ratio(
            point.number("output_throughput_tok_per_s"), point.output_tokens
        )
        whole = point.seconds("e2e_mean") or point.seconds("e2e_p50")
        if (
            whole is None
            and (ttft := point.typical_s("ttft")) is not None
            and (tpot := point.typical_s("tpot")) is not None
        ):
            whole = ttft + max((point.output_tokens or 1.0) - 1, 0.0) * tpot
        if per_s and whole:
            return per_s * whole
    return None


def _long_enough(summary: Summary, load: float) -> bool:
    """Ramp-up and ramp-down of a short run lower the mean in flight; it must be several loads long."""
    sent = first((summary.count("workload.num_requests"), summary.number("samples_count")))
    return sent is None or sent >= 4 * load


def _early_clock(summary: Summary) -> Evidence | None:
    """TTFT that rises with the number of requests sent, at one concurrency: the clock starts before the slot is granted."""
    runs: list[Point] = [
        p for p in (*summary.sweep, *summary.arms) if p.differs and "workload.num_requests" in p.differs
    ]
    for a in runs:
        for b in runs:
            sent_a, sent_b = a.count("workload.num_requests"), b.count("workload.num_requests")
            ttft_a, ttft_b = a.typical_s("ttft"), b.typical_s("ttft")
            if sent_a is None or sent_b is None or ttft_a is None or ttft_b is None:
                continue
            others_a = {k: v for k, v in (a.differs or {}).items() if k != "workload.num_requests"}
            others_b = {k: v for k, v in (b.differs or {}).items() if k != "workload.num_requests"}
            limited = at_most(a.count("workload.concurrency"), sent_a)
            if others_a == others_b and limited and sent_b > sent_a > 1 and ttft_b > 1.4 * ttft_a:
                return computed(
                    "ttft_s", ttft_b, ttft_a, "s", f"{b.place}.ttft",
                    f"rises from {sent_a:g} to {sent_b:g} requests at the same concurrency: the clock starts before the slot is granted",
                )  # fmt: skip
    return None


def _other_tool(summary: Summary) -> Evidence | None:
    for point in summary.differing_in("workload.load_generator"):
        for phase in ("ttft", "tpot", "itl", "e2e"):
            here, there = summary.typical_s(phase), point.typical_s(phase)
            if here and there and here > 1.3 * there:
                return computed(
                    f"{phase}_s", here, there, "s", f"{point.place}.{phase}", "another tool sees less for the same load"
                )
        here, there = summary.observed.throughput, point.throughput
        if here and there and there > 1.3 * here:
            return computed(
                "throughput", here, there, "1/s", point.place, "another tool reaches more on the same engine"
            )
    return None
