"""Device readings as gauges: from a stand-in for NVML where the machine has none, from NVML itself where it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from phasewise.instrumented_engine.export import ExportSettings
from phasewise.instrumented_engine.serving.gpu_metrics import GpuMetrics, open_gpu_metrics


class Trouble(Exception):
    """As NVML raises where a device does not tell something."""


class TwoDevices:
    """What `pynvml` has of the functions used; the second device does not tell its power."""

    NVMLError = Trouble
    NVML_CLOCK_SM = 1
    ended = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return f"GPU-{device}" if device else b"GPU-0"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=40 + device)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(used=2**30, total=2**31)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device:
            raise Trouble
        return 250_000

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return 1980

    def nvmlShutdown(self) -> None:
        self.ended = True


def test_each_device_tells_what_it_can() -> None:
    reader, nvml = InMemoryMetricReader(), TwoDevices()
    metrics = GpuMetrics(nvml, reader, {"service.name": "e"})
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, dict[str, float]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        found[metric.name] = {str(p.attributes["hw.id"]): p.value for p in metric.data.data_points}  # type: ignore[index, union-attr]
    assert found["hw.gpu.utilization"] == {"GPU-0": 0.4, "GPU-1": 0.41}
    assert found["hw.power"] == {"GPU-0": 250.0}
    assert found["hw.gpu.clock"]["GPU-1"] == 1.98e9
    assert found["hw.gpu.memory.usage"]["GPU-0"] == 2**30
    metrics.close()
    assert nvml.ended


def test_without_endpoint_or_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_gpu_metrics(ExportSettings(), {}) == (None, "device readings go nowhere")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    metrics, said = open_gpu_metrics(ExportSettings(endpoint="http://127.0.0.1:9"), {})
    assert metrics is None
    assert "not installed" in said


@pytest.mark.gpu
def test_a_real_device_is_read() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    pynvml.nvmlInit()
    reader = InMemoryMetricReader()
    metrics = GpuMetrics(pynvml, reader, {})
    data = reader.get_metrics_data()
    assert data is not None
    names = {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {"hw.gpu.utilization", "hw.gpu.memory.usage"} <= names
    metrics.close()
