"""Readings of the machine's NVIDIA devices as OTLP gauges, through NVML. Nothing where there is no device or no package.

Names are those of the OpenTelemetry hardware conventions (`hw.gpu.*`, `hw.energy` left out); a device is told by `hw.id`, its UUID.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from phasewise.instrumented_engine.export import SEND_TIMEOUT_S, ExportSettings, http_path, protocol_of
from phasewise.instrumented_engine.telemetry import SCOPE, WIRE_VERSION, Value

INTERVAL_S = 1.0


class GpuMetrics:
    """Reads when the reader asks. nvml: the module `pynvml`, initialised."""

    def __init__(self, nvml: Any, reader: MetricReader, resource: Mapping[str, Value]) -> None:
        self._nvml = nvml
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._names = [{"hw.id": _text(nvml.nvmlDeviceGetUUID(device))} for device in self._devices]
        self._provider = MeterProvider([reader], resource=Resource.create(dict(resource)), shutdown_on_exit=False)
        meter = self._provider.get_meter(SCOPE, WIRE_VERSION)
        for name, unit, read in (
            ("hw.gpu.utilization", "1", lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
            ("hw.gpu.memory.usage", "By", lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used),
            ("hw.gpu.memory.limit", "By", lambda device: nvml.nvmlDeviceGetMemoryInfo(device).total),
            ("hw.power", "W", lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
            ("hw.gpu.clock", "Hz", lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM) * 1e6),
        ):
            meter.create_observable_gauge(name, [self._observe(read)], unit)

    @property
    def devices(self) -> int:
        return len(self._devices)

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=SEND_TIMEOUT_S * 1000)
        self._nvml.nvmlShutdown()

    def _observe(self, read: Callable[[Any], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for device, name in zip(self._devices, self._names, strict=True):
                try:
                    yield Observation(read(device), name)
                except self._nvml.NVMLError:  # this device does not tell this
                    continue

        return observe


def open_gpu_metrics(settings: ExportSettings, resource: Mapping[str, Value]) -> tuple[GpuMetrics | None, str]:
    """The readings, begun, and one sentence on what is read; None where nothing is."""
    protocol = protocol_of(settings)
    if protocol is None:
        return None, "device readings go nowhere"
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None, "no device readings: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return None, f"no device readings: {problem}"
    exporter = (GrpcExporter if protocol == "grpc" else HttpExporter)(
        endpoint=_metrics_endpoint(settings.endpoint, protocol), timeout=SEND_TIMEOUT_S
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=INTERVAL_S * 1000)
    metrics = GpuMetrics(nvml, reader, resource)
    return metrics, f"readings of {metrics.devices} devices once in {INTERVAL_S:g} s"


def _metrics_endpoint(endpoint: str | None, protocol: str) -> str | None:
    if endpoint is None or protocol == "grpc":
        return endpoint
    return http_path(endpoint, "metrics")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
