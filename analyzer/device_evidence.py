"""What the devices of a window's engines show, as observations beside the verdict.

They are context: how busy a pipe was says whether the device computed or read, and over a whole window not for which requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.devices import Devices
from phasewise.analyzer.evidence import Evidence

DEVICE = "device readings"
# Reasons for a lower clock that nobody wants; the power cap is in force on any device under full load.
UNWANTED = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")


def device_evidence(devices: Devices) -> list[Evidence]:
    """At most four observations, over all these devices."""
    return [*_activity(devices), *_trouble(devices)]


def _activity(devices: Devices) -> Iterator[Evidence]:
    for column, name, expected in (
        ("tensor_active_ratio", "tensor pipes active, share of the time", "near 1 where computing is the limit"),
        ("dram_active_ratio", "device memory active, share of the time", "near 1 where reading memory is the limit"),
    ):
        told = [float(one[column]) for one in devices if one[column] is not None]
        if told:
            yield Evidence(name, sum(told) / len(told), expected, "ratio", DEVICE)


def _trouble(devices: Devices) -> Iterator[Evidence]:
    reasons = {reason for one in devices for reason in one["throttle_reasons"] or () if reason in UNWANTED}
    if reasons:
        yield Evidence("a device ran at a lower clock because of", ", ".join(sorted(reasons)), "nothing", "", DEVICE)
    errors = {f"XID {one['xid']} on {one['device']}" for one in devices if one["xid"]}
    if errors:
        yield Evidence("errors of a device", ", ".join(sorted(errors)[:3]), "none", "", DEVICE)
