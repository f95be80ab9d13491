"""What device exporters say, as rows of `gpu_samples`: names old and new, units, blanks, slices, and whose device it is."""

from __future__ import annotations

from typing import Any

import pytest
from device_pages import OLD, dcgm
from hypothesis import given
from hypothesis import strategies as st
from span_tables import at
from writing import rulebook

from phasewise.collector.devices import DEVICES, GAUGES, GPU_SCHEMA, THROTTLE_BITS, device_rows, throttle_words
from phasewise.collector.exposition import read_exposition
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)


def rows(text: str, instance: str | None = "dcgm:9400", labels: dict[str, str] | None = None) -> list[dict[str, Any]]:
    read = read_exposition(text, at(0), PROFILES, instance=instance, labels=labels)
    if read is None or read.devices is None:
        return []
    return read.devices.to_dicts()


def test_a_page_of_dcgm_is_a_row_a_device_in_our_units() -> None:
    read = read_exposition(dcgm(), at(0), PROFILES, instance="dcgm:9400")
    assert read is not None
    assert (read.engine, read.samples.height) == (DEVICES, 0)
    first, second = rows(dcgm())
    assert (first["device"], second["device"]) == ("GPU-0", "GPU-1")
    assert first == dict.fromkeys(GPU_SCHEMA) | {
        "instance": "dcgm:9400",
        "device": "GPU-0",
        "unix_ns": at(0),
        "source": "scrape",
        "host": "node-1",
        "model": "NVIDIA H100 80GB HBM3",
        "utilization_ratio": pytest.approx(0.87),
        "memory_used_bytes": 79_872 * 2**20,
        "memory_total_bytes": (79_872 + 1024 + 512) * 2**20,
        "power_w": 512.25,
        "energy_j": pytest.approx(15_347_724),
        "sm_clock_hz": 1.98e9,
        "memory_clock_hz": 2.619e9,
        "temperature_c": 61.0,
        "engine_active_ratio": 0.75,
        "sm_active_ratio": 0.5,
        "tensor_active_ratio": 0.125,
        "dram_active_ratio": 0.625,
        "pcie_sent_bytes_per_s": 2e9,
        "nvlink_received_bytes_per_s": 3e9,
        "throttle_reasons": 0,
        "xid": 0,
    }


def test_names_of_the_first_releases_mean_the_same() -> None:
    plain, owned = rows(OLD)
    assert (plain["device"], plain["utilization_ratio"], plain["memory_used_bytes"]) == ("GPU-old", 0.5, 2**30)
    assert (plain["sm_clock_hz"], plain["power_w"]) == (1.38e9, None)
    assert (owned["instance"], owned["container"], owned["power_w"]) == ("ml/train-0", "c", 7.5)


def test_the_pod_that_has_a_device_names_its_row_and_the_exporters_own_pod_does_not() -> None:
    (row,) = rows(dcgm((0,), ',container="engine",namespace="inference",pod="vllm-0"'))
    assert (row["instance"], row["namespace"], row["pod"]) == ("inference/vllm-0", "inference", "vllm-0")
    scraped = ',container="exporter",namespace="gpu",pod="nvidia-dcgm-exporter-x1",exported_pod="vllm-1",exported_namespace="inference"'
    assert rows(dcgm((0,), scraped))[0]["instance"] == "inference/vllm-1"
    idle = ',container="nvidia-dcgm-exporter",namespace="gpu",pod="nvidia-dcgm-exporter-x1"'
    assert (rows(dcgm((0,), idle))[0]["instance"], rows(dcgm((0,), idle))[0]["pod"]) == ("dcgm:9400", None)
    assert rows(dcgm((0,), ',container="",namespace="",pod=""'))[0]["instance"] == "dcgm:9400"


def test_pods_that_share_a_device_have_a_row_each_and_slices_are_devices() -> None:
    shared = "".join(
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-0",namespace="a",pod="{pod}"}} 50\n' for pod in ("x", "y")
    )
    assert [(row["instance"], row["device"]) for row in rows(shared)] == [("a/x", "GPU-0"), ("a/y", "GPU-0")]
    sliced = "".join(
        f'DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="GPU-0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="{part}"}} 0.{part}\n'
        for part in (3, 7)
    )
    assert [(row["device"], row["sm_active_ratio"]) for row in rows(sliced)] == [("GPU-0/3", 0.3), ("GPU-0/7", 0.7)]


@pytest.mark.parametrize("blank", ["9223372036854775794", "2147483633", "140737488355330", "NaN", "+Inf"])
def test_what_a_device_does_not_tell_is_unknown(blank: str) -> None:
    text = (
        f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-0"}} {blank}\nDCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="GPU-0"}} 7.5\n'
    )
    (row,) = rows(text)
    assert (row["temperature_c"], row["power_w"], row["xid"]) == (None, 7.5, None)
    (row,) = rows('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0"} 250\n')
    assert row["utilization_ratio"] is None


def test_counted_events_are_codes_and_reasons() -> None:
    text = """
DCGM_EXP_XID_ERRORS_COUNT{gpu="0",UUID="GPU-0",window_size_in_ms="300000",xid="79"} 2
DCGM_EXP_CLOCK_EVENTS_COUNT{gpu="0",UUID="GPU-0",clock_event="hw_thermal",window_size_in_ms="300000"} 3
DCGM_EXP_CLOCK_EVENTS_COUNT{gpu="0",UUID="GPU-0",clock_event="power_cap",window_size_in_ms="300000"} 1
DCGM_EXP_CLOCK_EVENTS_COUNT{gpu="0",UUID="GPU-0",clock_event="sync_boost",window_size_in_ms="300000"} 0
"""
    (row,) = rows(text)
    assert row["xid"] == 79
    assert throttle_words(row["throttle_reasons"]) == ["power_cap", "hw_thermal"]
    assert throttle_words(0x1) == []  # an idle device is not throttled
    assert len(set(THROTTLE_BITS.values())) == len(THROTTLE_BITS)


def test_an_engine_that_tells_of_its_device_has_both() -> None:
    read = read_exposition(
        'nv_inference_request_success{model="m"} 4\nnv_gpu_utilization{gpu_uuid="GPU-7"} 0.25\n'
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-7"} 1024\n',
        at(0),
        PROFILES,
        instance="triton:8002",
    )
    assert read is not None and read.devices is not None
    assert read.engine == "triton"
    (row,) = read.devices.to_dicts()
    assert (row["instance"], row["device"], row["utilization_ratio"]) == ("triton:8002", "GPU-7", 0.25)


def test_without_a_uuid_the_host_and_the_number_tell_devices_apart() -> None:
    text = 'DCGM_FI_DEV_GPU_UTIL{gpu="1"} 10\n'
    assert rows(text, labels={"k8s.node.name": "node-9"})[0]["device"] == "node-9/1"
    assert rows(text)[0]["device"] == "gpu-1"
    assert rows("DCGM_FI_DEV_GPU_UTIL 10\n") == []


@pytest.mark.parametrize("code", ["²", "9" * 400, "", "-3", "nan"])
def test_an_error_without_a_code_is_unknown_and_not_none(code: str) -> None:
    labels = f'gpu="0",UUID="GPU-0",xid="{code}"'
    (row,) = rows(f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 40\nDCGM_EXP_XID_ERRORS_COUNT{{{labels}}} 2\n")
    assert row["xid"] is None
    (row,) = rows(f"DCGM_EXP_XID_ERRORS_COUNT{{{labels}}} 0\n")
    assert row["xid"] == 0


def test_the_power_of_other_hardware_is_no_device() -> None:
    assert device_rows([("hw.power", {"hw.id": "psu-1"}, 800.0)], at(0), "i", "otlp").is_empty()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*GAUGES, "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_CLOCK_EVENTS_COUNT"]),
            st.dictionaries(st.sampled_from(["gpu", "UUID", "pod", "namespace", "xid", "clock_event", "Hostname"]), st.text(max_size=4)),
            st.floats(),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_ratios_stay_ratios_and_nothing_breaks(points: list[tuple[str, dict[str, str], float]]) -> None:
    found = device_rows(points, at(0), "i", "scrape")
    for name in (name for name in GPU_SCHEMA if name.endswith("_ratio")):
        assert all(0 <= value <= 1 for value in found[name].drop_nulls())
    assert found["device"].null_count() == 0
