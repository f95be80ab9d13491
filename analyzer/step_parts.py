"""What the time of a step goes to: the fitted duration of its composition, split over the resources of the machine.

Judged by operator group. Linear layers take the larger of their bytes and their FLOPs: their time goes to the one of the two that
would be missed, the other one's time hides behind it. The constant part of the fit is weight bytes as far as the data sheet and
the achieved bandwidth explain it; above that it is the host, on several devices of a node first their collectives. Where a
longer context does not make steps longer by what its bytes cost at least, the device waits for the host, and the constant part
is the host's: as far as the steps can tell. A few steps of one batch size cannot, and then the data sheet decides: the host gets
what is above the time the weights take at the best efficiency devices reach.

Where curves of the accelerator's kernels are known (`kernel_times`) they say what the linear layers, their calls and their collectives take,
and divide it by what each resource would save; what the fit holds above them is the host's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.kernel_times import KernelTimes, kernel_times
from phasewise.analyzer.machine import Machine
from phasewise.analyzer.step_bounds import Bounds, kv_token_bytes, weight_bytes
from phasewise.analyzer.step_fit import Composition, StepModel

# Achieved over data-sheet bandwidth in reading weights: at most this (roofline.md 4.1, "0.8 plus 3 us per kernel"), and not far
# above what the same device reaches on KV bytes, whose kernels reach a little less.
WEIGHT_EFFICIENCY = 0.8
WEIGHTS_OVER_KV = 1.2
# How far the cost of a token of context lies from that of its bytes is trusted against an error of this, as a share of those bytes.
TOLD_RATIO = 0.5
FEW_TOKENS, SLOWEST_LINK = 1.0, 32.0
CONTEXT_TOKENS = 1024.0  # a step of the context in which the slope of its curve is taken
CURVE_ERROR = 1.1  # the curves' median error: what tokens cost beyond so many times their own time is not theirs
SEEN_SPREADS = 0.5  # a change of a step by so much of its noise would show over many steps
COMPUTE_EFFICIENCY = 0.75
LEAST_COMPUTE_EFFICIENCY = 0.5  # what tokens cost up to here may be FLOPs (matrix products reach 51-97 %)
LINK_EFFICIENCY = 0.7  # of the stated bandwidth of a link, in large all-reduces
FAR_TOKENS = 512  # steps of so many are bound by FLOPs on most accelerators, where none is named
PARTS = ("compute", "weights", "kv", "attention_io", "host", "communication")


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of n steps by PARTS; they add up to the model's prediction."""

    seconds: Floats  # [parts, n]

    @property
    def total(self) -> Floats:
        return np.asarray(self.seconds.sum(axis=0))

    def shares(self) -> Floats:
        """[parts, n]; all host where the model predicts nothing."""
        total = self.total
        found = np.divide(self.seconds, total, out=np.zeros_like(self.seconds), where=total > 0)
        found[PARTS.index("host")] += np.where(total > 0, 0.0, 1.0)
        return found


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of the prompt tokens in each of n steps: tokens computed before that their queries attend to."""

    past: Floats
    pairs: Floats


def split(model: StepModel, built: Machine, made_of: Composition, prompt: Prompt | None = None) -> Split:
    """Splits the predicted duration of each composition. prompt: of its chunks, where it has any."""
    kernels = kernel_times(built)
    if kernels is not None and model.bounds is not None:
        return _by_kernels(model, model.bounds, kernels, made_of, prompt)
    busy = made_of.tokens > 0
    linear = model.tokens_s(made_of.tokens)
    constant = model.constant_s + model.routed_s(made_of.tokens)
    weights = np.minimum(_weights_s(model, built, made_of, constant), constant)
    above = constant - weights + model.prefilling_s * made_of.prefilling + model.sequence_s * made_of.sequences
    small, carried, per_token = _carried(model, made_of, linear)
    collectives = np.minimum(above, small)
    compute, reading = _linear(model, weights, linear - carried, made_of.tokens * per_token)
    kv = model.context_time_s(made_of.context)
    attended = _attended_by_flops(model)
    attention = model.pair_s * made_of.pairs
    by_bytes = _by_bytes(model, prompt)
    parts = np.stack(
        [
            compute + attention * (1.0 - by_bytes) + kv * attended,
            reading,
            kv * (1.0 - attended),
            attention * by_bytes,
            above - collectives,
            collectives + carried,
        ]
    )
    return Split(np.where(busy, parts, 0.0))


def _by_kernels(
    model: StepModel, bounds: Bounds, kernels: KernelTimes, made_of: Composition, prompt: Prompt | None
) -> Split:
    """Where the accelerator's kernels were measured: all but attention by their curves, as far as the steps are that long and do not
    show that the device waits; what is above them is the host's."""
    busy = made_of.tokens > 0
    linear = kernels.linear(made_of.tokens, made_of.sequences)
    linear = replace(linear, links=linear.links * _slow_links(model, bounds, kernels))
    fitted = (
        model.constant_s
        + model.routed_s(made_of.tokens)
        + model.tokens_s(made_of.tokens)
        + model.prefilling_s * made_of.prefilling
        + model.sequence_s * made_of.sequences
    )
    expected = linear.total
    told = _told(model, bounds, np.maximum(fitted / np.maximum(expected, 1e-300), 1.0))
    # A device that reads KV slower than any curve says is as much slower at all else.
    surely = max(_top_slope(model) - model.context_error_s, 0.0)
    slower = np.maximum(1.0, told * surely / (CURVE_ERROR * _context_slope_s(kernels, made_of)))
    seen = np.where(made_of.sequences > 0, 1.0 - told * _hidden(model, bounds, made_of), 1.0)
    device = np.minimum(expected * slower * seen, fitted)
    scale = np.divide(device, expected, out=np.zeros_like(expected), where=expected > 0)
    kv = model.context_time_s(made_of.context)
    attended = _attended_by_flops(model)
    attention = model.pair_s * made_of.pairs
    by_bytes = _by_bytes(model, prompt)
    parts = np.stack(
        [
            linear.compute * scale + attention * (1.0 - by_bytes) + kv * attended,
            linear.weights * scale,
            kv * (1.0 - attended),
            attention * by_bytes,
            linear.floors * scale + fitted - device,
            linear.links * scale,
        ]
    )
    return Split(np.where(busy, parts, 0.0))


def _context_slope_s(kernels: KernelTimes, made_of: Composition) -> Floats:
    """What a further token of context should cost where so many sequences decode."""
    sequences = np.maximum(made_of.sequences, 1.0)
    near, far = (kernels.decoding(sequences, made_of.context + more).total for more in (0.0, CONTEXT_TOKENS))
    return np.asarray(np.maximum((far - near) / CONTEXT_TOKENS, 1e-300))


def _slow_links(model: StepModel, bounds: Bounds, kernels: KernelTimes) -> float:
    """How many times slower than measured elsewhere the links of a node are: what tokens cost beyond computing them, over what they
    should cost on the link. Of a dense model: experts' bytes grow with the tokens too."""
    most = min(model.most_tokens, FAR_TOKENS * 4.0)
    if bounds.routed or bounds.collective_s <= 0 or most <= FEW_TOKENS:
        return 1.0
    at = np.array([FEW_TOKENS, most])
    told = kernels.linear(at, np.ones(2))
    grown, linked = (float(one[1] - one[0]) for one in (model.tokens_s(at), told.links))
    computed = float((told.total - told.links)[1] - (told.total - told.links)[0])
    return min(max((grown - CURVE_ERROR * computed) / linked, 1.0), SLOWEST_LINK) if linked > 0 else 1.0


def _weights_s(model: StepModel, built: Machine, made_of: Composition, constant_s: Floats) -> Floats:
    """Seconds of the constant part that reading the weights explains."""
    bounds, n = model.bounds, len(made_of.tokens)
    top = _top_slope(model)
    if bounds is not None:
        best = bounds.weights_s(made_of.tokens) / WEIGHT_EFFICIENCY
        told = _told(model, bounds, np.maximum(constant_s / best, 1.0))
        surely = max(top - model.context_error_s, 0.0)
        slower = np.maximum(1.0, told * surely / bounds.context_s * (WEIGHT_EFFICIENCY / WEIGHTS_OVER_KV))
        return best * slower * (1.0 - told * _hidden(model, bounds, made_of))
    if built.model is not None and model.context_range > 0:
        # An accelerator nobody named: the bandwidth it reaches on KV bytes is measured, or has at least a bound where longer
        # contexts do not show in the steps at all.
        slope = max(top, SEEN_SPREADS * model.spread_ratio * model.constant_s / model.context_range)
        per_byte = slope / kv_token_bytes(built, built.model)
        return weight_bytes(built, built.model, made_of.tokens) * per_byte / WEIGHTS_OVER_KV
    # Nothing tells weights from host: as without steps, a step far from the ridge counts as reading.
    return np.full(n, np.inf)


def _top_slope(model: StepModel) -> float:
    return sum(slope for _, slope in model.context_terms)


def _hidden(model: StepModel, bounds: Bounds, made_of: Composition) -> Floats:
    """Share of the device's work that the duration does not show: what a further token of context does not cost of what its bytes
    cost at least. 0 where nothing decodes, and where the context costs more than its bytes."""
    slope = model.context_slope_s(made_of.context)
    return np.where(made_of.context > 0, 1.0 - np.minimum(slope / bounds.context_s, 1.0), 0.0)


def _told(model: StepModel, bounds: Bounds, room: Floats) -> Floats:
    """How far the steps tell what a token of context costs, from 0 to 1. room: the constant part over the time the weights take at
    best, at least 1: where the two are equal the device can hardly be waiting, and it takes better evidence to say that it is."""
    off = model.context_error_s / bounds.context_s / (TOLD_RATIO * room)
    return np.asarray(1.0 / (1.0 + off * off))


def _carried(model: StepModel, made_of: Composition, linear: Floats) -> tuple[Floats, Floats, float]:
    """Collectives of each step, constant part and what grows with its tokens, and seconds of FLOPs a token alone.

    FLOPs grow with the tokens by no more than the data sheet explains, and until there are many they hide behind the weights' bytes.
    What tokens cost beyond that on several devices is the link (of a dense model: experts' bytes grow too); where it is slower
    than stated, so are its small messages.
    """
    bounds = model.bounds
    # The slope counts only where the steps went far enough to be bound by FLOPs.
    steep = float(model.token_slope_s(np.array([model.most_tokens]))[0])
    if bounds is None:
        return np.zeros(len(linear)), np.zeros(len(linear)), steep if model.most_tokens >= FAR_TOKENS else 0.0
    flops = bounds.token_s / COMPUTE_EFFICIENCY
    link = 0.0
    if bounds.link_token_s > 0:
        shallow = sum(slope for knot, slope in model.token_terms if knot == 0)
        most_flops = (bounds.token_s + bounds.row_s) / LEAST_COMPUTE_EFFICIENCY
        beyond = 0.0 if bounds.routed else max(shallow, steep) - most_flops
        link = max(bounds.link_token_s, beyond)
        slow = max(1.0, link / bounds.link_token_s * LINK_EFFICIENCY)
        return np.full(len(linear), bounds.collective_s * slow), np.minimum(linear, link * made_of.tokens), flops
    reached = steep > bounds.token_s and model.most_tokens > bounds.knee_tokens
    return np.zeros(len(linear)), np.zeros(len(linear)), steep if reached else flops


def _linear(model: StepModel, weights: Floats, tokens_s: Floats, flops_s: Floats) -> tuple[Floats, Floats]:
    """Compute and reading of the linear layers, which together take weights + tokens_s.

    Without its FLOPs a step would be shorter by tokens_s, without its weights by what exceeds flops_s: in that proportion.
    """
    whole = weights + tokens_s
    without_weights = np.clip(whole - flops_s, 0.0, None)
    share = np.divide(tokens_s, tokens_s + without_weights, out=np.zeros_like(whole), where=tokens_s > 0)
    return whole * share, whole * (1.0 - share)


def _attended_by_flops(model: StepModel) -> float:
    """1 where decode attention is bound by FLOPs (latent attention on a device with little compute), else 0."""
    return float(model.bounds is not None and model.bounds.context_flops_s > model.bounds.context_s)


def _by_bytes(model: StepModel, prompt: Prompt | None) -> Floats | float:
    """1 where a chunk's attention is bound by reading what was computed before: few queries, long past."""
    if prompt is None or model.bounds is None:
        return 0.0
    reads = prompt.past * model.bounds.context_s
    return (reads > prompt.pairs * model.bounds.pair_s).astype(np.float64)
