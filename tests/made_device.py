"""A device that computes nothing, whose time passes only in its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasewise.instrumented_engine.calibration.repeats import Work


@dataclass
class MadeDevice:
    """Computes `flops` a second and moves `bytes_per_s`, each call with a start of `start_s`; time passes only in its calls."""

    flops: float = 1e11
    bytes_per_s: float = 1e10
    start_s: float = 1e-5
    without: tuple[str, ...] = ()
    jitter: tuple[float, ...] = (1.0,)
    now_s: float = 0.0
    sizes: list[int] = field(default_factory=list)
    calls: int = 0
    smallest_product: int = 128
    largest_product: int = 8192
    stream_bytes: int = 1 << 26
    name: str = "Made (R) Device"
    kind: str = "cpu"
    memory_bytes: int = 1 << 30
    threads: int | None = 2
    dtypes: tuple[str, ...] = ("fp32", "bf16", "int8")
    versions: Mapping[str, str] = field(default_factory=lambda: {"made": "1"})
    notes: tuple[str, ...] = ()

    def clock(self) -> float:
        return self.now_s

    def _take(self, seconds: float) -> None:
        self.calls += 1
        self.now_s += (seconds + self.start_s) * self.jitter[self.calls % len(self.jitter)]

    def product(self, dtype: str, size: int) -> Work:
        if dtype in self.without:
            raise RuntimeError(f"no kernel for {dtype}\nand a trace")
        self.sizes.append(size)
        return lambda: self._take(2 * size**3 / self.flops)

    def streams(self) -> Mapping[str, tuple[Work, int]]:
        return {"copy": (lambda: self._take(2 * self.stream_bytes / self.bytes_per_s), 2)}

    def wait(self) -> None:
        pass
