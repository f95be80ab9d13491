"""A CPU measured without PyTorch: what numpy's matrix product and copies reach, in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phasewise.instrumented_engine.calibration.machine_facts import (
    last_cache_bytes,
    memory_bytes,
    processor_name,
    stream_array_bytes,
    usable_cores,
)
from phasewise.instrumented_engine.calibration.repeats import Work

LEAST_STREAM_BYTES = 64 << 20


class NumpyDevice:
    """threads: cores that numpy's BLAS may use; its copies run on one."""

    kind = "cpu"
    dtypes = ("fp32",)
    smallest_product, largest_product = 128, 8192

    def __init__(self) -> None:
        self.name = processor_name()
        self.memory_bytes = memory_bytes()
        self.threads: int | None = usable_cores()
        self.versions = {"numpy": np.__version__}
        self.notes = ("torch is not installed: numpy measured fp32 alone, and its streams run on one core",)
        self.stream_bytes = stream_array_bytes(last_cache_bytes(), self.memory_bytes, LEAST_STREAM_BYTES)

    def product(self, dtype: str, size: int) -> Work:
        if dtype != "fp32":
            raise NotImplementedError("numpy multiplies no such type fast")
        draw = np.random.default_rng(1)
        a, b = (draw.standard_normal((size, size), dtype=np.float32) for _ in range(2))
        out = np.empty_like(a)
        return lambda: np.matmul(a, b, out=out)

    def streams(self) -> Mapping[str, tuple[Work, int]]:
        source = np.ones(self.stream_bytes // 4, dtype=np.float32)
        target = np.zeros_like(source)
        return {"copy": (lambda: np.copyto(target, source), 2)}

    def wait(self) -> None:
        """Nothing runs behind one's back."""
