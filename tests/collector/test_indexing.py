"""The benchmark of the store side runs, and every request it sends is there, attributed and final, exactly once."""

from __future__ import annotations

import pytest
from benchmarks.indexing import measured
from benchmarks.indexing_load import Load


@pytest.mark.slow
@pytest.mark.parametrize("shape", [1, 8])
def test_every_request_of_the_load_is_a_final_row(shape: int) -> None:
    load = Load(shape, 8_192, 20_000.0, instances=3)
    figures = measured(load, profile=False)  # ends the program where a row is missing, twice or not final
    assert figures["spans"] == load.requests * shape == 8_192
    assert load.end_unix_ns == load.start_unix_ns + round(8_192 / 20_000.0 * 1e9)
    assert figures["indexed_per_cpu_s"] != 0
