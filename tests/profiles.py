"""Hardware profiles for tests, as `phasewise calibrate` would write them."""

from __future__ import annotations

from types import MappingProxyType

from phasewise.instrumented_engine.calibration.profile import Figures, profile
from phasewise.instrumented_engine.calibration.repeats import rate_of
from phasewise.rules.measured import Measured
from phasewise.rules.schema import Gpu


def make_figures(
    flops: dict[str, float] | None = None, bytes_per_s: float = 2e12, device: str = "Some Card 9"
) -> Figures:
    """Five repeats each, some percent apart."""
    taken = (1.0, 1.01, 1.02, 0.99, 0.98)
    reached = flops or {"bf16": 400e12, "fp32": 40e12}
    return Figures(
        kind="gpu",
        memory_bytes=64 * 2**30,
        measured=Measured(
            date="2026-11-30",
            device=device,
            products=MappingProxyType({name: rate_of(value, taken, "8 x 8 x 8") for name, value in reached.items()}),
            streams=MappingProxyType({"copy": rate_of(bytes_per_s, taken, "1 read and 1 written, 9 MiB each")}),
            versions=MappingProxyType({"phasewise": "0.1.0", "torch": "2.13.0+cu130"}),
            notes=("fp8: not here (no such kernel)",),
        ),
    )


def make_profile(flops: dict[str, float] | None = None, bytes_per_s: float = 2e12, known: Gpu | None = None) -> Gpu:
    return profile(make_figures(flops, bytes_per_s), "some-card-9", "Some Card 9 (measured)", known, ("Some Card 9",))
