"""What a rule file becomes: accelerators, models and techniques, frozen and complete.

One TOML file is one object; the file's name is its id. The readers are `rules/hardware_file.py` and `rules/technique_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phasewise.rules.measured import BEST_PRODUCT_RATIO, BEST_STREAM_RATIO, Measured, Roof

# --- provenance ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where a number or statement comes from. date: ISO date on which it was read or published."""

    text: str
    date: str
    url: str | None = None


# --- accelerators ----------------------------------------------------------------------------------------------------

DTYPES: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")
DEVICE_KINDS: tuple[str, ...] = ("gpu", "cpu", "tpu", "npu")
# Bits of one value as stored, scales not counted.
DTYPE_BITS: Mapping[str, int] = {
    "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fitted curve is from rows it was not fitted to: absolute relative error of a call's time."""

    rows: int
    median_ratio: float
    p90_ratio: float


@dataclass(frozen=True, slots=True)
class OperatorEfficiency:
    """What share of the peaks one kind of kernel reaches, as the engine's time law uses it (`rules/kernels/operators.py`).

    compute_ratio, memory_ratio: share of the data sheet's peak a large call reaches. Half of it is reached at half_rows (rows
    of a product, of each expert where there are experts; tokens each query attends to), half_columns and half_depth (outer
    and inner size of a product), half_work (heads x square root of the (query, key) pairs of an attention call),
    half_head_bytes (bytes of one sequence in one KV head). sharpness: exponent that joins compute and memory time (1: their
    sum, infinite: the larger). floor_s: a call that does nothing.
    """

    compute_ratio: float
    memory_ratio: float
    sharpness: float
    floor_s: float
    error: FitError
    half_rows: float = 0.0
    half_columns: float = 0.0
    half_depth: float = 0.0
    half_work: float = 0.0
    half_head_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class CollectiveEfficiency:
    """All-reduce inside one node, by number of devices. latency_s: of the smallest message; link_ratio: share of the link
    bandwidth the ring's traffic reaches; sharpness: exponent that joins latency and transfer, below 1 where messages of middle
    size take longer than both together."""

    latency_s: Mapping[int, float]
    link_ratio: Mapping[int, float]
    sharpness: float
    error: FitError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fitted curves by operator and data type: that of the weights for products, that of the KV cache for attention."""

    gemm: Mapping[str, OperatorEfficiency]
    expert_gemm: Mapping[str, OperatorEfficiency]
    prefill_attention: Mapping[str, OperatorEfficiency]
    decode_attention: Mapping[str, OperatorEfficiency]
    elementwise: OperatorEfficiency
    all_reduce: CollectiveEfficiency
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator (or one CPU socket) as its data sheet says, dense: without structured sparsity.

    peak_flops: FLOP/s (OP/s for integers) by dtype; a dtype that is absent is not supported or not published.
    achieved_flops, achieved_bandwidth_bytes_per_s: best measured matrix product by dtype and best stream, where there are any.
    memory_bandwidth_bytes_per_s: None, and no peak_flops, where no data sheet stands behind it and all figures are measured.
    measured: how, where `phasewise calibrate` did it.
    link_bandwidth_bytes_per_s: to the other devices of its node, one direction. efficiency: curves fitted to measurements on
    this accelerator; None: those of `rules/efficiency.toml` stand in.
    sources: field name (`peak_flops`, `peak_flops.int8`, `memory_bytes`, ...) -> where the number was read.
    """

    id: str
    name: str
    kind: str
    peak_flops: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float | None
    memory_bytes: float
    sources: Mapping[str, Source]
    aliases: tuple[str, ...] = ()
    tdp_w: float | None = None
    achieved_flops: Mapping[str, float] = field(default_factory=dict)
    achieved_bandwidth_bytes_per_s: float | None = None
    link_bandwidth_bytes_per_s: float | None = None
    efficiency: Efficiency | None = None
    measured: Measured | None = None
    sparse_note: str | None = None
    note: str | None = None

    def roof(self, dtype: str) -> Roof | None:
        """The data sheet's lines; where it has none, those that were reached. None where the dtype's peak is unknown."""
        stated, reached = self.peak_flops.get(dtype), self.achieved_flops.get(dtype)
        if stated is not None and self.memory_bandwidth_bytes_per_s is not None:
            return Roof(stated, self.memory_bandwidth_bytes_per_s, measured=False)
        if reached is not None and self.achieved_bandwidth_bytes_per_s is not None:
            return Roof(reached, self.achieved_bandwidth_bytes_per_s, measured=True)
        return None

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The data sheet's, else the best stream that was measured."""
        found = self.memory_bandwidth_bytes_per_s or self.achieved_bandwidth_bytes_per_s
        assert found is not None, "read_gpu asks for one of the two"
        return found

    def nominal_flops(self, dtype: str) -> float | None:
        """What efficiencies are shares of: the data sheet's peak, else about what one would state for the product that was reached."""
        stated, reached = self.peak_flops.get(dtype), self.achieved_flops.get(dtype)
        return stated or (reached / BEST_PRODUCT_RATIO if reached else None)

    @property
    def nominal_bandwidth_bytes_per_s(self) -> float:
        """The data sheet's bandwidth, else about what one would state for the stream that was reached."""
        return self.memory_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s / BEST_STREAM_RATIO

    def multiplies(self, dtype: str) -> bool | None:
        """Whether it has units for a dtype. Of a device that was only measured: whether it is faster there than with any wider type;
        None where nothing tells."""
        if self.peak_flops:
            return dtype in self.peak_flops
        narrow = self.achieved_flops.get(dtype)
        wider = [rate for other, rate in self.achieved_flops.items() if DTYPE_BITS[other] > DTYPE_BITS[dtype]]
        return narrow > max(wider) if narrow is not None and wider else None


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts: `layers` of the model's layers have them, the others are dense with the model's `ffn`."""

    experts: int
    experts_per_token: int
    expert_ffn: int
    layers: int
    shared_experts: int = 0


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2). query_rank None: queries are projected from the hidden state directly."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """`layers` of the model's layers attend to the last `window_tokens` tokens only."""

    window_tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder. ffn: width of a dense MLP (of the dense layers, in a mixture of experts).

    gated: the MLP has gate, up and down matrices (else up and down). tied: input embedding and LM head are one matrix.
    params: parameters as published, checked against the shape by a test.
    """

    id: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    params: float
    native_dtype: str
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    max_context_tokens: int | None = None
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window: SlidingWindow | None = None


# --- techniques ------------------------------------------------------------------------------------------------------

Scalar = float | str | bool
OPERATORS: tuple[str, ...] = ("eq", "ne", "lt", "le", "gt", "ge", "in", "not_in")
CATEGORIES: tuple[str, ...] = (
    "queueing", "kv", "compute", "bandwidth", "context", "external", "host", "inconclusive",
)  # fmt: skip
# The terms of T = Q + C + P + F + (N - 1) * TPOT + X that a technique can change.
TERMS: tuple[str, ...] = ("Q", "C", "P", "F", "TPOT", "N", "X", "none")
OUTPUT_EFFECTS: tuple[str, ...] = ("exact", "numerics", "lossy", "history")
EFFORTS: tuple[str, ...] = ("setting", "change", "hardware")
RISK_LEVELS: tuple[str, ...] = ("low", "medium", "high")
EXPECTATIONS: tuple[str, ...] = ("offered", "refused", "not_applicable", "in_force", "withheld")

# The functions of analyzer/gains.py, named here so that a wrong name stops the start; a test keeps both lists equal.
DIRECT_GAINS: tuple[str, ...] = (
    "acted_share", "weight_bytes_saved", "kv_bytes_saved", "pool_growth", "split_over_devices", "faster_compute",
    "speculation_saved", "prefix_reuse", "measured_excess", "preemption_avoided", "load_split",
)  # fmt: skip
INDUCED_GAINS: tuple[str, ...] = ("queue_drain",)


@dataclass(frozen=True, slots=True)
class Condition:
    """`signal op value`. reason: said when it decides against, a format string with {observed} and {value}.

    As a precondition it must hold; as a contraindication it must not. An unknown signal withholds the technique where
    `required`, puts it last where `ranks_last`, else lowers its rank. starts_to_help_at: the point from which the answer
    would change.
    only_for: the condition counts only when the cause or class of the verdict is one of these (all of them when empty).
    """

    signal: str
    op: str
    value: Scalar | tuple[Scalar, ...]
    reason: str
    starts_to_help_at: str | None = None
    required: bool = False
    ranks_last: bool = False
    only_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Risk:
    level: str
    reason: str


@dataclass(frozen=True, slots=True)
class InForce:
    """How to tell that a technique is switched on already: a signal or an engine setting that compares so.

    read: how a user reads the state when it is unknown.
    """

    op: str
    value: Scalar | tuple[Scalar, ...]
    read: str
    signal: str | None = None
    setting: str | None = None


@dataclass(frozen=True, slots=True)
class Gain:
    """Names of functions in `analyzer/gains.py` and the parameters they are given.

    direct: how much of the seconds it acts on the change can take; induced: how much waiting drains because service or
    occupancy falls, None where no queue is relieved.
    """

    direct: str | None
    induced: str | None
    parameters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Flag:
    """A change in one engine. text: as typed; setting: its name among the engine settings, for the current value.

    since: first release known to have it, None where not verified; until: first release without it; source: where it was read.
    """

    text: str
    source: str
    setting: str | None = None
    direction: Literal["up", "down", "on", "off", "set"] | None = None
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True)
class Verify:
    """What a trial of the change must show. guard: what must stay as it was; minutes: length of one arm."""

    pass_rule: str
    refute_rule: str
    guard: str
    minutes: float


@dataclass(frozen=True, slots=True)
class Example:
    """A situation and what must become of the technique in it; one test runs all of them."""

    primary: str
    cause: str | None
    signals: Mapping[str, Scalar]
    shares: Mapping[str, float]
    settings: Mapping[str, Scalar]
    engine: str | None
    expect: str
    because: str


@dataclass(frozen=True, slots=True)
class Technique:
    """One change, what it acts on, when it is useless or harmful, and how to check that it helped.

    acts_on: causes whose seconds it shortens; categories: the classes of verdict it answers; terms: what it changes in
    T = Q + C + P + F + (N - 1) * TPOT + X.
    tempting_for: causes and classes for which people reach for it although it does not act there (the will-not-help ledger);
    temptation: how often they do, 0 to 1, for the order there; not_acting: what is said then, a format string with {share}
    and {causes}.
    acts_on_waiting: it changes the waiting itself, as one of the first three changes under overload must.
    likelihood: how likely the change delivers where its conditions hold, 0 to 1, our estimate; effort: a setting, a change of
    software or deployment, or hardware. Changes are ordered by ceiling * likelihood / (risk * effort).
    """

    id: str
    title: str
    categories: tuple[str, ...]
    acts_on: tuple[str, ...]
    terms: tuple[str, ...]
    why: str
    does_not_change: str
    output_effect: str
    gate: str
    risk: Risk
    restart: bool
    gain: Gain
    verify: Verify
    sources: tuple[Source, ...]
    examples: tuple[Example, ...]
    aliases: tuple[str, ...] = ()
    requires_with: tuple[str, ...] = ()
    preconditions: tuple[Condition, ...] = ()
    contraindications: tuple[Condition, ...] = ()
    in_force: InForce | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    tempting_for: tuple[str, ...] = ()
    temptation: float = 0.1
    not_acting: str = ""
    acts_on_waiting: bool = False
    likelihood: float = 0.5
    effort: str = "setting"
