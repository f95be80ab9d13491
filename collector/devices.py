"""Readings of devices out of metrics: what DCGM's exporter, NVML's and others call them, to columns in SI units.

Names and units as of the exporters' own lists: dcgm-exporter etc/default-counters.csv, dcp-metrics-included.csv and
1.x-compatibility-metrics.csv; Triton's metrics documentation; OpenTelemetry's hardware conventions and the Collector's dcgm
receiver; nvidia_gpu_exporter. Left out, as their unit depends on the release: DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL, the
violation counters (us or ns), and the profiling fields of exporter 1.x (ratio or percent).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import polars as pl

from phasewise.collector.records import GpuSample
from phasewise.collector.schemas import polars_schema
from phasewise.rules.units import UNITS

GPU_SCHEMA = polars_schema(GpuSample)
Labels = Mapping[str, str]
DEVICES = "devices"  # instead of an engine, of a page that tells of devices alone


@dataclass(frozen=True, slots=True)
class Gauge:
    """A metric as a column: the value times `scale`. where: label values that must be; sure: only devices have it."""

    column: str
    scale: float = 1.0
    where: Labels = field(default_factory=dict)
    sure: bool = True


def _in(column: str, unit: str, **where: str) -> Gauge:
    return Gauge(column, UNITS[unit], {key.replace("_", "."): value for key, value in where.items()})


_DCGM = {
    "DEV_GPU_UTIL": _in("utilization_ratio", "percent"),
    "DEV_FB_USED": _in("memory_used_bytes", "MiB"),
    "DEV_FB_FREE": _in("memory_free_bytes", "MiB"),
    "DEV_FB_RESERVED": _in("memory_reserved_bytes", "MiB"),
    "DEV_FB_TOTAL": _in("memory_total_bytes", "MiB"),
    "DEV_POWER_USAGE": _in("power_w", "W"),
    "DEV_TOTAL_ENERGY_CONSUMPTION": _in("energy_j", "mJ"),
    "DEV_SM_CLOCK": _in("sm_clock_hz", "MHz"),
    "DEV_MEM_CLOCK": _in("memory_clock_hz", "MHz"),
    "DEV_GPU_TEMP": Gauge("temperature_c"),
    "DEV_PCIE_TX_THROUGHPUT": _in(
        "pcie_sent_bytes_per_s", "KB"
    ),  # called a counter there; NVML gives KB in the last 20 ms, as KB/s
    "DEV_PCIE_RX_THROUGHPUT": _in("pcie_received_bytes_per_s", "KB"),
    "PROF_GR_ENGINE_ACTIVE": Gauge("engine_active_ratio"),
    "PROF_SM_ACTIVE": Gauge("sm_active_ratio"),
    "PROF_SM_OCCUPANCY": Gauge("sm_occupancy_ratio"),
    "PROF_PIPE_TENSOR_ACTIVE": Gauge("tensor_active_ratio"),
    "PROF_DRAM_ACTIVE": Gauge("dram_active_ratio"),
    "PROF_PCIE_TX_BYTES": Gauge("pcie_sent_bytes_per_s"),  # a rate, also where an old list calls it a counter
    "PROF_PCIE_RX_BYTES": Gauge("pcie_received_bytes_per_s"),
    "PROF_NVLINK_TX_BYTES": Gauge("nvlink_sent_bytes_per_s"),
    "PROF_NVLINK_RX_BYTES": Gauge("nvlink_received_bytes_per_s"),
    "DEV_CLOCK_THROTTLE_REASONS": Gauge("throttle_reasons"),
    "DEV_CLOCKS_EVENT_REASONS": Gauge("throttle_reasons"),
    "DEV_XID_ERRORS": Gauge("xid"),
}
_OTHERS = {
    # dcgm-exporter 1.x
    "dcgm_gpu_utilization": _in("utilization_ratio", "percent"),
    "dcgm_fb_used": _in("memory_used_bytes", "MiB"),
    "dcgm_fb_free": _in("memory_free_bytes", "MiB"),
    "dcgm_power_usage": _in("power_w", "W"),
    "dcgm_total_energy_consumption": _in("energy_j", "mJ"),
    "dcgm_sm_clock": _in("sm_clock_hz", "MHz"),
    "dcgm_memory_clock": _in("memory_clock_hz", "MHz"),
    "dcgm_gpu_temp": Gauge("temperature_c"),
    "dcgm_pcie_tx_throughput": _in("pcie_sent_bytes_per_s", "KB"),
    "dcgm_pcie_rx_throughput": _in("pcie_received_bytes_per_s", "KB"),
    "dcgm_xid_errors": Gauge("xid"),
    # Triton
    "nv_gpu_utilization": Gauge("utilization_ratio"),
    "nv_gpu_memory_used_bytes": Gauge("memory_used_bytes"),
    "nv_gpu_memory_total_bytes": Gauge("memory_total_bytes"),
    "nv_gpu_power_usage": Gauge("power_w"),
    "nv_energy_consumption": Gauge("energy_j"),
    # OpenTelemetry's hardware conventions, and what Prometheus makes of their names
    "hw.gpu.utilization": Gauge("utilization_ratio"),
    "hw.gpu.memory.usage": Gauge("memory_used_bytes"),
    "hw.gpu.memory.limit": Gauge("memory_total_bytes"),
    "hw.gpu.clock": Gauge("sm_clock_hz"),
    "hw.power": Gauge("power_w", sure=False),
    "hw_gpu_utilization_ratio": Gauge("utilization_ratio"),
    "hw_gpu_memory_usage_bytes": Gauge("memory_used_bytes"),
    "hw_gpu_memory_limit_bytes": Gauge("memory_total_bytes"),
    "hw_gpu_clock_hertz": Gauge("sm_clock_hz"),
    "hw_power_watts": Gauge("power_w", sure=False),
    # the Collector's dcgm receiver
    "gpu.dcgm.utilization": Gauge("engine_active_ratio"),
    "gpu.dcgm.sm.utilization": Gauge("sm_active_ratio"),
    "gpu.dcgm.sm.occupancy": Gauge("sm_occupancy_ratio"),
    "gpu.dcgm.pipe.utilization": _in("tensor_active_ratio", "ratio", gpu_pipe="tensor"),
    "gpu.dcgm.memory.bytes_used": _in("memory_used_bytes", "B", gpu_memory_state="used"),
    "gpu.dcgm.memory.bandwidth_utilization": Gauge("dram_active_ratio"),
    "gpu.dcgm.energy_consumption": Gauge("energy_j"),
    "gpu.dcgm.temperature": Gauge("temperature_c"),
    "gpu.dcgm.clock.frequency": Gauge("sm_clock_hz"),
    # nvidia_gpu_exporter
    "nvidia_smi_utilization_gpu_ratio": Gauge("utilization_ratio"),
    "nvidia_smi_memory_used_bytes": Gauge("memory_used_bytes"),
    "nvidia_smi_memory_total_bytes": Gauge("memory_total_bytes"),
    "nvidia_smi_power_draw_watts": Gauge("power_w"),
    "nvidia_smi_clocks_current_sm_clock_hz": Gauge("sm_clock_hz"),
    "nvidia_smi_temperature_gpu": Gauge("temperature_c"),
}
GAUGES: Mapping[str, Gauge] = {f"DCGM_FI_{name}": gauge for name, gauge in _DCGM.items()} | _OTHERS
# Events that dcgm-exporter counts over a time of its own choosing, by a label.
XID_COUNT, CLOCK_COUNT = "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_CLOCK_EVENTS_COUNT"
PREFIXES = ("DCGM_FI_", "DCGM_EXP_", "dcgm_", "nv_gpu_", "nv_energy_", "hw.gpu.", "hw.power", "hw_gpu_", "hw_power_", "gpu.dcgm.", "nvidia_smi_")  # fmt: skip

# NVML's clocks event reasons, and the words dcgm-exporter and we use for them.
THROTTLE_BITS: Mapping[str, int] = {
    "gpu_idle": 0x1, "clocks_setting": 0x2, "power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal": 0x20, "hw_thermal": 0x40, "hw_power_brake": 0x80, "display_clocks": 0x100,
}  # fmt: skip
_RATIOS = tuple(name for name in GPU_SCHEMA if name.endswith("_ratio"))
_WHOLE = ("throttle_reasons", "xid")
# What DCGM writes where it has no value, of 32-bit, 64-bit and floating fields; the exporter passed them on until 3.x.
_BLANK = ((0x7FFFFFF0, 0x7FFFFFFF), (2.0**47, 2.0**47 + 3))
_BLANK_FROM = 2.0**62

_UUID = ("UUID", "uuid", "gpu_uuid", "gpu.uuid", "hw.id", "hw_id")
_NUMBER = ("gpu", "gpu.number", "index", "minor_number")
_HOST = ("Hostname", "hostname", "host.name", "host_name", "k8s.node.name", "node")
_MODEL = ("modelName", "gpu.model", "hw.model", "name")
_WORKLOAD = ("exported_{}", "{}", "pod_{}")  # Prometheus renames the exporter's labels where its own have the same name


def throttle_words(bits: int) -> list[str]:
    """The reasons in a bit set, without idling, which slows nobody."""
    return [word for word, bit in THROTTLE_BITS.items() if bits & bit and word != "gpu_idle"]


def device_rows(
    points: Iterable[tuple[str, Labels, float]],
    unix_ns: int,
    instance: str | None,
    source: str,
    place: Labels | None = None,
) -> pl.DataFrame:
    """A row a device (GPU_SCHEMA) of one moment's points (name, labels, value); none where they tell of no device.

    instance: who was asked; place: labels of its resource, where the points themselves do not say.
    """
    rows: dict[tuple[str | None, ...], dict[str, object]] = {}
    sure: set[tuple[str | None, ...]] = set()
    for name, labels, value in points:
        gauge = GAUGES.get(name) or GAUGES.get(name.removesuffix("_total"))
        if gauge is None and name not in (XID_COUNT, CLOCK_COUNT):
            continue
        known = labels if not place else {**place, **labels}
        device = _device(known)
        if device is None or not _is_value(value):
            continue
        namespace, pod, container = _workload(known)
        key = (device, namespace, pod)
        row = rows.setdefault(key, {"device": device, "namespace": namespace, "pod": pod, "container": container})
        for column, told in (("host", _first(known, _HOST)), ("model", _first(known, _MODEL))):
            if told is not None:
                row.setdefault(column, told)
        if gauge is None:
            _count(row, name, labels, value)
            sure.add(key)
        elif all(labels.get(label) == wanted for label, wanted in gauge.where.items()):
            row.setdefault(gauge.column, value * gauge.scale)
            if gauge.sure:
                sure.add(key)
    told_rows = [_finished(row, unix_ns, instance, source) for key, row in rows.items() if key in sure]
    return pl.DataFrame(told_rows, schema=GPU_SCHEMA, orient="row")


def _finished(row: dict[str, object], unix_ns: int, instance: str | None, source: str) -> dict[str, object]:
    used, free, reserved = (row.pop(f"memory_{part}_bytes", None) for part in ("used", "free", "reserved"))
    if isinstance(used, float):
        row["memory_used_bytes"] = used
        if isinstance(free, float):  # old exporters count what is reserved as used
            row.setdefault("memory_total_bytes", used + free + (reserved if isinstance(reserved, float) else 0.0))
    for name in _RATIOS:
        ratio = row.get(name)
        if isinstance(ratio, float) and not 0 <= ratio <= 1:
            row[name] = None
    for name in _WHOLE:
        whole = row.get(name)
        row[name] = int(whole) if isinstance(whole, float) and whole >= 0 else None
    named = f"{row['namespace'] or 'default'}/{row['pod']}" if row["pod"] else None
    found: dict[str, object] = dict.fromkeys(GPU_SCHEMA)
    return (
        found
        | row
        | {"instance": named or instance or row.get("host") or DEVICES, "unix_ns": unix_ns, "source": source}
    )


def _count(row: dict[str, object], name: str, labels: Labels, value: float) -> None:
    """Events counted by a label: the code of the error, or the reason of the slower clock."""
    if name == XID_COUNT:
        code = labels.get("xid", "")
        if value <= 0:
            row.setdefault("xid", 0.0)
        elif code.isdecimal() and len(code) < 10:  # else there was an error, and nothing tells which
            row.setdefault("xid", float(code))
        return
    bit = THROTTLE_BITS.get(labels.get("clock_event", ""), 0) if value > 0 else 0
    before = row.get("throttle_reasons")
    row["throttle_reasons"] = float(int(before if isinstance(before, float) else 0) | bit)


def _is_value(value: float) -> bool:
    return math.isfinite(value) and value < _BLANK_FROM and not any(low <= value <= high for low, high in _BLANK)


def _device(labels: Labels) -> str | None:
    """A slice of a device (MIG) is a device of its own."""
    uuid, number = _first(labels, _UUID), _first(labels, _NUMBER)
    host = _first(labels, _HOST)
    whole = uuid or (number and (f"{host}/{number}" if host else f"gpu-{number}"))
    part = labels.get("GPU_I_ID")
    return f"{whole}/{part}" if whole and part else whole or None


def _workload(labels: Labels) -> tuple[str | None, str | None, str | None]:
    """Namespace, pod and container that have the device. Without one, `pod` may be the exporter's own: it computes nothing."""
    for form in _WORKLOAD:
        pod = labels.get(form.format("pod") if form != "pod_{}" else "pod_name")
        if pod:
            if form == "pod_{}":
                return labels.get("pod_namespace"), pod, labels.get("container_name")
            container = labels.get(form.format("container"))
            if form == "{}" and "exporter" in (container or pod):
                return None, None, None
            return labels.get(form.format("namespace")), pod, container
    return None, None, None


def _first(labels: Labels, names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)
