"""Two views of one run that disagree: buffers, timers and hops between the client and the engine."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.boundary import delay_s, has_gateway, views_of
from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    reading,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most, near, ratio

# A layer that adds less than this share to the end-to-end time only moves tokens about.
_SMALL_OVERHEAD_RATIO = 0.15
_MANY_CLIENTS = 50.0
_ENGINE_ADVICE = (
    Tempting("prefix_caching", "acts on prefill inside the engine; the time is added after it"),
    Tempting("add_replicas", "adds engines; the engine is not what is waited for"),
    Tempting("raise_max_num_seqs", "adds engine slots; nothing waits for a slot in the engine"),
)


def buffering(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Tokens made at a steady rate arrive in bursts: somebody collects them until a buffer is full."""
    client = summary.client or summary.observed
    server = summary.server or summary.observed
    per_burst, chunk = client.number("chunks_per_burst_count"), client.number("chunk_bytes")
    interval = client.seconds("burst_interval_p50")
    buffer = summary.count("engine.gateway_buffer_bytes")
    strength = 0.0
    evidence: list[Evidence] = []
    if per_burst and chunk and near(per_burst * chunk, buffer, 0.15):
        strength = either(strength, 0.85)
        evidence.append(
            computed(
                "bytes_per_burst", per_burst * chunk, buffer, "bytes", f"{client.place}.chunks_per_burst_count x chunk_bytes",
                "one burst holds as many bytes as the gateway's buffer",
            )
        )  # fmt: skip
    made_s = server.token_s
    if per_burst and per_burst >= 3 and interval and near(per_burst * made_s if made_s else None, interval, 0.15):
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "burst_period_s", interval, per_burst * (made_s or 0.0), "s", f"{client.place}.burst_interval_p50_ms",
                "a burst comes as often as the engine needs to make its tokens",
            )
        )  # fmt: skip
    pair = views_of(summary)
    if pair is not None:
        delay = delay_s(*pair)
        if interval and near(delay, interval, 0.25):
            strength = either(strength, 0.4)
            evidence.append(
                computed(
                    "first_token_delay_s",
                    delay,
                    interval,
                    "s",
                    "client and server ttft",
                    "the first token waits for one burst",
                )
            )
        smooth, bursty = pair[1].seconds("itl_p50"), pair[0].tail_s("itl")
        if smooth and bursty and bursty >= 5 * smooth and not at_least(pair[1].tail_s("itl"), bursty / 2):
            strength = either(strength, 0.45)
            evidence.append(
                computed(
                    "client_itl_tail_s",
                    bursty,
                    smooth,
                    "s",
                    f"{pair[0].place}.itl",
                    "the engine's gaps are even, the client's are not",
                )
            )
    coalesced = _coalesced(summary, client)
    if coalesced is not None:
        strength = either(strength, 0.5)
        evidence.append(coalesced)
    if per_burst and per_burst >= 4 and not evidence:
        strength = 0.45
        evidence.extend(reading(client, "chunks_per_burst_count", "chunks arrive together"))
    if not evidence:
        return
    flush_s = summary.count("engine.stream_interval_ms")
    if flush_s and near(interval, flush_s / 1000, 0.3):
        return  # the serving layer's own timer: `flush_timer` says so
    gateway = has_gateway(summary.observed)
    if gateway:
        strength = either(strength, 0.25)
        evidence.extend(configured(summary.observed, "engine.gateway", "a proxy that may buffer stands in between"))
    yield Hypothesis(
        cause="client",
        mechanism="proxy_buffering",
        strength=min(strength, 0.97) if gateway else strength * 0.8,
        sentence="Tokens are made evenly and delivered in bursts: a buffer between engine and client holds them.",
        evidence=tuple(evidence),
        techniques=("disable_proxy_buffering", "flush_first_token_immediately"),
        tempting=(
            *_ENGINE_ADVICE,
            Tempting("speculative_decoding", "faster decoding fills the same buffer a little sooner"),
        ),
        symptoms=frozenset({"compute", "queueing", "bandwidth", "host"}),
        phase="ttft",
    )


def _coalesced(summary: Summary, client: Point) -> Evidence | None:
    events, tokens = client.number("stream_events_count"), summary.output_tokens
    drafts = summary.text("engine.speculation.method")
    per_event = ratio(tokens, events)
    if (
        per_event is None
        or per_event < 4
        or drafts not in (None, "none")
        or summary.truth("workload.streaming") is False
    ):
        return None
    return computed(
        "tokens_per_event",
        per_event,
        1.0,
        "tokens",
        client.source("stream_events_count"),
        "many tokens arrive in one event",
    )


def _delays_over_load(summary: Summary) -> list[tuple[float, float]]:
    """(concurrency, client TTFT - server TTFT) of the observed run and of the pairs of views in the sweep."""
    found: dict[float, dict[str, Point]] = {}
    for point in summary.sweep:
        load = point.count("workload.concurrency")
        if load is not None and point.view in ("client", "server", "gateway"):
            found.setdefault(load, {})[point.view or ""] = point
    pair, load = views_of(summary), summary.count("workload.concurrency")
    if pair is not None and load is not None:
        found[load] = {"client": pair[0], "server": pair[1]}
    delays = []
    for load, views in sorted(found.items()):
        late, early = views.get("client") or views.get("gateway"), views.get("server")
        delay = delay_s(late, early) if late and early else None
        if delay is not None:
            delays.append((load, delay))
    return delays


def flush_timer(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The first token waits for a timer of the serving layer: a constant delay that does not lengthen the request."""
    delays = _delays_over_load(summary)
    pair = views_of(summary)
    if not delays and pair is not None and (alone := delay_s(*pair)) is not None:
        delays = [(1.0, alone)]
    client = summary.client or summary.observed
    interval_ms = summary.count("engine.stream_interval_ms")
    interval_s = interval_ms / 1000 if interval_ms else None
    burst_s = client.seconds("burst_interval_p50")
    evidence: list[Evidence] = []
    strength = 0.0
    lightest = delays[0][1] if delays else None
    if interval_s and lightest is not None and 0.4 * interval_s <= lightest <= 1.3 * interval_s:
        strength = 0.75
        evidence.append(
            computed(
                "added_before_first_token_s",
                lightest,
                interval_s,
                "s",
                "client and server ttft",
                "the delay is one flush interval",
            )
        )
    elif interval_s and near(burst_s, interval_s, 0.3):
        strength = 0.6
        evidence.append(
            computed(
                "burst_interval_s",
                burst_s,
                interval_s,
                "s",
                client.source("burst_interval_p50_ms"),
                "bursts come with the timer",
            )
        )
    elif lightest is not None and lightest > 0.02 and _is_constant(delays) and _moves_only_tokens(summary, lightest):
        strength = 0.5
        evidence.append(
            computed(
                "added_before_first_token_s",
                lightest,
                0.0,
                "s",
                "client and server ttft",
                "the same delay at every load",
            )
        )
    if not evidence:
        return
    overhead = summary.number("e2e_overhead_ratio")
    if at_most(overhead, _SMALL_OVERHEAD_RATIO):
        strength = either(strength, 0.4)
        evidence.extend(
            reading(
                summary.place_of("e2e_overhead_ratio"),
                "e2e_overhead_ratio",
                "end to end is not longer: only the first token is late",
            )
        )
    noop = summary.seconds("noop_roundtrip_p50")
    if noop is not None and lightest and noop <= 0.3 * lightest:
        strength = either(strength, 0.3)
        evidence.extend(
            reading(
                summary.place_of("noop_roundtrip_p50_ms"),
                "noop_roundtrip_p50_ms",
                "the way there and back explains little of it",
            )
        )
    evidence.extend(configured(summary.observed, "engine.stream_interval_ms", "the serving layer flushes on a timer"))
    yield Hypothesis(
        cause="host" if interval_s else "client",
        mechanism="flush_timer",
        strength=min(strength, 0.95),
        sentence="The serving layer holds the first token until its flush timer fires.",
        evidence=tuple(evidence),
        techniques=("flush_first_token_immediately",),
        tempting=(
            *_ENGINE_ADVICE,
            Tempting("raise_prefill_chunk", "the engine's own first token is early; prefill is not waited for"),
        ),
        symptoms=frozenset({"external", "queueing", "compute"}),
        phase="ttft",
    )


def _is_constant(delays: list[tuple[float, float]]) -> bool:
    values = [delay for _, delay in delays]
    return len(values) >= 2 and max(values) <= 1.5 * min(values)


def _moves_only_tokens(summary: Summary, delay_s: float) -> bool:
    """The request as a whole is not longer: the delay is not work or waiting."""
    if at_most(summary.number("e2e_overhead_ratio"), _SMALL_OVERHEAD_RATIO):
        return True
    pair = views_of(summary)
    if pair is None:
        return False
    outside, inside = pair[0].typical_s("e2e"), pair[1].typical_s("e2e")
    return outside is not None and inside is not None and outside - inside < 0.3 * delay_s


def hop(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The client waits much longer than the engine needs, and nothing inside the serving process says why."""
    pair = views_of(summary)
    if pair is None:
        return
    client, server = pair
    late, early = client.typical_s("ttft"), server.typical_s("ttft")
    phase = "ttft"
    if late is None or early is None or late < 1.5 * early:
        late, early, phase = client.typical_s("e2e"), server.typical_s("e2e"), "e2e"
    if late is None or early is None or late < 1.5 * early:
        late, early, phase = client.token_s, server.token_s, "tpot"
    if late is None or early is None or late < 1.5 * early or late - early < 0.003:
        return
    delay = late - early
    inside = max(
        summary.typical_s("frontend") or 0.0,
        summary.seconds("preprocess_p50") or 0.0,
        summary.seconds("validation_p50") or 0.0,
    )
    if phase == "ttft" and inside >= 0.5 * delay:
        return  # known work of the front end: context
    strength = 0.5
    part = ratio(delay, client.typical_s("e2e")) if phase == "ttft" else None
    if part is not None and part < 0.2 and summary.text("workload.objective") != "ttft":
        strength *= part / 0.2  # hardly any of the request
    evidence = [
        computed(
            f"{phase}_difference_s",
            delay,
            early,
            "s",
            f"{client.place} and {server.place}",
            "the client sees what the engine does not",
        )
    ]
    idle = reading(server, "requests_waiting", "nothing waits in the engine")
    strength = supported(strength, evidence, 0.3, idle if at_most(server.number("requests_waiting"), 0.5) else ())
    if phase == "e2e" and at_least(ratio(delay, late), 0.5):
        strength = either(strength, 0.3)  # most of the request, not only its first token
    gateway = has_gateway(summary.observed)
    tool = summary.text("workload.load_generator")
    load = summary.in_flight or 1.0
    techniques: tuple[str, ...]
    if gateway:
        strength = either(strength, 0.2)
        evidence.extend(configured(summary.observed, "engine.gateway", "a hop stands in between"))
        techniques = ("raise_gateway_connection_limit",) if load >= _MANY_CLIENTS else ("disable_proxy_buffering",)
    else:
        crowded = tool is not None and load >= _MANY_CLIENTS
        techniques = ("fix_load_generator", "collect_missing_signals")
        techniques = techniques if crowded else techniques[::-1]
        evidence.extend(
            configured(summary.observed, "workload.load_generator", "the tool that measures also makes the load")
        )
        strength = either(strength, 0.2) if crowded else strength
    yield Hypothesis(
        cause="external" if gateway else "client",
        mechanism="gap_between_views",
        strength=strength,
        sentence="Client and engine disagree about the same run: the time is lost between them.",
        evidence=tuple(evidence),
        techniques=tuple(dict.fromkeys((*techniques, "collect_missing_signals"))),
        tempting=_ENGINE_ADVICE,
        symptoms=frozenset({"compute", "queueing"}),
        share=ratio(delay, late),
        phase=phase,
        caveat=None if gateway else "the time at each boundary between client and engine",
    )
