"""What has to be known of a model on accelerators to time its kernels."""

from __future__ import annotations

from typing import Protocol

from phasewise.rules.counting import Precision
from phasewise.rules.schema import Gpu, Model


class Placement(Protocol):
    """One replica. compute_dtype: data type whose peak the matrix products run at; *_slow_ratio: 2 = that resource has half its speed."""

    @property
    def gpu(self) -> Gpu: ...

    @property
    def model(self) -> Model: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def tensor_parallel_count(self) -> int: ...

    @property
    def compute_dtype(self) -> str: ...

    @property
    def compute_slow_ratio(self) -> float: ...

    @property
    def memory_slow_ratio(self) -> float: ...

    @property
    def communication_slow_ratio(self) -> float: ...
