"""Reading the `[efficiency]` table of an accelerator, and `rules/efficiency.toml`, which stands in where there is none."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from phasewise.rules.schema import DTYPES, CollectiveEfficiency, Efficiency, FitError, OperatorEfficiency
from phasewise.rules.source import read_source
from phasewise.rules.toml_table import TomlTable

GENERIC_FILE = "efficiency.toml"
DEVICE_COUNTS = (2, 4, 8)


def read_efficiency(table: TomlTable) -> Efficiency:
    """Curves of one accelerator; every one states its error, the table its source."""
    found = Efficiency(
        gemm=_by_dtype(table.table("gemm")),
        expert_gemm=_by_dtype(table.table("expert_gemm")),
        prefill_attention=_by_dtype(table.table("prefill_attention")),
        decode_attention=_by_dtype(table.table("decode_attention")),
        elementwise=_operator(table.table("elementwise")),
        all_reduce=_collective(table.table("all_reduce")),
        sources=tuple(read_source(source) for source in table.tables("source")),
    )
    table.finish()
    if not found.sources:
        raise table.error("source", "is missing: no number without a source")
    return found


@cache
def generic_efficiency() -> Efficiency:
    """For accelerators nobody measured by operator: fitted over all that were."""
    path = Path(str(files("phasewise.rules"))) / GENERIC_FILE
    return read_efficiency(TomlTable.parse(path, path.read_text("utf-8")))


def _by_dtype(table: TomlTable) -> MappingProxyType[str, OperatorEfficiency]:
    found = {dtype: _operator(table.table(dtype)) for dtype in DTYPES if table.has(dtype)}
    for dtype in DTYPES:
        table.raw(dtype)
    table.finish()
    if "bf16" not in found:
        raise table.error("bf16", "is missing: it stands in for the data types that are not measured")
    return MappingProxyType(found)


def _operator(table: TomlTable) -> OperatorEfficiency:
    found = OperatorEfficiency(
        compute_ratio=_share(table, "compute_ratio"),
        memory_ratio=_share(table, "memory_ratio"),
        sharpness=_exponent(table, "sharpness"),
        floor_s=_not_negative(table, "floor_s"),
        half_rows=_half(table, "half_rows"),
        half_columns=_half(table, "half_columns"),
        half_depth=_half(table, "half_depth"),
        half_work=_half(table, "half_work"),
        half_head_bytes=_half(table, "half_head_bytes"),
        error=_error(table.table("error")),
    )
    table.finish()
    return found


def _collective(table: TomlTable) -> CollectiveEfficiency:
    latency, link = table.table("latency_s"), table.table("link_ratio")
    found = CollectiveEfficiency(
        latency_s=MappingProxyType({count: latency.positive(str(count)) for count in DEVICE_COUNTS}),
        link_ratio=MappingProxyType({count: _share(link, str(count)) for count in DEVICE_COUNTS}),
        sharpness=table.positive("sharpness"),
        error=_error(table.table("error")),
    )
    latency.finish()
    link.finish()
    table.finish()
    return found


def _error(table: TomlTable) -> FitError:
    found = FitError(table.count("rows"), _not_negative(table, "median_ratio"), _not_negative(table, "p90_ratio"))
    table.finish()
    return found


def _half(table: TomlTable, key: str) -> float:
    """0 where it is left out: the share does not depend on that size."""
    return 0.0 if table.number_or_none(key) is None else _not_negative(table, key)


def _share(table: TomlTable, key: str) -> float:
    value = table.positive(key)
    if value > 1:
        raise table.error(key, f"{value} is above 1: nothing is faster than the data sheet's peak")
    return value


def _exponent(table: TomlTable, key: str) -> float:
    value = table.number(key)
    if value < 1:
        raise table.error(key, f"{value} is below 1: times would join to more than their sum")
    return value


def _not_negative(table: TomlTable, key: str) -> float:
    value = table.number(key)
    if value < 0:
        raise table.error(key, f"must not be negative, not {value!r}")
    return value
