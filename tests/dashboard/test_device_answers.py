"""Devices in the answers of the API: data health, its problems, and the evidence of a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from builders import SECOND_NS, START_UNIX_NS, record_table
from stocked import Served

from phasewise.collector.records import GpuSample
from phasewise.dashboard.data_health import problems
from phasewise.dashboard.state import View

WINDOW = {"from": str(START_UNIX_NS), "to": str(START_UNIX_NS + 600 * SECOND_NS)}


def with_devices(served: Served, **fields: Any) -> Served:
    readings = [
        GpuSample(instance="gpu-0", device="GPU-0", unix_ns=START_UNIX_NS + at * SECOND_NS, host="node-1", **fields)
        for at in range(10, 20)
    ]
    with served.store.write() as transaction:
        transaction.insert("gpu_samples", record_table(GpuSample, readings))
    return served


def test_data_health_names_each_device_and_whose_it_is(serve: Callable[..., Served]) -> None:
    served = with_devices(serve(), dram_active_ratio=0.75, throttle_reasons=0x24, xid=79)
    told = served.client.get("/api/v1/data-health", params=WINDOW).json()
    (device,) = told["devices"]
    assert (device["device"], device["readings_n"], device["dram_active_ratio"]) == ("GPU-0", 10, 0.75)
    assert (device["engines"], device["joined_by"]) == (["gpu-0"], "resource")
    assert (device["throttle_reasons"], device["xid"]) == (["power_cap", "sw_thermal"], 79)
    view = View("api", None, tuple(WINDOW.items()))
    titles = [title for title, _ in problems(served.app.state.answers, view)]
    assert "GPU-0 of node-1 reports XID 79" in titles


def test_a_discovery_that_fails_is_a_problem(serve: Callable[..., Served]) -> None:
    served = serve()
    served.writer.watch_also(lambda: [{"job": "k", "kind": "kubernetes", "targets": 0, "problem": "no answer"}])
    view = View("api", None, tuple(WINDOW.items()))
    assert ("Targets of k (kubernetes)", "no answer") in problems(served.app.state.answers, view)


def test_scrapes_that_fail_are_problems_and_the_first_are_named(serve: Callable[..., Served]) -> None:
    served = serve()
    good = {"instance": "e-0", "up": True, "last_error": "", "not_stored": ""}
    lost = good | {"instance": "e-1", "not_stored": "no space"}
    failing = [good | {"instance": f"f-{n}", "up": False, "last_error": "refused"} for n in range(5)]
    source = {"job": "k", "kind": "static", "targets": 300, "left_out": 44, "problem": ""}
    served.writer.watch(lambda: [good, lost, *failing], lambda: [source])
    view = View("api", None, tuple(WINDOW.items()))
    told = problems(served.app.state.answers, view)
    assert ("Scraping f-0 fails", "Refused. Samples of that time are missing.") in told
    titles = [title for title, _ in told]
    assert (
        "Scraping e-1 is not stored" in titles
        and "Scraping 2 more targets fails" in titles
        and "44 targets of k are not scraped" in titles
    )
    assert not [title for title in titles if "e-0" in title]


def test_a_verdict_shows_what_the_devices_of_its_engines_did(serve: Callable[..., Served]) -> None:
    before = serve().client.get("/api/v1/verdict", params=WINDOW).json()
    served = with_devices(serve(), dram_active_ratio=0.75, throttle_reasons=0x20)
    after = served.client.get("/api/v1/verdict", params=WINDOW).json()
    shown = {
        row["name"]: (row["observed"], row["says"]) for row in after["evidence"] if row["source"] == "device readings"
    }
    assert shown == {
        "device memory active, share of the time": (0.75, "context"),
        "a device ran at a lower clock because of": ("sw_thermal", "context"),
    }
    assert not [row for row in before["evidence"] if row["source"] == "device readings"]
    assert after["primary"] == before["primary"]
