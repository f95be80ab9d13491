"""Pages of device exporters, in the shape their releases write, with figures of our own."""

from __future__ import annotations

LABELS = 'gpu="{n}",UUID="GPU-{n}",pci_bus_id="00000000:0{n}:00.0",device="nvidia{n}",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1"'


def dcgm(
    numbers: tuple[int, ...] = (0, 1), workload: str = "", *, xid: int = 0, reasons: int = 0, util: int = 87
) -> str:
    """dcgm-exporter 3 and 4 with the profiling fields; workload: the labels that it adds on Kubernetes."""
    values = {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 2619,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_POWER_USAGE": 512.25,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 15_347_724_000,
        "DCGM_FI_DEV_GPU_UTIL": util,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 40,
        "DCGM_FI_DEV_XID_ERRORS": xid,
        "DCGM_FI_DEV_FB_FREE": 1024,
        "DCGM_FI_DEV_FB_USED": 79_872,
        "DCGM_FI_DEV_FB_RESERVED": 512,
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 450_000,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": reasons,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.75,
        "DCGM_FI_PROF_SM_ACTIVE": 0.5,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.125,
        "DCGM_FI_PROF_DRAM_ACTIVE": 0.625,
        "DCGM_FI_PROF_PCIE_TX_BYTES": 2_000_000_000,
        "DCGM_FI_PROF_NVLINK_RX_BYTES": 3_000_000_000,
    }
    lines = []
    for name, value in values.items():
        lines += [f"# HELP {name} What it is.", f"# TYPE {name} gauge"]
        lines += [f"{name}{{{LABELS.format(n=number)}{workload}}} {value}" for number in numbers]
    return "\n".join(lines) + "\n"


OLD = """
dcgm_gpu_utilization{gpu="0",uuid="GPU-old"} 50
dcgm_fb_used{gpu="0",uuid="GPU-old"} 1024
dcgm_sm_clock{gpu="0",uuid="GPU-old"} 1380
dcgm_power_usage{gpu="0",uuid="GPU-old",pod_name="train-0",pod_namespace="ml",container_name="c"} 7.5
"""
