"""Readings of this machine's NVIDIA devices through NVML, once a second. Nothing where there is no device or no package.

`nvidia-ml-py` (the module `pynvml`) is optional. What a device does not tell is unknown; a device that is lost tells nothing.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from phasewise.collector.devices import DEVICES, GPU_SCHEMA
from phasewise.collector.exposition import SAMPLE_SCHEMA, Exposition
from phasewise.rules.units import UNITS

LOG = logging.getLogger(__name__)
INTERVAL_S = 1.0
SOURCE = "nvml"
_LIBRARY = "pynvml"


def open_nvml() -> tuple[Any, str]:
    """The module, initialised, and how many devices there are in words; None and the reason where there is nothing to read."""
    try:
        nvml = importlib.import_module(_LIBRARY)
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return None, f"{problem}".lower()
    count = nvml.nvmlDeviceGetCount()
    if not count:
        nvml.nvmlShutdown()
        return None, "the driver knows no device"
    return nvml, f"{count} device" + "s" * (count > 1)


class NvmlSampler:
    """Hands an exposition of all devices to `on_samples` in its rhythm. nvml: the module `pynvml`, initialised."""

    def __init__(
        self,
        nvml: Any,
        on_samples: Callable[[list[Exposition]], object],
        clock: Callable[[], int] = time.time_ns,
        *,
        host: str | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._nvml = nvml
        self._on_samples = on_samples
        self._clock = clock
        self._interval_s = interval_s
        self._host = host or socket.gethostname()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._devices = [
            (one, _text(nvml.nvmlDeviceGetUUID(one)), _text(nvml.nvmlDeviceGetName(one))) for one in handles
        ]
        self._readers = _readers(nvml)
        self._problem = ""
        self._read_unix_ns = 0

    def run(self, stopping: threading.Event) -> None:
        """Until told to stop; then the library is let go."""
        try:
            while not stopping.is_set():
                began = time.monotonic()
                self._step()
                stopping.wait(max(0.0, self._interval_s - (time.monotonic() - began)))
        finally:
            self._nvml.nvmlShutdown()

    def status(self) -> list[dict[str, object]]:
        """As Scraper.sources: one object."""
        return [
            {
                "job": SOURCE,
                "kind": SOURCE,
                "targets": len(self._devices),
                "left_out": 0,
                "problem": self._problem,
                "changed_unix_ns": self._read_unix_ns,
            }
        ]

    def read(self) -> pl.DataFrame:
        """A row a device (GPU_SCHEMA); none for a device that tells nothing."""
        at = self._clock()
        rows = []
        for device, uuid, name in self._devices:
            told: dict[str, object] = {}
            for read in self._readers:
                try:
                    told |= read(device)
                except self._nvml.NVMLError:  # this device does not tell this
                    continue
            if told:
                known = {"instance": self._host, "device": uuid, "unix_ns": at, "source": SOURCE}
                rows.append(dict.fromkeys(GPU_SCHEMA) | known | {"host": self._host, "model": name} | told)
        return pl.DataFrame(rows, schema=GPU_SCHEMA, orient="row")

    def _step(self) -> None:
        """A reading that cannot be had or stored is lost, and said once."""
        try:
            rows = self.read()
            if rows.is_empty():
                raise ValueError("no device tells anything any more")
            none = pl.DataFrame(schema=SAMPLE_SCHEMA)
            self._on_samples([Exposition(DEVICES, none, {}, devices=rows, labels={"host.name": self._host})])
        except Exception as error:
            if not self._problem:
                LOG.warning("a reading of the devices is lost: %s: %s", type(error).__name__, error)
            self._problem = str(error)[:200]
        else:
            self._problem = ""
            self._read_unix_ns = self._clock()


def _readers(nvml: Any) -> list[Callable[[Any], Mapping[str, object]]]:
    """What is asked of a device, each question by itself: a device may lack any of them."""
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )  # its name before release 12

    def memory(device: Any) -> dict[str, object]:
        told = nvml.nvmlDeviceGetMemoryInfo(device)
        return {"memory_used_bytes": float(told.used), "memory_total_bytes": float(told.total)}

    def clock(column: str, kind: int) -> Callable[[Any], Mapping[str, object]]:
        return lambda device: {column: float(nvml.nvmlDeviceGetClockInfo(device, kind)) * UNITS["MHz"]}

    found: list[Callable[[Any], Mapping[str, object]]] = [
        lambda device: {"utilization_ratio": nvml.nvmlDeviceGetUtilizationRates(device).gpu * UNITS["percent"]},
        memory,
        lambda device: {"power_w": nvml.nvmlDeviceGetPowerUsage(device) * UNITS["mW"]},
        lambda device: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(device) * UNITS["mJ"]},
        clock("sm_clock_hz", nvml.NVML_CLOCK_SM),
        clock("memory_clock_hz", nvml.NVML_CLOCK_MEM),
        lambda device: {"temperature_c": float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))},
    ]
    if reasons is not None:
        found.append(lambda device: {"throttle_reasons": int(reasons(device))})
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
