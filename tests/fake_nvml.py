"""What `pynvml` has of the functions that are used, for machines without a device. The second device does not tell its power."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Trouble(Exception):
    """As NVML raises where a device does not tell something, or there is no driver."""


class FakeNvml:
    """Two devices; `lost`: none answers any more; `absent`: no driver; `count`: how many there are."""

    NVMLError = Trouble
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, count: int = 2, *, absent: bool = False) -> None:
        self.count, self.absent, self.lost, self.opened = count, absent, False, 0

    def nvmlInit(self) -> None:
        if self.absent:
            raise Trouble("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return f"GPU-{device}" if device else b"GPU-0"  # older releases answer in bytes

    def nvmlDeviceGetName(self, device: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def _told(self, value: Any) -> Any:
        if self.lost:
            raise Trouble("GPU is lost")
        return value

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return self._told(SimpleNamespace(gpu=40 + device, memory=3))

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return self._told(SimpleNamespace(used=2**30, total=2**31))

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device:
            raise Trouble("Not Supported")
        return int(self._told(250_000))

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:
        return int(self._told(5_000))

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return int(self._told(1980 if kind == self.NVML_CLOCK_SM else 2619))

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return int(self._told(61))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:
        return int(self._told(0x44))
