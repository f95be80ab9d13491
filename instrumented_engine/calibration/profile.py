"""From what was measured on a machine to the hardware profile that a rule file holds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from phasewise.instrumented_engine.calibration.repeats import Clock, Device, doubt, product_rate, stream_rates
from phasewise.rules.errors import MachineError
from phasewise.rules.measured import Measured, Rate
from phasewise.rules.schema import DTYPES, Gpu, Source

STREAM_PART = 0.25  # of the time; the rest is the data types', in equal parts
_PUNCTUATION = re.compile(r"[^a-z0-9]+")


class Machine(Device, Protocol):
    """A device that also says what it is. notes: what to know of anything measured with it."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run found on a device."""

    kind: str
    memory_bytes: int
    measured: Measured


def measure(
    device: Machine,
    dtypes: Sequence[str],
    seconds: float,
    date: str,
    versions: Mapping[str, str],
    tell: Callable[[str], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> Figures:
    """Every data type and stream in about so many seconds. A data type that the device does not have is left out, with a note.

    versions: of what measures, beside those of the device. tell: called with the name of what comes next.
    """
    notes = list(device.notes)
    tell("streams")
    streams = stream_rates(device, seconds * STREAM_PART, clock)
    products: dict[str, Rate] = {}
    for dtype in dtypes:
        tell(dtype)
        try:
            products[dtype] = product_rate(device, dtype, seconds * (1 - STREAM_PART) / len(dtypes), clock)
        except (NotImplementedError, RuntimeError) as problem:
            notes.append(f"{dtype}: not here ({_first_line(problem)})")
    if not products:
        raise MachineError(f"no matrix product can be computed: {'; '.join(notes)}")
    doubts = (doubt(name, rate) for name, rate in (*products.items(), *streams.items()))
    return Figures(
        kind=device.kind,
        memory_bytes=device.memory_bytes,
        measured=Measured(
            date=date,
            device=device.name,
            products=MappingProxyType(products),
            streams=MappingProxyType(streams),
            versions=MappingProxyType({**versions, **device.versions}),
            threads=device.threads,
            notes=(*notes, *(text for text in doubts if text)),
        ),
    )


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]


def identity_of(device: str) -> str:
    """A file name from a device's name."""
    cleaned = re.sub(r"\((?:r|tm|c)\)", " ", device.lower())
    return _PUNCTUATION.sub("-", cleaned).strip("-") or "device"


def profile(figures: Figures, identity: str, name: str, known: Gpu | None = None, aliases: tuple[str, ...] = ()) -> Gpu:
    """An accelerator of the rules whose peaks are those that were reached: of each data type the median of the best size, of the
    streams the better one.

    known: what the rules say of the same device. Its data sheet is kept beside what was reached, so that the bounds stay bounds,
    unless something was faster than it: then it is not that of this device.
    """
    measured = figures.measured
    reached = {dtype: measured.products[dtype].median for dtype in DTYPES if dtype in measured.products}
    stream = max(rate.median for rate in measured.streams.values())
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    here = Source(f"measured on this machine by phasewise calibrate, {versions}", measured.date)
    note = "Matrix products and streams as reached on one machine; there is no data sheet beside them."
    stated = None
    if known is not None and known.memory_bandwidth_bytes_per_s is not None:
        beaten = sorted(d for d, rate in reached.items() if rate > known.peak_flops.get(d, rate))
        beaten += ["memory bandwidth"] if stream > known.memory_bandwidth_bytes_per_s else []
        if beaten:
            note += f" That of {known.id} was left out: more was reached than it states ({', '.join(beaten)})."
        else:
            stated, note = (
                known,
                f"Matrix products and streams as reached on one machine, beside the data sheet of {known.id}.",
            )
    carried = {} if stated is None else {k: v for k, v in stated.sources.items() if not k.startswith("achieved")}
    return Gpu(
        id=identity,
        name=name,
        kind=figures.kind,
        aliases=aliases,
        peak_flops=MappingProxyType(dict(stated.peak_flops if stated else {})),
        achieved_flops=MappingProxyType(reached),
        memory_bandwidth_bytes_per_s=stated.memory_bandwidth_bytes_per_s if stated else None,
        achieved_bandwidth_bytes_per_s=stream,
        memory_bytes=float(figures.memory_bytes),
        tdp_w=stated.tdp_w if stated else None,
        link_bandwidth_bytes_per_s=stated.link_bandwidth_bytes_per_s if stated else None,
        measured=measured,
        sparse_note=stated.sparse_note if stated else None,
        note=note,
        sources=MappingProxyType(
            {**carried, "achieved_flops": here, "achieved_bandwidth_bytes_per_s": here, "memory_bytes": here}
        ),
    )
