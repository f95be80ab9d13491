"""The `[efficiency]` table of an accelerator, and the file that stands in where there is none."""

from __future__ import annotations

import pytest

from phasewise.rules.efficiency_file import generic_efficiency, read_efficiency
from phasewise.rules.errors import RuleError
from phasewise.rules.load import load_rulebook
from phasewise.rules.schema import CollectiveEfficiency, Efficiency, FitError, OperatorEfficiency
from phasewise.rules.toml_table import TomlTable

ERROR = "error = { rows = 10, median_ratio = 0.1, p90_ratio = 0.3 }"
OPERATOR = f"compute_ratio = 0.8\nmemory_ratio = 0.9\nsharpness = 3\nfloor_s = 2e-6\nhalf_rows = 40\n{ERROR}\n"
WHOLE = "".join(
    f"[{name}]\n{OPERATOR}"
    for name in ("gemm.bf16", "expert_gemm.bf16", "prefill_attention.bf16", "decode_attention.bf16", "elementwise")
) + (
    f"[all_reduce]\nsharpness = 2\nlatency_s = {{ 2 = 5e-6, 4 = 6e-6, 8 = 7e-6 }}\n"
    f"link_ratio = {{ 2 = 0.5, 4 = 0.6, 8 = 0.7 }}\n{ERROR}\n"
    '[[source]]\ntext = "a table"\ndate = "2026-11-29"\n'
)


def read(text: str) -> Efficiency:
    return read_efficiency(TomlTable.parse("card.toml", text))


def test_a_table_is_read_whole() -> None:
    found = read(WHOLE)
    assert found.gemm["bf16"].half_rows == 40
    assert found.gemm["bf16"].half_columns == 0, "a half that is left out plays no part"
    assert found.all_reduce.latency_s[4] == 6e-6
    assert found.all_reduce.error == FitError(10, 0.1, 0.3)
    assert [source.text for source in found.sources] == ["a table"]


@pytest.mark.parametrize(
    ("before", "after", "key", "says"),
    [
        ("compute_ratio = 0.8", "compute_ratio = 1.2", "compute_ratio", "above 1"),
        ("memory_ratio = 0.9", "memory_ratio = 0", "memory_ratio", "above 0"),
        ("sharpness = 3", "sharpness = 0.5", "sharpness", "below 1"),
        ("floor_s = 2e-6", "floor_s = -1", "floor_s", "negative"),
        ("half_rows = 40", "half_row = 40", "half_row", "did you mean 'half_rows'"),
        ("[gemm.bf16]", "[gemm.fp8]", "gemm.bf16", "is missing"),
        (ERROR, "", "error", "is missing"),
        ("8 = 7e-6", "16 = 7e-6", "latency_s.8", "is missing"),
        ('[[source]]\ntext = "a table"\ndate = "2026-11-29"\n', "", "source", "no number without a source"),
        ('date = "2026-11-29"', 'date = "soon"', "date", "must be a date"),
    ],
)
def test_a_wrong_table_is_refused_by_key(before: str, after: str, key: str, says: str) -> None:
    assert before in WHOLE
    with pytest.raises(RuleError) as refused:
        read(WHOLE.replace(before, after, 1))
    assert key in refused.value.key
    assert says in str(refused.value)


def test_every_curve_rests_on_rows() -> None:
    measured = [gpu.efficiency for gpu in load_rulebook().gpus.values() if gpu.efficiency]
    assert len(measured) >= 3
    for efficiency in (*measured, generic_efficiency()):
        curves: list[OperatorEfficiency | CollectiveEfficiency] = [efficiency.elementwise, efficiency.all_reduce]
        for group in (
            efficiency.gemm,
            efficiency.expert_gemm,
            efficiency.prefill_attention,
            efficiency.decode_attention,
        ):
            curves += group.values()
        assert all(curve.error.rows >= 20 for curve in curves)
        assert all(0 < curve.error.median_ratio < curve.error.p90_ratio for curve in curves)


def test_no_products_in_fp8_where_the_hardware_has_none() -> None:
    for gpu in load_rulebook().gpus.values():
        if gpu.efficiency:
            assert set(gpu.efficiency.gemm) <= set(gpu.peak_flops)
