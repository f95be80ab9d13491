"""Work that prepares a request before the engine can start it: rendering, tokenizing, images, grammars."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.boundary import outside_s
from phasewise.analyzer.summary.cold import slow_first
from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    nothing_waits,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, first, near, ratio

# From this share of a wait on, preparation is what explains it.
_EXPLAINS_RATIO = 0.35
_ADVICE = (
    Tempting("add_gpu_memory", "the engine is not reached yet; its memory is not what is waited for"),
    Tempting("raise_max_num_seqs", "the engine's queue is empty: slots are free"),
    Tempting("kv_cache_quantization", "frees KV memory, which is not short"),
    Tempting("weight_only_quantization", "acts on decode; the time is spent before the engine starts"),
    Tempting("speculative_decoding", "acts on decode; the time is spent before the engine starts"),
)


def _images(summary: Summary) -> bool:
    return summary.text("workload.kind") == "vision" or bool(summary.count("workload.images_per_request"))


def _techniques(summary: Summary) -> tuple[str, ...]:
    if _images(summary):
        return ("parallel_preprocessing", "preprocessing_cache", "scale_api_servers")
    return ("scale_api_servers", "parallel_preprocessing", "move_blocking_work_off_event_loop")


def before_admission(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The time from arrival to admission is a large part of the wait, and nothing waits in the engine."""
    spent, name = summary.typical_s("frontend"), "frontend"
    tail = first((summary.seconds("frontend_p95"), summary.seconds("frontend_max")))
    checked = summary.seconds("validation_p50")
    if spent is None and tail is None and checked is not None:
        spent, name = checked, "validation"
    if spent is None and tail is None:
        return
    longest = first((spent, tail)) or 0.0
    if longest < _EXPLAINS_RATIO * outside_s(summary):
        return  # most of what is lost between client and engine is lost elsewhere
    whole = summary.felt_s("ttft") or summary.felt_s("e2e")
    later = (summary.typical_s("prefill") or 0.0) + (summary.seconds("queue_p50") or 0.0)
    share = ratio(spent, whole)
    strength = 0.0
    evidence: list[Evidence] = []
    if share is not None and share >= _EXPLAINS_RATIO:
        strength = 0.65
        evidence.append(
            computed(
                f"{name}_share",
                share,
                None,
                "ratio",
                f"{name} / ttft",
                "of the time to first token passes before the engine admits the request",
            )
        )
    elif spent is not None and later and spent >= later and (share is None or not summary.felt_s("ttft")):
        strength = 0.6
        evidence.append(computed(f"{name}_s", spent, later, "s", name, "takes longer than queue and prefill together"))
    elif whole is None and not later and (at_least(spent, 0.5) or at_least(tail, 2.0)):
        strength = 0.5
        evidence.append(
            computed(
                f"{name}_s",
                spent if spent is not None else tail,
                None,
                "s",
                name,
                "passes before the engine admits a request",
            )
        )
    if not evidence:
        return
    if spent is not None and tail is not None and tail >= 4 * spent:
        evidence.append(
            computed(
                "frontend_tail_s", tail, spent, "s", "frontend_p95_ms", "requests queue up for the preparation itself"
            )
        )
    if at_most(summary.waiting, 0.5):
        strength = either(strength, 0.45)
        evidence.extend(given(summary, "requests_waiting", "the engine's own queue is empty"))
    elif at_most(summary.seconds("queue_p50"), 0.1 * (spent or 0.0)):
        strength = either(strength, 0.35)
        evidence.extend(given(summary, "queue_p50_ms", "hardly anything waits in the engine"))
    elif at_least(summary.waiting, 5):
        strength *= 0.6
    if _images(summary):
        strength = either(strength, 0.15)
        evidence.extend(configured(summary.observed, "workload.images_per_request", "images have to be prepared"))
    yield Hypothesis(
        cause="context",
        mechanism="before_admission",
        strength=min(strength, 0.95),
        sentence="The time passes before the engine admits the request.",
        evidence=tuple(evidence),
        techniques=_techniques(summary),
        tempting=_ADVICE,
        symptoms=frozenset({"external", "host", "queueing"}),
        share=share,
        phase="ttft",
    )


def preprocessing(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Images or audio are prepared by so few workers that their rate is the rate of the deployment."""
    each, done = summary.seconds("preprocess_p50"), summary.number("request_throughput_per_s")
    workers = summary.count("engine.preprocess_workers")
    capacity = summary.number("preprocess_throughput_per_s") or ratio(workers or 1.0, each)
    whole = summary.felt_s("ttft") or summary.felt_s("e2e")
    strength = 0.0
    evidence: list[Evidence] = []
    if done and capacity and 0.4 * capacity <= done <= 1.15 * capacity:
        strength = 0.6 if workers or summary.number("preprocess_throughput_per_s") else 0.45
        evidence.append(
            computed(
                "requests_per_s",
                done,
                capacity,
                "1/s",
                "preprocess_workers / preprocess_p50_ms",
                "requests finish at the rate at which they can be prepared",
            )
        )
    share = ratio(each, whole)
    if share is not None and share >= _EXPLAINS_RATIO:
        strength = either(strength, 0.6)
        evidence.append(
            computed(
                "preprocess_share",
                share,
                None,
                "ratio",
                "preprocess_p50_ms / ttft",
                "of the time to first token is preparation",
            )
        )
    later = (summary.typical_s("prefill") or 0.0) + (summary.seconds("queue_p50") or 0.0)
    if whole is None and each is not None and later and each >= 3 * later:
        strength = either(strength, 0.6)
        said = "takes many times as long as queue and prefill together"
        evidence.append(computed("preprocess_s", each, later, "s", "preprocess_p50_ms", said))
    if not evidence:
        return
    serial = _hardly_scales(summary, done)
    if serial is not None:
        strength = either(strength, 0.3)
        evidence.append(serial)
    smaller = _smaller_is_faster(summary, done)
    if smaller is not None:
        strength = either(strength, 0.5)
        evidence.append(smaller)
    strength = supported(strength, evidence, 0.35, nothing_waits(summary, "the engine's own queue is empty", most=0.5))
    if at_most(workers, 1):
        strength = either(strength, 0.1)
        evidence.extend(configured(summary.observed, "engine.preprocess_workers", "one worker prepares for all"))
    yield Hypothesis(
        cause="context",
        mechanism="preprocessing",
        strength=min(strength, 0.95),
        sentence="Preparing images (or audio) holds the requests, not the model.",
        evidence=tuple(evidence),
        techniques=("parallel_preprocessing", "preprocessing_cache", "scale_api_servers"),
        tempting=_ADVICE,
        symptoms=frozenset({"queueing", "compute", "host"}),
        share=share,
        phase="ttft",
    )


def _hardly_scales(summary: Summary, done: float | None) -> Evidence | None:
    """Many clients get hardly more than one alone: something serial stands in front of the batch."""
    load = summary.in_flight
    for point in summary.comparators:
        if not at_most(point.count("workload.concurrency"), 1):
            continue
        alone = point.number("request_throughput_per_s") or ratio(1.0, point.typical_s("e2e"))
        gain = ratio(done, alone)
        if gain is not None and load is not None and load >= 4 and gain < 0.25 * load:
            return computed(
                "gain_over_one_client", gain, load, "ratio", point.place, "all clients together against one alone"
            )
    return None


def _smaller_is_faster(summary: Summary, done: float | None) -> Evidence | None:
    image = {"workload.image_width_px", "workload.image_height_px", "workload.images_per_request"}
    for point in summary.comparators:
        changed = set(point.differs or {})
        there = point.number("request_throughput_per_s")
        longer = ratio(point.output_tokens, summary.output_tokens)
        rest = changed - image
        if (
            changed & image
            and there
            and done
            and there > 1.5 * done
            and (not rest or (rest == {"workload.output_tokens"} and at_least(longer, 1)))
        ):
            return computed(
                "requests_per_s",
                there,
                done,
                "1/s",
                point.place,
                "smaller images go faster although the model has no less to write",
            )
    return None


def grammar_first(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Constrained output: the grammar is compiled before the first token, so that TTFT holds the time and TPOT does not."""
    if (
        summary.truth("workload.structured_output") is not True
        and summary.text("workload.structured_output_schema") is None
    ):
        return
    ttft, own = summary.typical_s("ttft"), summary.typical_s("prefill")
    if own is None:
        own = ratio(summary.input_tokens, summary.number("prefill_rate_tok_per_s"))
    if own is None and summary.input_tokens:
        least = machine.prefill_floor_s(summary.input_tokens)
        own = 3 * least if least is not None else None
    evidence: list[Evidence] = []
    strength = 0.0
    rows = [(p, t) for p in summary.requests if (t := p.typical_s("ttft")) is not None]
    compiled = slow_first(rows, 0.2)
    if compiled is not None:
        row, slow, later = compiled
        strength = 0.65
        said = "the first request of a schema waits for its grammar"
        evidence.append(computed("first_ttft_s", slow, later, "s", row.place, said))
    if ttft and own is not None and ttft > 4 * own and ttft - own > 0.2:
        strength = either(strength, 0.45)
        evidence.append(computed("ttft_s", ttft, own, "s", "ttft and prefill", "prefill explains little of it"))
    if _equal(summary) is not None and at_least(ttft, 0.5):
        strength = either(strength, 0.3)
        evidence.extend(e for e in (_equal(summary),) if e is not None)
    if not evidence:
        return
    if at_most(summary.waiting, 0.5):
        strength = either(strength, 0.3)
        evidence.extend(given(summary, "requests_waiting", "nothing waits in the engine"))
    elif at_least(summary.waiting, 5):
        strength *= 0.6
    evidence.extend(configured(summary.observed, "workload.structured_output_schema", "output is constrained"))
    yield Hypothesis(
        cause="context",
        mechanism="grammar_compilation",
        strength=min(strength, 0.93),
        sentence="The grammar of the constrained output is compiled before the first token.",
        evidence=tuple(evidence),
        techniques=("cache_compiled_grammar", "simplify_schema", "faster_grammar_backend"),
        tempting=(*_ADVICE, Tempting("prefix_caching", "acts on prefill, which is short here")),
        symptoms=frozenset({"host", "queueing", "compute"}),
        phase="ttft",
    )


def equal_delay(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """All requests are late by the same time, whatever their place in line: something in front holds them all."""
    found = _equal(summary)
    ttft = summary.typical_s("ttft")
    own = summary.typical_s("prefill") or ratio(summary.input_tokens, summary.number("prefill_rate_tok_per_s"))
    if found is None or ttft is None or ttft < 0.5 or not at_least(summary.in_flight, 4):
        return
    if own is not None and own > 0.4 * ttft:
        return
    strength = 0.4
    evidence = [found]
    if own is not None:
        strength = either(strength, 0.3)
        evidence.append(computed("ttft_s", ttft, own, "s", "ttft and prefill", "prefill explains little of it"))
    if at_most(summary.waiting, 0.5):
        strength = either(strength, 0.35)
        evidence.extend(given(summary, "requests_waiting", "nothing waits in the engine"))
    elif at_least(summary.waiting, 1):
        strength *= 0.4
    yield Hypothesis(
        cause="context",
        mechanism="equal_delay",
        strength=strength,
        sentence="Every request is late by the same time before the engine starts it.",
        evidence=tuple(evidence),
        techniques=_techniques(summary),
        tempting=_ADVICE,
        symptoms=frozenset({"queueing"}),
        phase="ttft",
    )


def _equal(summary: Summary) -> Evidence | None:
    """TTFT with hardly any spread."""
    for point in summary.views:
        mean, spread = point.typical_s("ttft"), point.seconds("ttft_std")
        if mean and spread is not None and spread <= 0.1 * mean:
            return computed(
                "ttft_std_s",
                spread,
                mean,
                "s",
                f"{point.place}.ttft_std_ms",
                "hardly any spread: all are late by the same time",
            )
        low, high = point.seconds("ttft_min"), point.seconds("ttft_max") or point.tail_s("ttft")
        if low and high and low >= 0.85 * high and not near(low, high, 1e-9):
            return computed(
                "ttft_min_s", low, high, "s", f"{point.place}.ttft_min_ms", "the fastest is as late as the slowest"
            )
    return None
