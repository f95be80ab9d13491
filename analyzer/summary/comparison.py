"""Runs that differ from the observed one in a setting: what was changed, and what moved with it.

A controlled comparison is the strongest evidence a summary can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phasewise.analyzer.summary.change import MATTERS, Change, Lever
from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, Tempting, computed, either
from phasewise.analyzer.summary.levers import lever_of
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, finite, ratio

_DECISIVE = 2.0


def gains_of(observed: Summary, point: Point) -> dict[str, float]:
    """How many times better `point` is than the observed run, by phase: times inverted, rates as they are."""
    here = observed.observed
    found: dict[str, float] = {}
    for phase in ("ttft", "tpot", "itl", "e2e"):
        # the tail may move alone: a queue behind one replica leaves the median as it was
        known = [ratio(here.typical_s(phase), point.typical_s(phase)), ratio(here.tail_s(phase), point.tail_s(phase))]
        worse = [value for value in known if value is not None]
        if worse:
            found[phase] = max(worse)
    if "tpot" not in found and (pace := ratio(here.token_s, point.token_s)) is not None:
        found["tpot"] = pace
    for metric in (
        "output_throughput_tok_per_s",
        "total_throughput_tok_per_s",
        "request_throughput_per_s",
        "total_throughput_per_gpu_tok_per_s",
        "output_throughput_per_gpu_tok_per_s",
    ):
        more = ratio(point.number(metric), here.number(metric))
        if more is not None:
            found["throughput"] = more
            break
    prefill = ratio(point.number("prefill_rate_tok_per_s"), here.number("prefill_rate_tok_per_s"))
    if prefill is not None and "ttft" not in found:
        found["ttft"] = prefill
    return found


def changes(summary: Summary) -> Iterator[Change]:
    """The runs that differ in one setting, or in several that go together."""
    for point in summary.comparators:
        if not point.differs or (point.group or summary.observed.group) != summary.observed.group:
            continue
        paths = [path for path in point.differs if path not in _COMPANIONS.get(_leader(point.differs), frozenset())]
        if len(paths) == 1:
            path = paths[0]
            yield Change(path, summary.settings.raw(path), point.differs[path], gains_of(summary, point), point)


# Settings that are changed together with another one and mean nothing by themselves then.
_COMPANIONS: Mapping[str, frozenset[str]] = {
    "engine.quantization": frozenset({"engine.quant_kernel", "model.weight_dtype", "model.weight_gb", "model.name"}),
    "engine.gateway": frozenset({"engine.gateway_buffer_bytes"}),
    "engine.gpu_memory_utilization": frozenset({"engine.kv_pool_tokens", "engine.kv_pool_gb", "engine.effective_max_num_seqs"}),
    "engine.kv_dtype": frozenset({"model.kv_dtype", "engine.kv_pool_tokens", "engine.kv_pool_gb", "model.kv_bytes_per_token"}),
    "workload.structured_output": frozenset({"workload.structured_output_schema", "engine.structured_output_backend"}),
    "engine.replicas": frozenset({"hardware.count"}),
    "engine.data_parallel": frozenset({"hardware.count"}),
    "engine.prefill_decode_disaggregation": frozenset({"hardware.count", "engine.kv_transfer_backend", "engine.replicas"}),
}  # fmt: skip


def _leader(differs: Mapping[str, object]) -> str:
    return next((path for path in _COMPANIONS if path in differs), "")


def compared(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """One hypothesis a comparison whose changed setting is known to act on something, where the numbers moved with it."""
    for change in changes(summary):
        lever = lever_of(summary, machine, change)
        if lever is None:
            continue
        best = change.best(lever.phases)
        if best is None or best[1] < MATTERS:
            continue
        strength = lever.strength if best[1] < _DECISIVE else either(lever.strength, 0.3)
        evidence: list[Evidence] = [
            computed(
                f"{best[0]}_gain", best[1], 1.0, "ratio", change.point.place,
                f"times better with {change.path} = {_shown(change.there)} in place of {_shown(change.here)}",
            )
        ]  # fmt: skip
        thin = _too_thin(summary, change.point)
        if thin is not None:
            strength *= 0.3
            evidence.append(thin)
        elif best[0] == "e2e" and summary.output_tokens is None and not at_least(summary.number("samples_count"), 10):
            strength *= 0.6
            evidence.append(
                computed(
                    "output_tokens",
                    None,
                    None,
                    "tokens",
                    "workload.output_tokens",
                    "without lengths a longer answer looks like a slower one",
                    against=True,
                )
            )
        yield Hypothesis(
            cause=lever.cause,
            mechanism=lever.mechanism,
            strength=min(strength, 0.93),
            sentence=lever.sentence,
            evidence=tuple(evidence),
            techniques=lever.techniques,
            tempting=_tempting(lever),
            symptoms=lever.symptoms,
            share=1 - 1 / best[1] if best[0] != "throughput" else None,
            phase=best[0],
        )


def _too_thin(summary: Summary, point: Point) -> Evidence | None:
    """One or two requests an arm, of unknown length: the arms may simply have done different work."""
    few = [n for p in (summary.observed, point) if (n := p.number("samples_count")) is not None]
    if few and min(few) <= 3 and (summary.output_tokens is None or summary.truth("workload.streaming") is False):
        return computed(
            "samples_count",
            min(few),
            30.0,
            "count",
            point.place,
            "so few requests of unknown length decide nothing",
            against=True,
        )
    return None


def _shown(value: object) -> str:
    number = finite(value)  # a whole number of JSON may have any length
    if number is not None:
        return f"{number:g}"
    return "another value" if value is None else str(value)


def _tempting(lever: Lever) -> tuple[Tempting, ...]:
    common = (
        ("weight_only_quantization", "bandwidth"),
        ("speculative_decoding", "bandwidth"),
        ("prefix_caching", "prefill.compute"),
        ("add_replicas", "queue"),
        ("kv_cache_quantization", "kv"),
        ("raise_max_num_seqs", "queue.slots"),
    )
    return tuple(
        Tempting(name, f"acts elsewhere: the comparison shows that {lever.mechanism.replace('_', ' ')} holds the time")
        for name, acts in common
        if name not in lever.techniques and not lever.cause.startswith(acts)
    )
