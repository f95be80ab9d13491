"""Which resource bounds a phase: FLOPs against bytes, judged per operator group (Williams et al. 2009).

Perf_max = min(peak, intensity * bandwidth), ridge = peak / bandwidth. Linear layers and attention are judged apart: with
grouped-query attention the intensity of the first grows with the batch, that of the second does not, and a pooled value hides
both. Weight bytes and KV bytes are kept apart because the matching change differs. The roofline locates; it predicts no kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from phasewise.rules.counting import Chunk, Precision, StepWork, Work, step_work
from phasewise.rules.engine_settings import MEASURE_IT, NAME_IT
from phasewise.rules.measured import Roof
from phasewise.rules.schema import Gpu, Model

Bound = Literal["compute", "bandwidth"]


@dataclass(frozen=True, slots=True)
class GroupJudgement:
    """One operator group: linear, attention or head. bound None: not decided; time_s: at the roof, None without a device."""

    name: str
    flops: float
    bytes: float
    intensity_flop_per_byte: float | None
    bound: Bound | None
    time_s: float | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What bounds one step of a phase on one device of `tp`.

    flops and bytes are per device. time_s: of the step at the roof, the sum over groups of max(FLOPs/peak, bytes/bandwidth);
    its lower bound, unless the roof is `measured`: what was reached once can be surpassed.
    bound: the resource that holds most of that time; None when refused, `reason` says why and `offer` what would decide.
    """

    phase: Literal["prefill", "decode"]
    dtype: str
    flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    groups: tuple[GroupJudgement, ...]
    ridge_flop_per_byte: float | None
    ridges_flop_per_byte: tuple[float, float] | None
    bound: Bound | None
    time_s: float | None
    measured: bool
    reason: str | None
    offer: str | None

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def least_time_s(self) -> float | None:
        """What no step can be faster than; None where no data sheet says so."""
        return None if self.measured else self.time_s

    @property
    def weight_io_ratio(self) -> float | None:
        """Weight bytes over the bytes that must move."""
        return self.weight_bytes / self.bytes if self.bytes else None

    @property
    def kv_io_ratio(self) -> float | None:
        return self.kv_bytes / self.bytes if self.bytes else None

    @property
    def linear(self) -> GroupJudgement:
        return self.groups[0]


def judge_decode(
    model: Model,
    gpu: Gpu | None,
    batch: int,
    context_tokens: int,
    weight_bits: float = 16,
    kv_bits: float = 16,
    dtype: str = "bf16",
    tp: int = 1,
    *,
    known: Iterable[Gpu] = (),
) -> Judgement:
    """One decode step of `batch` sequences that attend to `context_tokens` tokens each.

    gpu None: `known` (the rulebook's accelerators) gives the range of ridges outside which the answer is the same for all.
    """
    work = step_work(model, Precision(weight_bits, kv_bits), contexts=[context_tokens] * batch)
    return judge_step("decode", work, gpu, dtype, tp, known)


def judge_prefill(
    model: Model,
    gpu: Gpu | None,
    new_tokens: int,
    cached_tokens: int = 0,
    weight_bits: float = 16,
    kv_bits: float = 16,
    dtype: str = "bf16",
    tp: int = 1,
    *,
    known: Iterable[Gpu] = (),
) -> Judgement:
    """One step that prefills `new_tokens` prompt tokens after `cached_tokens` cached ones, attention in flash kernels."""
    work = step_work(model, Precision(weight_bits, kv_bits), chunks=[Chunk(new_tokens, cached_tokens)])
    return judge_step("prefill", work, gpu, dtype, tp, known)


def judge_step(
    phase: Literal["prefill", "decode"], work: StepWork, gpu: Gpu | None, dtype: str, tp: int, known: Iterable[Gpu] = ()
) -> Judgement:
    """A step of any composition, as counted by `rules.counting.step_work`, split evenly over `tp` devices."""
    named = {"linear": work.linear, "attention": work.attention, "head": work.head}
    ridges = known_ridges(known, dtype)
    roof = gpu.roof(dtype) if gpu else None
    groups = tuple(_judge_group(name, part, roof, ridges, tp) for name, part in named.items())
    bound: Bound | None
    if roof is not None:
        bound, reason = _largest(groups), None
        time_s = sum(group.time_s or 0.0 for group in groups)
    else:
        time_s = None
        bound, reason = _decide_unknown(groups, ridges, dtype, gpu)
    total = work.total
    return Judgement(
        phase=phase,
        dtype=dtype,
        flops=total.flops / tp,
        weight_bytes=total.weight_bytes / tp,
        kv_bytes=(total.kv_bytes + total.score_bytes) / tp,
        activation_bytes=total.activation_bytes / tp,
        groups=groups,
        ridge_flop_per_byte=roof.ridge_flop_per_byte if roof else None,
        ridges_flop_per_byte=ridges,
        bound=bound,
        time_s=time_s,
        measured=roof is not None and roof.measured,
        reason=reason,
        offer=None if bound is not None else NAME_IT if gpu is None else MEASURE_IT,
    )


def known_ridges(known: Iterable[Gpu], dtype: str) -> tuple[float, float] | None:
    """Lowest and highest ridge of the accelerators that have this data type by their data sheets; None where none has.

    What was measured on one machine is left out: it says nothing of an accelerator that nobody named.
    """
    roofs = [roof for gpu in known if (roof := gpu.roof(dtype)) is not None]
    found = [roof.ridge_flop_per_byte for roof in roofs if not roof.measured]
    return (min(found), max(found)) if found else None


def _judge_group(
    name: str,
    work: Work,
    roof: Roof | None,
    ridges: tuple[float, float] | None,
    tp: int,
) -> GroupJudgement:
    intensity = work.intensity_flop_per_byte
    time_s: float | None = None
    bound: Bound | None = None
    if roof is not None:
        compute_s, memory_s = work.flops / tp / roof.flops, work.bytes / tp / roof.bytes_per_s
        time_s = max(compute_s, memory_s)
        bound = "compute" if compute_s >= memory_s else "bandwidth"
    elif intensity is not None and ridges is not None:
        if intensity > ridges[1]:
            bound = "compute"
        elif intensity < ridges[0]:
            bound = "bandwidth"
    return GroupJudgement(name, work.flops / tp, work.bytes / tp, intensity, bound, time_s)


def _largest(groups: tuple[GroupJudgement, ...]) -> Bound:
    time: Mapping[str, float] = {
        bound: sum(group.time_s or 0.0 for group in groups if group.bound == bound)
        for bound in ("compute", "bandwidth")
    }
    return "compute" if time["compute"] >= time["bandwidth"] else "bandwidth"


def _decide_unknown(
    groups: tuple[GroupJudgement, ...], ridges: tuple[float, float] | None, dtype: str, gpu: Gpu | None
) -> tuple[Bound | None, str | None]:
    """The bound of the linear layers, where it is the same on every known accelerator and attention does not contradict."""
    device = f"{gpu.name} states no {dtype} peak" if gpu else "the accelerator is unknown"
    if gpu is not None and not gpu.peak_flops:
        device = f"{gpu.name} was measured without {dtype}"
    if ridges is None:
        return None, f"{device}, and no known accelerator has a {dtype} peak to compare with"
    linear, attention, _ = groups
    if linear.bound is None:
        shown = "unknown" if linear.intensity_flop_per_byte is None else f"{linear.intensity_flop_per_byte:.3g} FLOP/B"
        return None, (
            f"{device}: the linear layers' intensity of {shown} lies between the lowest ({ridges[0]:.3g}) and the highest "
            f"({ridges[1]:.3g}) ridge of the known accelerators"
        )
    if attention.bytes > linear.bytes and attention.bound != linear.bound:
        return None, f"{device}: linear layers and attention are bound differently, and attention moves more bytes"
    return linear.bound, None


@dataclass(frozen=True, slots=True)
class Impossible:
    """A measurement below what physics allows: reported, never clamped. ratio: bound over measurement, above 1."""

    measured_s: float
    bound_s: float
    ratio: float
    text: str


def physics_check(judgement: Judgement, measured_s: float) -> Impossible | None:
    """A measured step faster than its bound means that count, resident batch, data type or clock is wrong.

    None where there is no bound: a step that beats what a device once reached is a better step, or a poor calibration.
    """
    bound_s = judgement.least_time_s
    if bound_s is None or measured_s >= bound_s:
        return None
    ratio = bound_s / measured_s if measured_s > 0 else float("inf")
    return Impossible(
        measured_s=measured_s,
        bound_s=bound_s,
        ratio=ratio,
        text=(
            f"a {judgement.phase} step of {measured_s:.4g} s is faster than the device allows ({bound_s:.4g} s): "
            "the batch, the data type, the model or the clock is not what was stated"
        ),
    )
