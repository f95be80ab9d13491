"""Decode against the memory roof: bytes a step over bandwidth, clocks that do not matter, drafts that cost too much."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    nothing_waits,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most, first, ratio

# Decode that is limited by memory reaches this share of the data sheet's bandwidth at least, far from any other limit.
_NEAR_ROOF_RATIO = 0.35
_GOOD_ROOF_RATIO = 0.55
_PROMPT_OVER_FLOOR = 10.0
_ADVICE = (
    Tempting("prefix_caching", "acts on prefill; this is decode"),
    Tempting("raise_prefill_chunk", "acts on prefill; this is decode"),
    Tempting("add_replicas", "one stream decodes no faster on more replicas"),
)


def drafting(point: Point) -> bool:
    """Speculative decoding is on."""
    method = point.setting("engine.speculation.method")
    tokens = point.count("engine.speculation.draft_tokens")
    if isinstance(method, str):
        return method.lower() not in ("none", "off", "")
    return bool(tokens)


def batch_of(summary: Summary) -> float | None:
    """Sequences that decode together: running, else the declared concurrency within the slot limit."""
    running = summary.number("requests_running")
    if running:
        return running
    load, limit = summary.in_flight, summary.count("engine.max_num_seqs")
    return min(load, limit) if load and limit else load


def step_s(summary: Summary) -> float | None:
    """Seconds of one decode step as streams see it; None under speculation, where a step yields several tokens."""
    if drafting(summary.observed):
        return None
    pace = summary.typical_s("tpot") or ratio(1.0, summary.number("decode_rate_p50_tok_per_s"))
    if pace is not None:
        return pace
    batch = batch_of(summary)
    return ratio(batch, summary.number("output_throughput_tok_per_s")) if at_most(batch, 1) else None


def decode_share(summary: Summary) -> float | None:
    """Share of end to end that is decode: (N - 1) x TPOT over the whole; None where a part is unknown."""
    pace, tokens = summary.typical_s("tpot"), summary.output_tokens
    whole, ttft = summary.typical_s("e2e"), summary.typical_s("ttft")
    if pace is None or tokens is None:
        return None if whole is None or ttft is None else max(0.0, 1 - ttft / whole) if whole else None
    decode = max(tokens - 1, 0.0) * pace
    total = whole or (decode + ttft if ttft is not None else None)
    share = ratio(decode, total)
    return None if share is None else min(share, 1.0)


def memory_roof(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The bytes a decode step must read take most of the step at the memory's bandwidth."""
    pace, batch = step_s(summary), batch_of(summary) or 1.0
    context = (summary.input_tokens or 0.0) + (summary.output_tokens or 0.0) / 2
    floor = machine.floor_s(batch, context)
    read = machine.step_bytes(batch, context)
    if pace is None or floor is None or read is None or machine.bandwidth_bytes_per_s is None:
        return
    if machine.read_low_bytes != machine.read_high_bytes:
        return  # the format of the weights is unknown: between a quarter and all of the bytes
    achieved = floor / pace
    if not _NEAR_ROOF_RATIO <= achieved <= 1.1:
        return
    strength = 0.8 if achieved >= _GOOD_ROOF_RATIO else 0.65
    if not machine.devices_known:
        strength *= 0.7  # shared over all devices the same step would be far from the roof
    evidence: list[Evidence] = [
        computed("achieved_bandwidth_ratio", achieved, 1.0, "ratio", "bytes per step / (tpot x bandwidth)", "of the peak bandwidth is used by what a step has to read")
    ]  # fmt: skip
    share = decode_share(summary)
    if share is not None and share < 0.5:
        strength *= 0.4
        evidence.append(
            computed(
                "decode_share",
                share,
                0.5,
                "ratio",
                "(N - 1) x tpot / e2e",
                "decode is the smaller part of the time",
                against=True,
            )
        )
    elif share is not None:
        evidence.append(computed("decode_share", share, None, "ratio", "(N - 1) x tpot / e2e", "of the time is decode"))
    late = _late_start(summary, machine)
    if late is not None:
        strength *= max(0.0, 1 - 1.2 * late)
        evidence.append(
            computed(
                "unexplained_start", late, 0.0, "ratio", "ttft / e2e", "is a wait for the first token that the prompt does not explain",
                against=True,
            )
        )  # fmt: skip
    if summary.text("workload.objective") == "ttft":
        strength *= 0.5
    strength = supported(strength, evidence, 0.1, nothing_waits(summary))
    by_kv = read[1] > read[0]
    sockets = machine.kind == "cpu" and at_least(summary.count("hardware.count"), 2)
    yield Hypothesis(
        cause="decode.kv" if by_kv else "decode.weights",
        mechanism="memory_roof",
        strength=strength,
        sentence=f"Decode runs at {achieved:.0%} of the memory bandwidth: it waits for {'KV' if by_kv else 'weight'} bytes.",
        evidence=tuple(evidence),
        techniques=_techniques(summary, machine, batch, by_kv, sockets and achieved < 0.6),
        tempting=(
            *_ADVICE,
            *(
                ()
                if by_kv
                else (
                    Tempting(
                        "kv_cache_quantization", "KV bytes are the small part of a step", read[1] / (sum(read) or 1.0)
                    ),
                )
            ),
        ),
        share=share,
        phase="tpot",
        caveat="how long the request takes besides decoding" if share is None else None,
    )


def _late_start(summary: Summary, machine: Machine) -> float | None:
    """Share of the request before the first token, where it is large and many times what the prompt's arithmetic takes.

    None where the start is short, or where nothing says how long the prompt takes. Prefill reaches a quarter of the peak
    or more on prompts of some length; ten times the floor is not the prompt.
    """
    share, ttft, prompt = decode_share(summary), summary.typical_s("ttft"), summary.input_tokens
    measured = summary.typical_s("prefill") or ratio(prompt, summary.number("prefill_rate_tok_per_s"))
    floor = machine.prefill_floor_s(prompt) if prompt else None
    most = 2 * measured if measured else _PROMPT_OVER_FLOOR * floor if floor else None
    if share is None or ttft is None or most is None or share > 0.85 or ttft < max(most, 0.3):
        return None
    return 1 - share


def _techniques(summary: Summary, machine: Machine, batch: float, by_kv: bool, sockets: bool) -> tuple[str, ...]:
    found: list[str] = []
    if sockets:
        found.append("numa_local_placement")
    if by_kv and (machine.kv_bits is None or machine.kv_bits > 8):
        found.append("kv_cache_quantization")
    if not by_kv and machine.weight_bits is not None and machine.weight_bits >= 8:
        found.append("weight_only_quantization")
    if not by_kv and batch <= 8:
        found.append("larger_decode_batch")
    if batch <= 16 and not drafting(summary.observed) and not sockets:
        found.append("speculative_decoding")
    found.extend(("smaller_or_sparse_model", "faster_memory_hardware"))
    return tuple(found)


def clock(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """What happens to the pace when only the core clock changes: nothing (memory), or the same (compute)."""
    runs = _clocked(summary)
    if len(runs) < 2:
        return
    slow_clock, slow = runs[0]
    fast_clock, fast = runs[-1]
    turned = fast_clock / slow_clock
    if turned < 1.15:
        return
    for name, phase, low, high in (
        ("decode_rate", "tpot", slow.token_s or _step_share(slow), fast.token_s or _step_share(fast)),
        ("prefill_rate", "ttft", _prefill_pace(slow), _prefill_pace(fast)),
    ):
        gained = ratio(low, high)
        if gained is None:
            continue
        followed = (gained - 1) / (turned - 1)
        said = computed(
            name, gained, turned, "ratio", f"{slow.place} and {fast.place}", "gained by this much more core clock"
        )
        if phase == "tpot" and followed <= 0.35:
            yield Hypothesis(
                cause="decode.weights",
                mechanism="clock_does_not_matter",
                strength=0.85,
                sentence="Decode ignores the core clock: it waits for memory.",
                evidence=(said,),
                techniques=_techniques(summary, machine, batch_of(summary) or 1.0, False, False),
                tempting=(
                    *_ADVICE,
                    Tempting("low_precision_compute", "makes arithmetic faster, which is not waited for", followed),
                ),
                symptoms=frozenset({"host"}),
                phase=phase,
            )
        elif followed >= 0.7:
            yield Hypothesis(
                cause="decode.compute" if phase == "tpot" else "prefill.compute",
                mechanism="clock_matters",
                strength=0.6 if phase == "tpot" else 0.5,
                sentence="The pace follows the core clock: it is arithmetic.",
                evidence=(said,),
                techniques=("low_precision_compute", "tensor_parallel", "smaller_or_sparse_model"),
                tempting=(Tempting("faster_memory_hardware", "memory is not waited for", followed),),
                phase=phase,
            )


def _step_share(point: Point) -> float | None:
    """Seconds of the deployment an output token takes: comparable between runs of one load."""
    return ratio(1.0, point.number("output_throughput_tok_per_s"))


def _prefill_pace(point: Point) -> float | None:
    return first(
        (ratio(1.0, point.number("prefill_rate_tok_per_s")), point.typical_s("prefill"), point.typical_s("ttft"))
    )


def _clocked(summary: Summary) -> list[tuple[float, Point]]:
    """Runs by core clock, as set or as measured, that differ in nothing else."""
    found: dict[float, Point] = {}
    for point in (summary.observed, *summary.comparators):
        if point.differs is not None and not set(point.differs) <= {"hardware.sm_clock_mhz"}:
            continue
        mhz = first((point.count("hardware.sm_clock_mhz"), point.number("sm_clock_mhz")))
        if mhz and (point.token_s or _step_share(point) or _prefill_pace(point)):
            found.setdefault(mhz, point)
    return sorted(found.items())


def costly_drafts(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Speculative decoding that costs more than it gives."""
    if not drafting(summary.observed):
        return
    evidence: list[Evidence] = []
    strength = 0.0
    for point in summary.comparators:
        changed = set(point.differs or {})
        if not changed or not changed <= {"engine.speculation.method", "engine.speculation.draft_tokens"}:
            continue
        fewer = not drafting(point) or (
            (point.count("engine.speculation.draft_tokens") or 1e9)
            < (summary.count("engine.speculation.draft_tokens") or 0)
        )
        gain = _faster(point, summary.observed)
        if fewer and gain is not None and gain[1] >= 1.05:
            strength = either(strength, 0.75 if gain[1] >= 1.15 else 0.6)
            evidence.append(
                computed(
                    gain[0],
                    gain[1],
                    1.0,
                    "ratio",
                    point.place,
                    "is the same load without (or with fewer) drafts, as a multiple of this run's speed",
                )
            )
    accepted, drafts = summary.number("spec_acceptance_ratio"), summary.count("engine.speculation.draft_tokens")
    if accepted is not None and accepted < 0.45:
        strength = either(strength, 0.3 if accepted > 0.25 else 0.45)
        per_round = _tokens_per_round(accepted, drafts or 1.0)
        evidence.append(
            computed(
                "tokens_per_round",
                per_round,
                (drafts or 1.0) + 1,
                "tokens",
                "spec_acceptance_ratio",
                "most drafts are thrown away",
            )
        )
    batch = batch_of(summary)
    if evidence and at_least(batch, 16):
        strength = either(strength, 0.2)
        evidence.append(
            computed(
                "batch", batch, None, "count", "running or concurrency", "a full batch has no idle compute for drafts"
            )
        )
    if not evidence:
        return
    evidence.extend(configured(summary.observed, "engine.speculation.method", "drafts are made by"))
    yield Hypothesis(
        cause="decode.weights",
        mechanism="costly_drafts",
        strength=min(strength, 0.93),
        sentence="Speculative decoding costs more here than it gives.",
        evidence=tuple(evidence),
        techniques=("disable_or_shorten_speculation",),
        tempting=(Tempting("speculative_decoding", "is on already, and is what costs the time"), *_ADVICE),
        symptoms=frozenset({"host", "compute"}),
        phase="tpot",
    )


def _tokens_per_round(accepted: float, drafts: float) -> float:
    """Expected tokens of one verification: (1 - a^(k+1)) / (1 - a) for an independent acceptance a of each of k drafts."""
    if accepted >= 1:
        return drafts + 1
    return float((1 - accepted ** min(drafts + 1, 1e3)) / (1 - accepted))


def _faster(point: Point, other: Point) -> tuple[str, float] | None:
    """(metric, how many times faster `point` decodes than `other`)."""
    pace = ratio(other.token_s, point.token_s)
    if pace is not None:
        return "tpot", pace
    for metric in ("output_throughput_tok_per_s", "total_throughput_tok_per_s", "request_throughput_per_s"):
        rate = ratio(point.number(metric), other.number(metric))
        if rate is not None:
            return metric, rate
    whole = ratio(other.typical_s("e2e"), point.typical_s("e2e"))
    return None if whole is None else ("e2e", whole)


def room_in_the_batch(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """More streams cost nothing: throughput rises in proportion while the time per token stands still."""
    runs = [
        (load, point) for load, point in summary.series("workload.concurrency") if point.token_s and point.throughput
    ]
    if len(runs) < 2 or runs[-1][0] < 2 * runs[0][0]:
        return
    (few, light), (many, heavy) = runs[0], runs[-1]
    pace, gain = ratio(heavy.token_s, light.token_s), ratio(heavy.throughput, light.throughput)
    here = summary.count("workload.concurrency")
    if pace is None or gain is None or pace > 1.25 or gain < 0.6 * many / few or here is None or here > few * 2:
        return
    evidence = (
        computed(
            "tpot_growth", pace, 1.0, "ratio", f"{light.place} to {heavy.place}", f"from {few:g} to {many:g} streams"
        ),
        computed(
            "throughput_growth",
            gain,
            many / few,
            "ratio",
            f"{light.place} to {heavy.place}",
            "the same weights serve more streams",
        ),
    )
    yield Hypothesis(
        cause="decode.weights",
        mechanism="room_in_the_batch",
        strength=0.6,
        sentence="A step reads the same weights for few streams as for many: the batch has room.",
        evidence=evidence,
        techniques=(
            "larger_decode_batch",
            "weight_only_quantization" if (machine.weight_bits or 0) >= 16 else "smaller_or_sparse_model",
        ),
        tempting=_ADVICE,
        phase="tpot",
    )
