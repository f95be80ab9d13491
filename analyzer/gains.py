"""What a technique can take off the time at most: direct (of the seconds it acts on) and induced (waiting that drains).

Technique files name these functions. Each takes the situation's shares of the affected end-to-end seconds and its signals,
and returns a share of the same seconds, or None where what it needs is unknown. They are ceilings, not predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phasewise.analyzer.waiting import wait_removed_ratio
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE

Value = float | str | bool | None

# Waiting that ends sooner when the running sequences finish sooner.
DRAINING: frozenset[str] = frozenset({"queue.slots", "queue.capacity", "queue.budget", "queue.head_of_line", "kv.wait"})
# Seconds in which the engine works for the request.
SERVICE: frozenset[str] = frozenset(
    cause
    for cause in CAUSES
    if CLASS_OF_CAUSE[cause] in ("compute", "bandwidth", "host") or cause in ("communication.node", "kv.preempt")
)


@dataclass(frozen=True, slots=True)
class GainInputs:
    """shares: cause -> share of the affected end-to-end seconds; acts_on: the technique's causes; parameters: from its file."""

    shares: Mapping[str, float]
    signals: Mapping[str, Value]
    acts_on: tuple[str, ...]
    parameters: Mapping[str, float]

    def number(self, name: str) -> float | None:
        value = self.signals.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def share(self, *causes: str) -> float:
        return sum(self.shares.get(cause, 0.0) for cause in causes)

    @property
    def acted(self) -> float:
        return self.share(*self.acts_on)

    @property
    def waited(self) -> float:
        """Share of the waiting it acts on."""
        return self.share(*(cause for cause in self.acts_on if cause in DRAINING))

    @property
    def overload_ratio(self) -> float | None:
        """How far arrivals outran departures: in one burst, the part of its requests that waited at the peak."""
        most, count = self.number("waiting_max"), self.number("requests_count")
        return None if most is None or not count else min(1.0, most / count)


Direct = Callable[[GainInputs], float | None]
Induced = Callable[[GainInputs, float], float | None]


# --- mathematics -----------------------------------------------------------------------------------------------------


def expected_tokens_per_round(acceptance_ratio: float, draft_tokens: int) -> float:
    """Tokens one verification step yields: (1 - a^(k+1)) / (1 - a), each draft token accepted with probability a.

    Leviathan et al. 2023 (arXiv 2211.17192); before the cost of drafting and of verifying. a = 0.8, k = 4: 3.3616.
    """
    if acceptance_ratio >= 1:
        return draft_tokens + 1.0
    return float((1 - acceptance_ratio ** (draft_tokens + 1)) / (1 - acceptance_ratio))


def speculation_speedup(acceptance_ratio: float, draft_tokens: int, draft_cost_ratio: float) -> float:
    """Decode time before over after: expected tokens / (1 + k * c), c the draft model's step over the target's.

    Holds while verifying k + 1 tokens costs no more than one, that is while decode reads weights and computes little.
    """
    return expected_tokens_per_round(acceptance_ratio, draft_tokens) / (1 + draft_tokens * draft_cost_ratio)


def bits_saved_ratio(from_bits: float, to_bits: float) -> float:
    """Part of the bytes that a narrower value spares; 0 where it is not narrower."""
    return max(0.0, 1 - to_bits / from_bits)


def pool_relief_ratio(pool_tokens: float | None, need_tokens: float | None, growth: float) -> float:
    """Part of the waiting for KV blocks that a pool `growth` times as large ends; 1 where need or pool is unknown (a ceiling).

    need_tokens: what the requests in flight fill at full length. The pool is a server whose rate of admissions goes with its
    size: a backlog far above it drains `growth` times as fast (1 - 1/growth of the waiting), and where the larger pool holds
    all that is needed nothing waits. Holds while steps do not get longer with more sequences.
    """
    if pool_tokens is None or need_tokens is None or need_tokens <= pool_tokens:
        return 1.0
    return min(1.0, max(1 - 1 / growth, (growth - 1) * pool_tokens / (need_tokens - pool_tokens)))


def backlog_relief_ratio(relief: float, overload_ratio: float | None) -> float:
    """Part of the waiting that ends when departures take `relief` less time each, at an overload that comes and goes.

    Request k of a burst waits k (1/m - 1/a), a and m the rates of arrivals and departures: departures faster by `relief` spare
    k relief/m, which is relief / (1 - m/a) of it. overload_ratio is 1 - m/a. Where it is unknown nothing bounds it from below,
    so that all the waiting may end (a ceiling).
    """
    if relief <= 0:
        return 0.0
    return 1.0 if not overload_ratio else min(1.0, relief / min(1.0, overload_ratio))


# --- direct ----------------------------------------------------------------------------------------------------------


def acted_share(inputs: GainInputs) -> float:
    """All seconds it acts on, times `fraction` (1 where not given): the plain ceiling. Waiting times `waiting_fraction`."""
    fraction = inputs.parameters.get("fraction", 1.0)
    waiting = inputs.waited
    return (inputs.acted - waiting) * fraction + waiting * inputs.parameters.get("waiting_fraction", fraction)


def weight_bytes_saved(inputs: GainInputs) -> float:
    """Weight-bound decode seconds in proportion to the bytes spared; from 16 bits where the present width is unknown."""
    from_bits = inputs.number("weight_bits") or 16.0
    return inputs.share("decode.weights") * bits_saved_ratio(from_bits, inputs.parameters["to_bits"])


def kv_bytes_saved(inputs: GainInputs) -> float:
    """KV-bound decode seconds by the bytes spared, KV waiting by the pool's growth (as many more tokens fit)."""
    from_bits, to_bits = inputs.number("kv_dtype_bits") or 16.0, inputs.parameters["to_bits"]
    read = [cause for cause in inputs.acts_on if not cause.startswith("kv.")]
    return inputs.share(*read) * bits_saved_ratio(from_bits, to_bits) + _pool_grown(inputs, from_bits / to_bits)


def pool_growth(inputs: GainInputs) -> float:
    """KV seconds that a pool larger by `factor` ends."""
    return _pool_grown(inputs, inputs.parameters["factor"])


def _pool_grown(inputs: GainInputs, growth: float) -> float:
    if growth <= 1:
        return 0.0
    relief = pool_relief_ratio(inputs.number("kv_pool_tokens"), inputs.number("kv_need_tokens"), growth)
    held = [cause for cause in inputs.acts_on if cause.startswith("kv.") and cause not in DRAINING]
    return inputs.waited * _waiting_ended(inputs, relief) + inputs.share(*held) * relief


def _waiting_ended(inputs: GainInputs, relief: float) -> float:
    """`relief` of a standing backlog; more where the overload is known to have been a burst."""
    overload = inputs.overload_ratio
    return relief if overload is None else backlog_relief_ratio(relief, overload)


def preemption_avoided(inputs: GainInputs) -> float:
    """Seconds of preemption, and of the wait for blocks no more than what they cause: a sequence pushed out comes back to
    the head of the queue, so that others wait for it about once a preemption. A wait without preemption is not touched."""
    often = min(1.0, inputs.number("preemptions_per_request") or 0.0)
    preempted = inputs.share("kv.preempt")
    return preempted + min(inputs.share("kv.wait"), often * preempted)


def load_split(inputs: GainInputs) -> float:
    """Waiting and disturbance of others when `factor` engines share the arrivals.

    Waiting falls as departures per arrival are multiplied (see `backlog_relief_ratio`); what others do to a running request,
    preempting it or prefilling beside it, falls with their number.
    """
    relief = 1 - 1 / inputs.parameters["factor"]
    waiting = inputs.waited
    return waiting * backlog_relief_ratio(relief, inputs.overload_ratio) + (inputs.acted - waiting) * relief


def split_over_devices(inputs: GainInputs) -> float:
    """Work divided over `factor` times as many devices, before communication."""
    return inputs.acted * (1 - 1 / inputs.parameters["factor"])


def faster_compute(inputs: GainInputs) -> float:
    """Compute-bound seconds at `factor` times the peak; attention and everything bound by bytes keeps its time."""
    return inputs.acted * (1 - 1 / inputs.parameters["factor"])


def speculation_saved(inputs: GainInputs) -> float:
    """Decode seconds spared at the measured acceptance, else at the one the file assumes; never below 0."""
    measured = inputs.number("spec_acceptance_ratio")
    acceptance = measured if measured is not None else inputs.parameters["acceptance"]
    speedup = speculation_speedup(
        acceptance, int(inputs.parameters["draft_tokens"]), inputs.parameters["draft_cost_ratio"]
    )
    return inputs.acted * max(0.0, 1 - 1 / speedup)


def prefix_reuse(inputs: GainInputs) -> float | None:
    """Prefill of prompt tokens an earlier request had and that were computed again; all of it where that is unknown."""
    missed = inputs.number("prefix_missed_ratio")
    return inputs.acted * (1.0 if missed is None else missed)


def measured_excess(inputs: GainInputs) -> float:
    """The measured part of a step that is no device work (`step_gap_ratio`), else all seconds it acts on."""
    gap = inputs.number("step_gap_ratio")
    return inputs.acted if gap is None else min(inputs.acted, gap) if inputs.acted else gap


# --- induced ---------------------------------------------------------------------------------------------------------


def queue_drain(inputs: GainInputs, direct: float) -> float | None:
    """Waiting that drains because the seconds of service fall by `direct`; None where utilisation is unknown.

    Only the service part of `direct` counts: ending a wait makes no other request's service shorter.
    """
    waiting = inputs.share(*DRAINING - set(inputs.acts_on))
    service = inputs.share(*SERVICE)
    utilization = inputs.number("utilization_ratio")
    if not waiting:
        return 0.0
    if utilization is None or not service:
        return None
    acted = inputs.acted
    part = inputs.share(*SERVICE & set(inputs.acts_on)) / acted if acted else 0.0
    return waiting * wait_removed_ratio(utilization, min(1.0, direct * part / service))


DIRECT: Mapping[str, Direct] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            acted_share,
            weight_bytes_saved,
            kv_bytes_saved,
            pool_growth,
            split_over_devices,
            faster_compute,
            speculation_saved,
            prefix_reuse,
            measured_excess,
            preemption_avoided,
            load_split,
        )
    }
)
INDUCED: Mapping[str, Induced] = MappingProxyType({queue_drain.__name__: queue_drain})
