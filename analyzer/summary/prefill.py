"""A request's own prompt: how long it takes, and whether chunks are too small for the device."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    objection,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, ratio
from phasewise.analyzer.summary.prefix import Reuse, reuse
from phasewise.analyzer.summary.shares import whole_s

_SMALL_CHUNK_TOKENS = 1024
_LONG_PROMPT_TOKENS = 1000
_ADVICE = (
    Tempting("speculative_decoding", "acts on decode; this is prefill"),
    Tempting("weight_only_quantization", "saves bytes; a prompt is computed, not streamed, and dequantizing adds work"),
    Tempting("add_replicas", "another replica computes one prompt no faster, and nothing waits"),
    Tempting("kv_cache_quantization", "saves KV memory, which is not short"),
)


def own_prompt(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """TTFT is the prompt's tokens over the prefill rate: the request's own work, nothing else."""
    ttft, prompt = summary.typical_s("ttft"), summary.input_tokens
    rate, measured = summary.number("prefill_rate_tok_per_s"), summary.typical_s("prefill")
    evidence: list[Evidence] = []
    strength = 0.0
    alone = at_most(summary.in_flight, 1) or summary.text("workload.arrival") == "single"
    own = measured if measured is not None else ratio(prompt, rate)
    if ttft and own and 0.6 * ttft <= own <= 1.3 * ttft:
        strength = 0.55
        evidence.append(
            computed(
                "prefill_s",
                own,
                ttft,
                "s",
                "input_tokens / prefill_rate",
                "the prompt alone takes the time to first token",
            )
        )
    least = machine.prefill_floor_s(prompt) if prompt else None
    if ttft and least and alone and 0.25 * ttft <= least <= 1.2 * ttft:
        strength = either(strength, 0.45)
        evidence.append(
            computed(
                "prefill_floor_s",
                least,
                ttft,
                "s",
                "2 x parameters x input_tokens / peak",
                "the prompt's arithmetic at peak takes a good part of it",
            )
        )
    grows = _grows_with_prompt(summary)
    if grows is not None and alone:
        strength = either(strength, 0.45)
        evidence.append(grows)
    if not evidence:
        return
    if at_most(summary.waiting, 0.5):
        strength = either(strength, 0.45)
        evidence.extend(given(summary, "requests_waiting", "nothing waits"))
    elif at_least(summary.waiting, 1):
        # a time that an engine calls prefill may hold the wait for it (SGLang's does): the longer the queue, the likelier
        standing = at_least(ratio(summary.waiting, summary.peak("requests_running")), 1)
        strength *= 0.25 if standing else 0.5
        evidence.extend(objection(summary.place_of("requests_waiting"), "requests_waiting", "requests wait meanwhile"))
    if alone:
        strength = either(strength, 0.25)
        evidence.extend(configured(summary.observed, "workload.concurrency", "one request at a time"))
    if at_least(summary.preemptions, 1):
        strength *= 0.4
    part = ratio(ttft, whole_s(summary))
    if part is not None and part < 0.4 and summary.text("workload.objective") != "ttft":
        strength *= max(0.2, part / 0.4)
        evidence.append(
            computed(
                "ttft_share",
                part,
                0.5,
                "ratio",
                "ttft / e2e",
                "prefill is the smaller part of the request",
                against=True,
            )
        )
    chunk = summary.count("engine.prefill_chunk_tokens") or summary.count("engine.max_num_batched_tokens")
    small = chunk is not None and prompt is not None and chunk < _SMALL_CHUNK_TOKENS and prompt >= 4 * chunk
    if small and chunk and prompt and ttft:
        evidence.append(
            computed(
                "chunks_per_prompt",
                prompt / chunk,
                None,
                "count",
                "input_tokens / prefill_chunk_tokens",
                "each chunk pays the fixed cost of a step again",
            )
        )
    bucket = summary.count("engine.prefill_bucket_tokens")
    if bucket and prompt and bucket >= 1.3 * prompt:
        evidence.append(
            computed(
                "padded_tokens",
                bucket,
                prompt,
                "tokens",
                "engine.prefill_bucket_tokens",
                "the prompt is padded to the next bucket",
            )
        )
    found = reuse(summary)
    yield Hypothesis(
        cause="prefill.compute",
        mechanism="small_chunks" if small else "own_prompt",
        strength=min(strength, 0.93),
        sentence="The time to first token is the request's own prompt being computed.",
        evidence=tuple(evidence),
        techniques=_techniques(summary, machine, small, _may_reuse(summary, found)),
        tempting=(
            *_ADVICE,
            *(
                ()
                if small
                else (Tempting("raise_prefill_chunk", "steps are not short enough for their fixed cost to matter"),)
            ),
        ),
        share=ratio(own, summary.typical_s("e2e") or ttft),
        phase="ttft",
    )


def _may_reuse(summary: Summary, found: Reuse | None) -> bool:
    """Nothing says that prompts share nothing, that the cache is on, or that it hits already."""
    if summary.truth("engine.prefix_caching") is True or summary.text("workload.prefix_pattern") == "none":
        return False
    hit = summary.number("prefix_cache_hit_ratio") or (found.hit if found else None)
    return (hit is None or hit <= 0.05) and at_least(summary.input_tokens, _LONG_PROMPT_TOKENS)


def _techniques(summary: Summary, machine: Machine, small_chunk: bool, may_reuse: bool) -> tuple[str, ...]:
    found: list[str] = []
    if small_chunk:
        found.append("raise_prefill_chunk")
    if may_reuse:
        found.append("prefix_caching")
    if at_least(summary.input_tokens, _LONG_PROMPT_TOKENS):
        found.append("shorten_prompt")
    if machine.weight_bits is None or machine.weight_bits >= 16:
        found.append("low_precision_compute")
    devices = summary.count("hardware.count") or 1.0
    if devices > 1 and (summary.count("engine.tensor_parallel") or 1.0) < devices:
        found.append("tensor_parallel")
    return tuple(found)


def _grows_with_prompt(summary: Summary) -> Evidence | None:
    """TTFT in proportion to the prompt, over runs that differ in nothing else."""
    for path in ("workload.input_tokens", "workload.total_tokens"):
        runs = [
            (tokens, t) for tokens, p in summary.series(path) if (t := p.typical_s("ttft")) is not None and tokens > 0
        ]
        if len(runs) >= 2 and runs[-1][0] >= 2 * runs[0][0]:
            longer, slower = runs[-1][0] / runs[0][0], ratio(runs[-1][1], runs[0][1])
            if slower is not None and slower >= 0.6 * longer:
                return computed(
                    "ttft_growth", slower, longer, "ratio", f"series over {path}", "TTFT grows with the prompt"
                )
    return None
