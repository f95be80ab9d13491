"""Which engine has which device, and how it went over a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import SECOND_NS, START_UNIX_NS, make_instance, record_table

from phasewise.analyzer.device_evidence import device_evidence
from phasewise.analyzer.devices import devices_in, devices_of
from phasewise.analyzer.window import Window
from phasewise.collector.records import GpuSample, Instance, Place
from phasewise.collector.store import Store

WINDOW = Window(START_UNIX_NS, START_UNIX_NS + 60 * SECOND_NS)


def reading(at_s: float, instance: str = "dcgm", device: str = "GPU-0", **fields: Any) -> GpuSample:
    return GpuSample(instance=instance, device=device, unix_ns=START_UNIX_NS + round(at_s * SECOND_NS), **fields)


def asked(
    path: Path, readings: list[GpuSample], places: list[Place], *names: str, **joined: str
) -> list[dict[str, Any]]:
    engines = [make_instance(instance=name, kind="spans", joined_to=None) for name in names]
    engines += [make_instance(instance=scrape, kind="scrape", joined_to=spans) for scrape, spans in joined.items()]
    store = Store(path / "test.duckdb")
    try:
        with store.write() as transaction:
            transaction.insert("gpu_samples", record_table(GpuSample, readings))
            transaction.insert("places", record_table(Place, places))
            transaction.insert("instances", record_table(Instance, engines))
        return devices_in(store, WINDOW)
    finally:
        store.close()


def test_means_largest_values_and_every_reason(tmp_path: Path) -> None:
    readings = [
        reading(-1, utilization_ratio=0.0),
        reading(1, utilization_ratio=0.5, temperature_c=60.0, throttle_reasons=0x1, xid=0),
        reading(2, utilization_ratio=1.0, temperature_c=70.0, throttle_reasons=0x44, xid=79),
        reading(3, device="GPU-1"),
    ]
    first, second = asked(tmp_path, readings, [], "e-0")
    assert (first["readings_n"], first["utilization_ratio"], first["temperature_c"]) == (2, 0.75, 70.0)
    assert (first["throttle_reasons"], first["xid"]) == (["power_cap", "hw_thermal"], 79)
    assert (second["utilization_ratio"], second["throttle_reasons"], second["xid"]) == (None, None, None)
    assert (first["engines"], first["joined_by"]) == ([], None)


@pytest.mark.parametrize(
    ("found", "place", "engines", "by"),
    [
        (reading(1, "e-0"), None, ["e-0"], "resource"),
        (reading(1, "ns/p", namespace="ns", pod="p", host="n1"), Place(instance="e-0", namespace="ns", pod="p"), ["e-0"], "pod"),
        (reading(1, "ns/p", namespace="ns", pod="p", host="n1"), Place(instance="e-0", namespace="xx", pod="p"), [], None),
        (reading(1, "ns/q", namespace="ns", pod="q", host="n1"), Place(instance="e-0", node="n1", pod="p"), [], None),
        (reading(1, host="n1"), Place(instance="e-0", node="n1", pod="p"), ["e-0"], "host"),
        (reading(1, host="n1"), Place(instance="e-0", host="n2"), [], None),
    ],
)  # fmt: skip
def test_an_engine_has_the_device_of_its_pod_else_of_its_host(
    tmp_path: Path, found: GpuSample, place: Place | None, engines: list[str], by: str | None
) -> None:
    (told,) = asked(tmp_path, [found], [place] if place else [], "e-0", "e-1")
    assert (told["engines"], told["joined_by"]) == (engines, by)


def test_only_devices_that_are_surely_an_engines_speak_of_it() -> None:
    told: dict[str, Any] = {"throttle_reasons": ["power_cap", "hw_thermal"], "xid": 79, "tensor_active_ratio": 0.25}
    none = {"dram_active_ratio": None}
    own = told | none | {"device": "GPU-0", "engines": ["e-0"], "joined_by": "host"}
    shared = told | none | {"device": "GPU-1", "engines": ["e-0", "e-1"], "joined_by": "host"}
    other = told | none | {"device": "GPU-2", "engines": ["e-2"], "joined_by": "pod"}
    nobodys = told | none | {"device": "GPU-3", "engines": [], "joined_by": None}
    found = devices_of([own, shared, other, nobodys], ["e-0", "e-1"])
    assert [one["device"] for one in found] == ["GPU-0"]
    assert [(one.observed, one.row("bandwidth")["says"]) for one in device_evidence(found)] == [
        (0.25, "context"),
        ("hw_thermal", "context"),
        ("XID 79 on GPU-0", "context"),
    ]
    assert device_evidence([]) == []


def test_a_scrape_stands_for_the_spans_it_is_joined_to_and_a_shared_host_names_all(tmp_path: Path) -> None:
    places = [Place(instance="s", node="n1"), Place(instance="e-1", host="n1")]
    (told,) = asked(tmp_path, [reading(1, host="n1")], places, "e-0", "e-1", s="e-0")
    assert told["engines"] == ["e-0", "e-1"]
