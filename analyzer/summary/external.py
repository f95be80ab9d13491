"""Other services, links and the parts of an application's request: who is waited for, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, Tempting, computed, configured, either, given
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Stage, Summary, at_least, ratio

# A link between instances that is worth its name moves more than this; TCP over a fallback path does not (bytes per second).
_SLOW_LINK_BYTES_PER_S = 3e9
_MANY_CALLS = 4.0
_MODEL_WORDS = re.compile(r"llm|model|generat|completion|chat|inference|answer|reason", re.IGNORECASE)
_PREPARE_WORDS = re.compile(
    r"token|template|render|image|pars|chunk|embed|retriev|search|rerank|fetch|history|context|prompt", re.IGNORECASE
)
_ADVICE = (
    Tempting("prefix_caching", "acts on prefill, a small part of this request"),
    Tempting("speculative_decoding", "acts on decode, a small part of this request"),
    Tempting("weight_only_quantization", "acts on decode, a small part of this request"),
    Tempting("raise_max_num_seqs", "nothing waits for a slot of the engine"),
    Tempting("add_replicas", "the model is not what is waited for"),
)


def dominant_stage(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """One stage of an application's request takes most of it; its kind says whose time that is."""
    top = [s for s in summary.stages if s.parent is None or not any(o.name == s.parent for o in summary.stages)]
    known = [s for s in top if s.seconds is not None]
    if not known:
        return
    whole = max(summary.typical_s("e2e") or 0.0, sum(s.seconds or 0.0 for s in known))
    stage = max(known, key=lambda s: s.seconds or 0.0)
    share = ratio(stage.seconds, whole)
    if share is None or share < 0.4 or (len(known) < 2 and not summary.typical_s("e2e")):
        return
    stage, share = _deepest(summary, stage, share)
    fact = computed("stage_share", share, None, "ratio", stage.place, f"of the request is {stage.name!r}")
    strength = 0.6 + min(0.25, max(0.0, share - 0.4))
    if summary.typical_s("e2e") is None:
        strength *= 0.75  # the whole is only the sum of the stages that were named
    yield from _booked(summary, stage, share, strength, fact)


def _deepest(summary: Summary, stage: Stage, share: float) -> tuple[Stage, float]:
    """The innermost stage that still holds most of its parent."""
    seen = {stage.name}
    while True:
        inner = [s for s in summary.stages if s.parent == stage.name and s.name not in seen and s.seconds is not None]
        largest = max(inner, key=lambda s: s.seconds or 0.0, default=None)
        part = ratio(largest.seconds, stage.seconds) if largest is not None else None
        if largest is None or part is None or not 0.6 <= part <= 1.05 or share * part < 0.3:
            return stage, share
        seen.add(largest.name)
        stage, share = largest, share * part


def _booked(summary: Summary, stage: Stage, share: float, strength: float, fact: Evidence) -> Iterator[Hypothesis]:
    calls = stage.calls or 1.0
    is_model = bool(_MODEL_WORDS.search(stage.name)) and not _PREPARE_WORDS.search(stage.name)
    turns = summary.count("workload.agent_turns_count") or 0.0
    evidence: list[Evidence] = [fact]
    if stage.kind == "queue":
        cause, mechanism, said = (
            "queue.upstream",
            "stage_queue",
            "The request waits for its turn before the work begins.",
        )
        techniques: tuple[str, ...] = ("add_replicas", "admission_control", "autoscale_on_queue_depth")
    elif stage.kind == "transfer":
        cause, mechanism, said = "communication.network", "stage_transfer", "Moving data takes most of the request."
        techniques = ("enable_rdma_transfer", "collect_missing_signals")
    elif stage.kind == "own":
        prepares = bool(_PREPARE_WORDS.search(stage.name))
        cause, mechanism = ("context", "own_preparation") if prepares else ("host", "own_work")
        said = "The application's own work takes most of the request."
        techniques = (
            ("parallel_preprocessing", "preprocessing_cache", "scale_api_servers")
            if prepares
            else ("move_blocking_work_off_event_loop", "scale_api_servers")
        )
        strength *= 0.9
    elif is_model and max(calls, turns) >= 3 and stage.parallel is not True:
        cause, mechanism, said = "external", "many_turns", "The request makes one model call after another."
        techniques = ("fewer_agent_turns", "batch_context_calls")
        evidence.append(
            computed("model_calls", max(calls, turns), 1.0, "count", stage.place, "model calls one after another")
        )
    elif is_model:
        return  # the model itself: the other detectors say why it is slow
    elif calls >= _MANY_CALLS and stage.parallel is not True:
        cause, mechanism, said = (
            "context",
            "sequential_calls",
            f"{calls:g} calls are made one after another before the answer begins.",
        )
        techniques = ("batch_context_calls", "cache_external_results")
        strength = either(strength, 0.3) if stage.parallel is False else strength * 0.85
        evidence.append(
            computed(
                "calls", calls, 1.0, "count", stage.place, f"one after another, {stage.per_call_s or 0:.3g} s each"
            )
        )
    else:
        cause, mechanism, said = (
            "external",
            "slow_call",
            f"The request waits for {stage.name!r}, a call to another service.",
        )
        techniques = ("fix_tool_latency", "cache_external_results", "bound_external_call_timeout")
        if stage.calls is None:
            strength *= 0.8  # one slow call or many short ones: not told
        if stage.most_s is not None and stage.seconds and stage.most_s >= 3 * stage.seconds:
            techniques = ("bound_external_call_timeout", "fix_tool_latency", "cache_external_results")
            evidence.append(
                computed(
                    "slowest_call_s",
                    stage.most_s,
                    stage.seconds,
                    "s",
                    stage.place,
                    "the slowest call takes many times the usual one",
                )
            )
    yield Hypothesis(
        cause=cause,
        mechanism=mechanism,
        strength=min(strength, 0.93),
        sentence=said,
        evidence=tuple(evidence),
        techniques=techniques,
        tempting=_ADVICE,
        symptoms=frozenset({"compute", "bandwidth", "queueing"}),
        share=share,
        phase="e2e",
    )


def blocked_loop(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """A stage that only awaits a call takes much longer than the call: its thread was busy with something else."""
    for stage in summary.stages:
        inner: Sequence[Stage] = [s for s in summary.stages if s.parent == stage.name and s.name != stage.name]
        if not inner or stage.kind == "queue" or any(s.kind == "own" for s in inner):
            continue
        outside, inside = stage.most_s or stage.seconds, _total(inner, "most")
        usual, usual_inside = stage.seconds, _total(inner, "usual")
        if outside is None or inside is None or outside < 2 * inside or outside - inside < 0.05:
            continue
        strength = 0.65
        evidence = [
            computed(
                "stage_s",
                outside,
                inside,
                "s",
                stage.place,
                f"{stage.name!r} lasts far longer than the call it waits for",
            )
        ]
        if at_least(ratio(usual, usual_inside), 1.5):
            strength = either(strength, 0.3)
            evidence.append(
                computed("usual_stage_s", usual, usual_inside, "s", stage.place, "and not only in the worst case")
            )
        steady = [s for s in inner if s.least_s is not None and s.most_s is not None and s.most_s <= 2 * s.least_s]
        if steady:
            strength = either(strength, 0.3)
            evidence.append(
                computed(
                    "call_max_s", steady[0].most_s, steady[0].least_s, "s", steady[0].place, "the call itself is steady"
                )
            )
        yield Hypothesis(
            cause="host",
            mechanism="blocked_event_loop",
            strength=min(strength, 0.93),
            sentence="The thread that awaits the call is busy with other work: the span measures that, not the call.",
            evidence=tuple(evidence),
            techniques=("move_blocking_work_off_event_loop", "scale_api_servers"),
            tempting=(
                Tempting(
                    "bound_external_call_timeout",
                    "the call answers in time; a timeout would only lose its result",
                    inside,
                ),
                Tempting("fix_tool_latency", "the service is steady and fast", inside),
                *_ADVICE[:1],
            ),
            symptoms=frozenset({"external", "context"}),
            share=ratio(outside - inside, outside),
            phase="e2e",
        )
        return


def _total(stages: Sequence[Stage], which: str) -> float | None:
    values = [(s.most_s if which == "most" and s.most_s is not None else s.seconds) for s in stages]
    return sum(v for v in values if v is not None) if values and all(v is not None for v in values) else None


def kv_transfer(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """KV moves between instances far below what a link can do."""
    seconds = summary.seconds("kv_transfer")
    tokens, each = summary.input_tokens, machine.kv_bytes_per_token
    evidence: list[Evidence] = []
    strength = 0.0
    speed = ratio(tokens * each, seconds) if tokens and each else None
    share = ratio(seconds, summary.typical_s("ttft"))
    if speed is not None and speed < _SLOW_LINK_BYTES_PER_S and at_least(seconds, 0.02):
        strength = 0.8 if speed < 1.5e9 else 0.65
        evidence.append(
            computed(
                "bytes_per_s",
                speed,
                12.5e9,
                "bytes/s",
                "input_tokens x kv_bytes_per_token / kv_transfer_ms",
                "far below a 100 Gbit/s link",
            )
        )
    elif speed is None and (at_least(share, 0.3) or at_least(seconds, 0.5)):
        strength = 0.55
        evidence.extend(given(summary, "kv_transfer_ms", "moving KV takes long"))
    if seconds is not None and at_least(share, 0.3) and evidence:
        strength = either(strength, 0.3)
        evidence.append(
            computed("transfer_share", share, None, "ratio", "kv_transfer_ms / ttft", "of the time to first token")
        )
    wire = summary.number("network_mb_per_s")
    separated = summary.truth("engine.prefill_decode_disaggregation") is True
    if wire is not None and separated and (90 <= wire <= 130 or 900 <= wire <= 1300):
        strength = either(strength, 0.45)
        evidence.extend(given(summary, "network_mb_per_s", "the line rate of plain Ethernet: the link is full"))
    elif wire is not None and separated and evidence and wire < 3000:
        strength = either(strength, 0.2)
        evidence.extend(given(summary, "network_mb_per_s", "little for a link between accelerators"))
    rest = _unexplained_ttft(summary)
    if seconds is None and evidence and at_least(rest, 0.4):
        strength = either(strength, 0.35)
        evidence.append(
            computed(
                "ttft_without_prefill",
                rest,
                None,
                "ratio",
                "ttft less queue and prefill",
                "of the time to first token is neither waiting nor prefill",
            )
        )
    if not evidence:
        return
    evidence.extend(configured(summary.observed, "engine.kv_transfer_backend", "what moves the KV"))
    yield Hypothesis(
        cause="communication.network",
        mechanism="kv_transfer",
        strength=min(strength, 0.95),
        sentence="The KV cache moves between instances over a path that is far too slow.",
        evidence=tuple(evidence),
        techniques=("enable_rdma_transfer", "collect_missing_signals"),
        tempting=(
            Tempting("kv_cache_quantization", "halves the bytes; the path is slower by far more than that", speed),
            Tempting("raise_prefill_chunk", "acts on prefill, which is over when the transfer begins"),
            Tempting("lower_max_num_seqs", "relieves KV capacity, which is not short"),
            *_ADVICE[:2],
        ),
        symptoms=frozenset({"compute", "queueing"}),
        share=share,
        phase="ttft",
    )


def _unexplained_ttft(summary: Summary) -> float | None:
    """Share of TTFT that the engine's own queue and prefill times leave over; None where prefill is unknown."""
    ttft, own = summary.typical_s("ttft"), summary.typical_s("prefill")
    return None if ttft is None or own is None else ratio(ttft - own - (summary.seconds("queue_p50") or 0.0), ttft)


def slow_collectives(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """More devices on one token made it slower: they wait for each other's results."""
    here = summary.count("engine.tensor_parallel")
    if not at_least(here, 2):
        return
    for point in summary.comparators:
        changed = set(point.differs or {})
        allowed = {
            "engine.tensor_parallel",
            "engine.pipeline_parallel",
            "engine.data_parallel",
            "engine.replicas",
            "hardware.count",
        }
        fewer = point.count("engine.tensor_parallel")
        if "engine.tensor_parallel" not in changed or not changed <= allowed or fewer is None or fewer >= (here or 0):
            continue
        lost = _slower(summary.observed, point)
        if lost is None or lost[1] < 1.1:
            continue
        strength = 0.5 if lost[1] < 1.5 else 0.6
        evidence = [
            computed(
                lost[0],
                lost[1],
                1.0,
                "ratio",
                point.place,
                f"times faster with {fewer:g} in place of {here:g} devices on each token",
            )
        ]
        link = (summary.text("hardware.interconnect") or "").lower()
        if any(word in link for word in ("pcie", "ethernet", "tcp", "roce", "usb", "qpi", "upi")):
            strength = either(strength, 0.2)
            evidence.extend(configured(summary.observed, "hardware.interconnect", "the link between them"))
        yield Hypothesis(
            cause="communication.node",
            mechanism="slow_collectives",
            strength=strength,
            sentence="Devices that share each token wait for the link between them.",
            evidence=tuple(evidence),
            techniques=("reduce_tensor_parallel_degree", "collect_missing_signals"),
            tempting=(Tempting("tensor_parallel", "more of it made it slower", lost[1]), *_ADVICE[:3]),
            symptoms=frozenset({"compute", "bandwidth"}),
            phase="e2e",
        )
        return


def _slower(here: Point, there: Point) -> tuple[str, float] | None:
    """(metric, how many times better the other point is)."""
    for metric in (
        "prefill_rate_tok_per_s",
        "decode_rate_p50_tok_per_s",
        "output_throughput_per_gpu_tok_per_s",
        "output_throughput_tok_per_s",
        "total_throughput_tok_per_s",
    ):
        found = ratio(there.number(metric), here.number(metric))
        if found is not None:
            return metric, found
    for phase in ("tpot", "ttft", "e2e"):
        found = ratio(here.typical_s(phase), there.typical_s(phase))
        if found is not None:
            return phase, found
    return None
