"""What was measured on a machine, and the roofline that follows from it or from a data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What the best matrix product and the best stream reach of a data sheet: roofline.md 4.1, and the fits of rules/gpus (0.85-0.95).
BEST_PRODUCT_RATIO, BEST_STREAM_RATIO = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Rate:
    """So much a second, over some repeats of one kind of work. median: what is sustained; shape: what was run, in words."""

    median: float
    p10: float
    p90: float
    least: float
    most: float
    repeats: int
    shape: str

    @property
    def spread_ratio(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median."""
        return (self.p90 - self.p10) / self.median


@dataclass(frozen=True, slots=True)
class Measured:
    """How a machine was measured by `phasewise calibrate`. products: FLOP/s by dtype; streams: bytes/s, read and written, by kind.

    threads: of a CPU. versions: of what measured. notes: what could not be measured, and what is too noisy to lean on.
    """

    date: str
    device: str
    products: Mapping[str, Rate]
    streams: Mapping[str, Rate]
    versions: Mapping[str, str]
    threads: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Roof:
    """The two lines of a roofline. measured: they were reached on a machine, and no data sheet says that nothing is faster."""

    flops: float
    bytes_per_s: float
    measured: bool

    @property
    def ridge_flop_per_byte(self) -> float:
        """Arithmetic intensity at which the lines meet."""
        return self.flops / self.bytes_per_s
