"""Reading `rules/gpus/*.toml` and `rules/models/*.toml`. No number without a source, no source without a date."""

from __future__ import annotations

from types import MappingProxyType

from phasewise.rules.efficiency_file import read_efficiency
from phasewise.rules.measured_file import read_measured
from phasewise.rules.schema import DEVICE_KINDS, DTYPES, Gpu, Mla, Model, Moe, SlidingWindow, Source
from phasewise.rules.source import read_source
from phasewise.rules.toml_table import TomlTable


def read_sources(root: TomlTable) -> tuple[Source, ...]:
    """The array `[[source]]`; at least one."""
    sources = tuple(read_source(table) for table in root.tables("source"))
    if not sources:
        raise root.error("source", "is missing: no rule without a source")
    return sources


NUMBERS = (
    "memory_bandwidth_bytes_per_s",
    "memory_bytes",
    "tdp_w",
    "link_bandwidth_bytes_per_s",
    "achieved_bandwidth_bytes_per_s",
)
BY_DTYPE = ("peak_flops", "achieved_flops")


def read_gpu(identity: str, root: TomlTable) -> Gpu:
    """One accelerator. Numbers are SI (FLOP/s, byte/s, byte, W), dense."""
    gpu = Gpu(
        id=identity,
        name=root.text("name"),
        kind=root.word("kind", DEVICE_KINDS),
        aliases=root.texts("aliases"),
        peak_flops=MappingProxyType(_by_dtype(root.table_or_none("peak_flops"))),
        achieved_flops=MappingProxyType(_by_dtype(root.table_or_none("achieved_flops"))),
        memory_bandwidth_bytes_per_s=root.positive_or_none("memory_bandwidth_bytes_per_s"),
        achieved_bandwidth_bytes_per_s=root.positive_or_none("achieved_bandwidth_bytes_per_s"),
        memory_bytes=root.positive("memory_bytes"),
        tdp_w=root.positive_or_none("tdp_w"),
        link_bandwidth_bytes_per_s=root.positive_or_none("link_bandwidth_bytes_per_s"),
        efficiency=read_efficiency(table) if (table := root.table_or_none("efficiency")) else None,
        measured=read_measured(table) if (table := root.table_or_none("measured")) else None,
        sparse_note=root.text_or_none("sparse_note"),
        note=root.text_or_none("note"),
        sources=MappingProxyType(_named_sources(root.table("sources"))),
    )
    root.finish()
    _check_roofs(root, gpu)
    numbers = [f"{part}.{dtype}" for part in BY_DTYPE for dtype in getattr(gpu, part)]
    numbers += [name for name in NUMBERS if getattr(gpu, name) is not None]
    for number in numbers:
        if number not in gpu.sources and number.partition(".")[0] not in gpu.sources:
            raise root.error(f"sources.{number}", "is missing: no number without a source")
    return gpu


def _check_roofs(root: TomlTable, gpu: Gpu) -> None:
    """Each data type has a data sheet's roof or a measured one, and none reaches more than its data sheet states."""
    stated, reached = gpu.memory_bandwidth_bytes_per_s, gpu.achieved_bandwidth_bytes_per_s
    if stated is None and (gpu.peak_flops or reached is None):
        raise root.error("memory_bandwidth_bytes_per_s", "is missing")
    if not gpu.peak_flops and (stated is not None or not gpu.achieved_flops):
        raise root.error("peak_flops", "names no data type")
    if stated is not None and reached is not None and reached > stated:
        raise root.error("achieved_bandwidth_bytes_per_s", "lies above the bandwidth of the data sheet")
    for dtype, achieved in gpu.achieved_flops.items():
        peak = gpu.peak_flops.get(dtype)
        if peak is None and reached is None:
            raise root.error(f"achieved_flops.{dtype}", "has no peak of that data type beside it")
        if peak is not None and achieved > peak:
            raise root.error(f"achieved_flops.{dtype}", "lies above the peak of that data type")


def _by_dtype(table: TomlTable | None) -> dict[str, float]:
    if table is None:
        return {}
    found = {dtype: table.positive(dtype) for dtype in DTYPES if table.has(dtype)}
    for dtype in DTYPES:
        table.raw(dtype)
    table.finish()
    return found


def _named_sources(table: TomlTable) -> dict[str, Source]:
    known = [*BY_DTYPE, *NUMBERS, *(f"{part}.{dtype}" for part in BY_DTYPE for dtype in DTYPES)]
    for name in known:
        table.raw(name)
    table.finish()
    return {name: read_source(table.table(name)) for name in table.keys()}  # noqa: SIM118 (not a dict)


def read_model(identity: str, root: TomlTable) -> Model:
    """One model's shape."""
    moe, mla, window = root.table_or_none("moe"), root.table_or_none("mla"), root.table_or_none("sliding_window")
    model = Model(
        id=identity,
        name=root.text("name"),
        aliases=root.texts("aliases"),
        layers=_at_least_one(root, "layers"),
        hidden=_at_least_one(root, "hidden"),
        heads=_at_least_one(root, "heads"),
        kv_heads=_at_least_one(root, "kv_heads"),
        head_dim=_at_least_one(root, "head_dim"),
        ffn=_at_least_one(root, "ffn"),
        vocab=_at_least_one(root, "vocab"),
        gated=root.truth("gated", True),
        tied=root.truth("tied"),
        params=root.positive("params"),
        native_dtype=root.word("native_dtype", DTYPES),
        max_context_tokens=root.count_or_none("max_context_tokens"),
        moe=_moe(moe) if moe else None,
        mla=_mla(mla) if mla else None,
        sliding_window=_window(window) if window else None,
        sources=read_sources(root),
    )
    root.finish()
    if model.heads % model.kv_heads:
        raise root.error("kv_heads", f"{model.kv_heads} does not divide the {model.heads} heads")
    for part, layers in (
        ("moe", model.moe and model.moe.layers),
        ("sliding_window", model.sliding_window and model.sliding_window.layers),
    ):
        if layers and layers > model.layers:
            raise root.error(f"{part}.layers", f"{layers} is more than the model's {model.layers} layers")
    if model.moe and model.moe.experts_per_token > model.moe.experts:
        raise root.error("moe.experts_per_token", f"is more than the {model.moe.experts} experts")
    return model


def _at_least_one(table: TomlTable, key: str) -> int:
    value = table.count(key)
    if value < 1:
        raise table.error(key, "must be at least 1")
    return value


def _moe(table: TomlTable) -> Moe:
    found = Moe(
        experts=_at_least_one(table, "experts"),
        experts_per_token=_at_least_one(table, "experts_per_token"),
        expert_ffn=_at_least_one(table, "expert_ffn"),
        layers=_at_least_one(table, "layers"),
        shared_experts=table.count_or_none("shared_experts") or 0,
    )
    table.finish()
    return found


def _mla(table: TomlTable) -> Mla:
    found = Mla(
        kv_rank=_at_least_one(table, "kv_rank"),
        rope_dim=_at_least_one(table, "rope_dim"),
        nope_dim=_at_least_one(table, "nope_dim"),
        value_dim=_at_least_one(table, "value_dim"),
        query_rank=table.count_or_none("query_rank"),
    )
    table.finish()
    return found


def _window(table: TomlTable) -> SlidingWindow:
    found = SlidingWindow(window_tokens=_at_least_one(table, "window_tokens"), layers=_at_least_one(table, "layers"))
    table.finish()
    return found
