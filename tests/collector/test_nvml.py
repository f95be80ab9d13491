"""NVML through a stand-in for its module, and through the real one where the machine has a device."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from span_tables import at
from waiting import until
from writing import bench

from phasewise.collector.devices import GPU_SCHEMA
from phasewise.collector.nvml import NvmlSampler, open_nvml


def sampler(nvml: Any, found: Any = print, **options: Any) -> NvmlSampler:
    return NvmlSampler(nvml, found, lambda: at(0), host="here", **options)


def test_each_device_tells_what_it_can_in_our_units() -> None:
    first, second = sampler(FakeNvml()).read().to_dicts()
    assert first == dict.fromkeys(GPU_SCHEMA) | {
        "instance": "here",
        "device": "GPU-0",
        "unix_ns": at(0),
        "source": "nvml",
        "host": "here",
        "model": "NVIDIA H100 80GB HBM3",
        "utilization_ratio": 0.4,
        "memory_used_bytes": 2.0**30,
        "memory_total_bytes": 2.0**31,
        "power_w": 250.0,
        "energy_j": 5.0,
        "sm_clock_hz": 1.98e9,
        "memory_clock_hz": 2.619e9,
        "temperature_c": 61.0,
        "throttle_reasons": 0x44,
    }
    assert (second["device"], second["power_w"]) == ("GPU-1", None)


def test_readings_are_stored_until_it_is_told_to_stop(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.nvmlInit()
    with bench(tmp_path) as b:
        moments = iter(range(10**6))
        reading = NvmlSampler(nvml, b.writer.add_samples, lambda: at(next(moments)), host="here", interval_s=0.01)
        b.writer.watch_also(reading.status)
        stopping = threading.Event()
        thread = threading.Thread(target=reading.run, args=(stopping,))
        thread.start()
        until(lambda: b.counter("device_readings") >= 4)
        nvml.lost = True
        until(lambda: reading.status()[0]["problem"] != "")
        assert b.writer.health()["scrape_sources"] == reading.status()
        nvml.lost = False
        until(lambda: reading.status()[0]["problem"] == "")
        stopping.set()
        thread.join(10)
        assert nvml.opened == 0
        stored = b.rows("SELECT device, count(*) AS n FROM gpu_samples GROUP BY device ORDER BY device")
        assert [row["device"] for row in stored] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "nvidia-ml-py is not installed"),
        (FakeNvml(absent=True), "driver not loaded"),
        (FakeNvml(0), "knows no device"),
    ],
)
def test_without_a_device_it_says_why(monkeypatch: pytest.MonkeyPatch, module: Any, said: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    nvml, reason = open_nvml()
    assert nvml is None
    assert said in reason


def test_with_devices_it_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml, said = open_nvml()
    assert (nvml, said, fake.opened) == (fake, "2 devices", 1)


@pytest.mark.gpu
def test_a_real_device_is_read() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    nvml, said = open_nvml()
    assert nvml is not None, said
    for row in sampler(nvml).read().to_dicts():
        assert 0 <= row["utilization_ratio"] <= 1
        assert 0 < row["memory_used_bytes"] <= row["memory_total_bytes"]
        assert row["sm_clock_hz"] > 1e8
