"""Published kernel measurements as calls of the time law's operators: what each call would take with a given curve.

Rows that beat the data sheet are left out (and counted): they were not measured right. Half of the rest is held out from the
fit, chosen by a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.rules.kernels.collectives import AllReduce
from phasewise.rules.kernels.operators import (
    DecodeAttention,
    Elementwise,
    ExpertGemm,
    Gemm,
    Kernel,
    PrefillAttention,
)
from phasewise.rules.load import load_rulebook
from phasewise.rules.schema import Gpu

Floats = npt.NDArray[np.float64]
Curve = Any  # OperatorEfficiency or CollectiveEfficiency, or something with their fields

VLLM = {"a100-sxm-80gb": "a100_sxm.vllm-0.14.0", "h100-sxm": "h100_sxm.vllm-0.24.0", "h200-sxm": "h200_sxm.vllm-0.22.0"}
VIDUR_MLP = {
    "a100-sxm-80gb": ("a100.Llama-2-7b-hf", "a100.Llama-2-70b-hf", "a100.Meta-Llama-3-8B"),
    "h100-sxm": ("h100.Llama-2-7b-hf", "h100.Llama-2-70b-hf"),
}
MOST_ROWS = 12_000  # of one table; more does not move a fit of ten coefficients
SEED = 20261129
UNBOUND = SimpleNamespace(  # the data sheet itself, for the gate
    compute_ratio=1.0, memory_ratio=1.0, sharpness=12.0, floor_s=0.0, half_rows=0.0, half_columns=0.0, half_depth=0.0,
    half_work=0.0, half_head_bytes=0.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls of one operator on one accelerator. seconds: what they take with a curve; gated: rows left out by the roofline."""

    gpu: str
    operator: str
    seconds: Callable[[Curve], Floats]
    time_s: Floats
    gated: int

    def held_out(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.random.default_rng(SEED).permutation(len(self.time_s)) % 2 == 1)

    def errors(self, curve: Curve) -> Floats:
        """Absolute relative error of every row."""
        return np.abs(self.seconds(curve) / self.time_s - 1.0)


def stated_errors(rows: Sequence[Measured], curve: Curve) -> tuple[int, float, float]:
    """Rows, median and 90th percentile of the absolute relative error, held-out rows only."""
    errors = np.concatenate([table.errors(curve)[table.held_out()] for table in rows])
    return len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9))


@cache
def gpu_of(identity: str) -> Gpu:
    return load_rulebook().gpus[identity]


def _kernel(gpu: Gpu, dtype: str, curve: Curve) -> Kernel:
    return Kernel(curve, gpu.peak_flops.get(dtype, 1.0), gpu.nominal_bandwidth_bytes_per_s)


def _measured(
    gpu: str, operator: str, table: pl.DataFrame, seconds: Callable[[dict[str, Any], Curve], Floats]
) -> Measured:
    """table: columns of the calls, and `time_s`."""
    if table.height > MOST_ROWS:
        table = table.sample(MOST_ROWS, seed=SEED)
    columns = {name: table[name].to_numpy().astype(np.float64) for name in table.columns}
    # A smooth maximum overstates where both sides are equal, by 6 % at this sharpness.
    possible = columns["time_s"] >= seconds(columns, UNBOUND) / 1.06
    kept = {name: column[possible] for name, column in columns.items()}
    return Measured(gpu, operator, lambda curve: seconds(kept, curve), kept["time_s"], int((~possible).sum()))


def _median(table: pl.DataFrame, keys: list[str], latency_ms: str = "latency") -> pl.DataFrame:
    """One row a shape: the median of repeats, in seconds."""
    return table.group_by(keys).agg((pl.col(latency_ms).median() / 1e3).alias("time_s")).sort(keys)


# --- matrix products -------------------------------------------------------------------------------------------------


def gemm(folder: Path, gpu: str, dtype: str) -> Measured | None:
    """AIConfigurator's table, sides from 256. fp8 is the kernel with one scale a tensor; H200's table has block scales
    only, at 60 us a call whatever the shape (launched eagerly), which is no kernel time."""
    name = {"bf16": "bfloat16", "fp8": "fp8"}[dtype]
    table = pl.read_parquet(folder / "aiconfigurator_ops" / f"{VLLM[gpu]}.gemm_perf.parquet")
    table = table.filter((pl.col("gemm_dtype") == name) & (pl.col("n") >= 256) & (pl.col("k") >= 256))
    if table.is_empty():
        return None
    weight_bytes = 2.0 if dtype == "bf16" else 1.0

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        m, n, k = call["m"], call["n"], call["k"]
        row = k * weight_bytes + n * 2.0
        operator = Gemm(_kernel(gpu_of(gpu), dtype, curve), 1, n, k, n * k * weight_bytes, row)
        return np.asarray(operator.seconds(m))

    return _measured(gpu, f"gemm.{dtype}", _median(table, ["m", "n", "k"]), seconds)


def expert_gemm(folder: Path, gpu: str, dtype: str) -> Measured | None:
    """Both products of the routed experts in one time, balanced routing: min(E, k*T) distinct experts.

    fp8 with block scales (Triton); the table's other fp8 kernel takes five times the 16-bit one's time.
    """
    path = folder / "aiconfigurator_ops" / f"{VLLM[gpu]}.moe_perf.parquet"
    if not path.exists():
        return None
    name = {"bf16": "bfloat16", "fp8": "fp8_block"}[dtype]
    table = pl.read_parquet(path).filter(
        (pl.col("moe_dtype") == name) & (pl.col("distribution") == "balanced") & (pl.col("moe_ep_size") == 1)
    )
    weight_bytes = 2.0 if dtype == "bf16" else 1.0
    keys = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"]

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        tokens, hidden, experts, topk = (call[key] for key in ("num_tokens", "hidden_size", "num_experts", "topk"))
        width = call["inter_size"] / call["moe_tp_size"]
        distinct = np.minimum(experts, tokens * topk)
        total: Any = 0.0
        for n, k in ((2 * width, hidden), (hidden, width)):
            row = k * weight_bytes + n * 2.0
            part = ExpertGemm(_kernel(gpu_of(gpu), dtype, curve), 1, n, k, experts, topk, n * k * weight_bytes, row)
            total = total + part.seconds_over(tokens, distinct)
        return np.asarray(total)

    return _measured(gpu, f"expert_gemm.{dtype}", _median(table, keys), seconds)


# --- attention -------------------------------------------------------------------------------------------------------

_HEADS = ["num_heads", "num_key_value_heads", "batch_size"]


def _attention_table(folder: Path, gpu: str, kind: str, kv_dtype: str) -> pl.DataFrame:
    """Heads of 128, full attention, at most 16 query heads a KV head."""
    table = pl.read_parquet(folder / "aiconfigurator_ops" / f"{VLLM[gpu]}.{kind}_attention_perf.parquet")
    if "window_size" in table.columns:
        table = table.filter(pl.col("window_size") == 0)
    name = {"bf16": "bfloat16", "fp8": "fp8"}[kv_dtype]
    return table.filter(
        (pl.col("head_dim") == 128)
        & (pl.col("kv_cache_dtype") == name)
        & (pl.col("num_heads") <= 16 * pl.col("num_key_value_heads"))
    )


def prefill_attention(folder: Path, gpu: str, dtype: str) -> Measured | None:
    """Whole prompts, nothing cached; from 16 tokens."""
    table = _attention_table(folder, gpu, "context", dtype).filter(pl.col("isl") >= 16)
    if table.is_empty():
        return None
    kv_bytes = 2.0 if dtype == "bf16" else 1.0

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        batch, length, heads = call["batch_size"], call["isl"], call["num_heads"]
        operator = PrefillAttention(
            kernel=_kernel(gpu_of(gpu), "bf16", curve),
            layers=1,
            heads=heads,
            flops_per_pair=4 * 128 * heads,
            kv_token_bytes=2 * 128 * kv_bytes * call["num_key_value_heads"],
            activation_bytes_per_token=2 * 128 * 2.0 * heads,
        )
        return np.asarray(operator.seconds(batch * length, batch * length * (length + 1) / 2, batch * 0.0, batch))

    return _measured(gpu, f"prefill_attention.{dtype}", _median(table, [*_HEADS, "isl"]), seconds)


def decode_attention(folder: Path, gpu: str, dtype: str) -> Measured | None:
    """`step` cached tokens and the new one."""
    table = _attention_table(folder, gpu, "generation", dtype)
    if table.is_empty():
        return None
    kv_bytes = 2.0 if dtype == "bf16" else 1.0

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        batch, heads, kv_heads = call["batch_size"], call["num_heads"], call["num_key_value_heads"]
        operator = DecodeAttention(
            kernel=_kernel(gpu_of(gpu), "bf16", curve),
            layers=1,
            kv_heads=kv_heads,
            flops_per_pair=4 * 128 * heads,
            kv_token_bytes=2 * 128 * kv_bytes * kv_heads,
            activation_bytes_per_sequence=2 * 128 * 2.0 * heads,
        )
        return np.asarray(operator.seconds(batch, batch * (call["step"] + 1)))

    return _measured(gpu, f"decode_attention.{dtype}", _median(table, [*_HEADS, "step"]), seconds)


# --- the rest --------------------------------------------------------------------------------------------------------


def elementwise(folder: Path, gpu: str) -> Measured | None:
    """Norm (2h values a token), rotary embedding (twice the heads' values) and activation (3i), times of 4 us on: shorter
    ones are rounded to 1 us in the table."""
    rows = []
    for name in VIDUR_MLP.get(gpu, ()):
        table = pl.read_csv(folder / "vidur" / f"{name}.mlp.csv.gz")
        devices = pl.col("num_tensor_parallel_workers")
        head = pl.col("n_embd") / pl.col("n_head")
        for operator, values in (
            ("input_layernorm", 2 * pl.col("n_embd")),
            ("attn_rope", 2 * (pl.col("n_head") + pl.col("n_kv_head")) * head / devices),
            ("mlp_act", 3 * pl.col("n_expanded_embd") / devices),
        ):
            rows.append(
                table.select(
                    (pl.col("num_tokens") * values * 2.0).cast(pl.Float64).alias("bytes"),
                    (pl.col(f"time_stats.{operator}.median") / 1e3).alias("time_s"),
                ).filter(pl.col("time_s") >= 4e-6)
            )
    if not rows:
        return None

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        return np.asarray(Elementwise(_kernel(gpu_of(gpu), "bf16", curve), 1, 1.0).seconds(call["bytes"]))

    return _measured(gpu, "elementwise", pl.concat(rows).drop_nulls(), seconds)


def all_reduce(folder: Path, gpu: str) -> Measured | None:
    """vLLM's all-reduce inside a CUDA graph (its own kernel, NCCL for what is large), 2 bytes a value."""
    path = folder / "aiconfigurator_ops" / f"{VLLM[gpu]}.custom_allreduce_perf.parquet"
    if not path.exists():
        return None
    table = pl.read_parquet(path).filter(pl.col("backend") == "vllm_graph")
    link = gpu_of(gpu).link_bandwidth_bytes_per_s
    assert link is not None

    def seconds(call: dict[str, Any], curve: Curve) -> Floats:
        total = np.zeros(len(call["time_s"]))
        for devices in (2, 4, 8):
            here = call["num_gpus"] == devices
            total[here] = AllReduce(curve, devices, link, 1, 1.0, 1.0).seconds(call["message_size"][here] * 2.0)
        return total

    columns = _median(table, ["num_gpus", "message_size"])
    kept = {name: columns[name].to_numpy().astype(np.float64) for name in columns.columns}
    return Measured(gpu, "all_reduce", lambda curve: seconds(kept, curve), kept["time_s"], 0)


def tables(folder: Path, gpu: str) -> list[Measured]:
    """Everything that was measured on one accelerator. folder: shared/reference."""
    found = [
        make(folder, gpu, dtype)
        for make in (gemm, expert_gemm, prefill_attention, decode_attention)
        for dtype in ("bf16", "fp8")
    ]
    found += [elementwise(folder, gpu), all_reduce(folder, gpu)]
    return [table for table in found if table is not None]
