"""Whole steps and requests of the time law against measured ones. Nothing here is fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

from phasewise.instrumented_engine.executors.deployment import Deployment, kv_blocks_for
from phasewise.instrumented_engine.executors.time_law import TimeLaw
from phasewise.instrumented_engine.recording import StepComposition
from phasewise.rules.counting import Precision
from phasewise.rules.errors import InputError
from phasewise.rules.load import Rulebook, load_rulebook

CHUNK_TOKENS = 8192  # step token budget of the engines measured, as far as it is known
SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm", "gb200": "gb200"}
FP8 = Precision(weight_bits=8, kv_bits=8)


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured number and the law's. bound: its lower bound in seconds by the data sheet, where one was worked out."""

    group: str
    measured_s: float
    law_s: float
    devices: int = 1


@cache
def rules() -> Rulebook:
    return load_rulebook()


def decode_composition(sequences: int, context: int) -> StepComposition:
    return StepComposition(10**6, 0, 0, 0, 0, 0, sequences, sequences * context)


def mixed_composition(prompts: int, new_tokens: int, sequences: int = 0, context: int = 0) -> StepComposition:
    """Whole prompts of `new_tokens` tokens, and sequences that decode."""
    pairs = prompts * new_tokens * (new_tokens + 1) // 2
    return StepComposition(10**6, prompts * new_tokens, pairs, 0, prompts, prompts, sequences, sequences * context)


def steady_tpot_s(law: TimeLaw, concurrency: int, prompt_tokens: int, output_tokens: int) -> float:
    """Mean time between tokens in a closed loop: decode steps, some of which also prefill somebody's prompt."""
    context = prompt_tokens + output_tokens // 2
    alone = law.seconds(decode_composition(concurrency, context))
    chunk = min(prompt_tokens, CHUNK_TOKENS)
    with_prompt = law.seconds(mixed_composition(1, chunk, max(0, concurrency - 1), context))
    chunks_per_step = (concurrency - 1) * prompt_tokens / chunk / output_tokens  # of the others, while one decodes
    return alone + min(1.0, chunks_per_step) * (with_prompt - alone)


def silicon_tpot(folder: Path) -> Iterator[Compared]:
    """Serving points in FP8 on one replica without pipeline or data parallelism; only those whose KV fits at once."""
    table = pl.read_csv(
        folder / "aiconfigurator_e2e" / "silicon_sample.shared.csv.gz", infer_schema_length=10_000
    ).filter(
        (pl.col("mode") == "agg")
        & (pl.col("precision") == "fp8")
        & (pl.col("pp_size") == 1)
        & (pl.col("tp_size") <= 8)
        & (pl.col("attention_dp_size").fill_null(1) <= 1)
        & (pl.col("moe_ep_size").fill_null(1) <= 1)
    )
    for row in table.iter_rows(named=True):
        name = row["model_path"].replace("DeepSeek-R1", "DeepSeek-V3").replace("-FP8", "")
        model = rules().find_model(name) or rules().find_model(name.removesuffix("-Instruct"))
        if model is None or row["osl"] < 100:
            continue
        try:
            at = Deployment(
                gpu=rules().gpus[SYSTEMS[row["system"]]],
                model=model,
                precision=FP8,
                compute_dtype="fp8",
                tensor_parallel_count=row["tp_size"],
            )
            blocks = kv_blocks_for(at)
        except InputError:
            continue  # a deployment the law does not know, or whose weights do not fit
        if row["batch_size"] * (row["isl"] + row["osl"]) > blocks * 16:
            continue  # fewer are resident than the clients ask for
        law_s = steady_tpot_s(TimeLaw(at), row["batch_size"], row["isl"], row["osl"])
        group = f"{model.id} {row['backend']} {row['system']}"
        yield Compared(group, row["silicon_tpot_ms"] / 1e3, law_s, row["tp_size"])


def _dense_70b(gpu: str, devices: int) -> Deployment:
    """Llama-2-70B under the engine of 2023: host work before each step, no CUDA graphs."""
    return Deployment(
        gpu=rules().gpus[gpu],
        model=rules().models["llama-2-70b"],
        tensor_parallel_count=devices,
        host_step_s=0.0,
        host_token_s=0.0,
        async_scheduling=False,
    )


def splitwise(folder: Path) -> Iterator[Compared]:
    """Prompt and token phase; the law without any host time, so decode at TP8 must come out far below."""
    table = pl.read_csv(folder / "splitwise" / "perf_model.shared.csv").filter(pl.col("model") == "llama2-70b")
    keys = ["hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    for row in (
        table.group_by(keys)
        .agg(pl.col("prompt_time").median(), pl.col("token_time").median())
        .sort(keys)
        .iter_rows(named=True)
    ):
        gpu = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm"}[row["hardware"]]
        law = TimeLaw(_dense_70b(gpu, row["tensor_parallel"]))
        where = f"{row['hardware']} TP{row['tensor_parallel']}"
        if row["batch_size"] * row["prompt_size"] >= 512:
            step = mixed_composition(row["batch_size"], row["prompt_size"])
            yield Compared(f"prompt {where}", row["prompt_time"] / 1e3, law.seconds(step), row["tensor_parallel"])
        step = decode_composition(row["batch_size"], row["prompt_size"] + row["token_size"] // 2)
        yield Compared(f"token {where}", row["token_time"] / 1e3, law.seconds(step), row["tensor_parallel"])


def static_batches(folder: Path) -> Iterator[Compared]:
    """Offline batches of L tokens in and out: one prefill of all, then L - 1 decode steps."""
    names = {
        "meta-llama/Llama-2-7b-hf": "llama-2-7b", "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3-70B": "llama-3.1-70b", "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
        "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    }  # fmt: skip
    table = pl.read_csv(folder / "llm_inference_bench" / "All_results.shared.csv.gz").filter(
        pl.col("Hardware").str.contains("A100|H100") & pl.col("Framework").is_in(["vLLM", "TensorRT-LLM"])
    )
    for row in table.iter_rows(named=True):
        if row["Model"] not in names:
            continue
        gpu = "h100-sxm" if "H100" in row["Hardware"] else "a100-sxm-80gb"
        at = Deployment(
            gpu=rules().gpus[gpu],
            model=rules().models[names[row["Model"]]],
            tensor_parallel_count=row["Num of Hardware"],
            async_scheduling=False,
        )
        length, batch = row["Input Output Length"], row["Batch Size"]
        try:
            fits = 2 * length * batch <= kv_blocks_for(at) * 16
        except InputError:
            continue
        if not fits:
            continue
        law = TimeLaw(at)
        total = law.seconds(mixed_composition(batch, length))
        total += (length - 1) * law.seconds(decode_composition(batch, length + length // 2))
        yield Compared(f"{row['Framework']} {row['Hardware']}", row["Latency"], total, row["Num of Hardware"])


def chunked_prefill(folder: Path) -> Iterator[Compared]:
    """One layer's prefill attention of a chunk after cached tokens (Vidur, A100, TP2): no such row is in the fitted tables."""
    table = pl.read_csv(folder / "vidur" / "a100.kv8-head64-tp2.attention.csv.gz", infer_schema_length=None).filter(
        pl.col("is_prefill") & (pl.col("kv_cache_size") > 0) & (pl.col("prefill_chunk_size") >= 128)
    )
    attention = TimeLaw(_dense_70b("a100-sxm-80gb", 2)).replica.prefill[0]
    one_layer = replace(attention, layers=1)
    for new, past, ms in table.select(
        "prefill_chunk_size", "kv_cache_size", "time_stats.attn_prefill.median"
    ).iter_rows():
        law_s = one_layer.seconds(float(new), float(new * past + new * (new + 1) // 2), float(past), 1.0)
        yield Compared("prefill attention over cached tokens", ms / 1e3, law_s)


def summarized(rows: Iterable[Compared], key: Callable[[Compared], str]) -> list[tuple[str, int, float, float, float]]:
    """By key: rows, median of law over measured, median and 90th percentile of the absolute relative error."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row.law_s / row.measured_s)
    found: list[tuple[str, int, float, float, float]] = []
    for name, ratios in sorted(groups.items()):
        median, p90 = np.quantile(np.abs(np.array(ratios) - 1.0), [0.5, 0.9])
        found.append((name, len(ratios), float(np.median(ratios)), float(median), float(p90)))
    return found


def print_checks(folder: Path) -> None:
    for title, rows in (
        ("TPOT of serving points, silicon_sample, FP8", list(silicon_tpot(folder))),
        ("Llama-2-70B, splitwise, law without host", list(splitwise(folder))),
        ("static batches, llm_inference_bench", list(static_batches(folder))),
        ("chunked prefill, vidur", list(chunked_prefill(folder))),
    ):
        print(title)
        for group in (lambda row: "all", lambda row: f"TP{row.devices}", lambda row: row.group):
            for name, count, ratio, median, p90 in summarized(rows, group):
                print(
                    f"  {name:45s} n {count:4d}  law/measured {ratio:5.2f}  median error {median:6.1%}  p90 {p90:6.1%}"
                )
