"""Device readings in the store: from scrapes, files, Prometheus' answers and OTLP; each once, joined by place, errors marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from device_pages import dcgm
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from span_tables import at
from writing import Bench, bench, engine_span, rulebook

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.importers import import_bytes
from phasewise.collector.metric_scan import scan_metrics
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)
READINGS = "SELECT * FROM gpu_samples ORDER BY unix_ns, device"
MARKS = "SELECT unix_ns, kind, text FROM annotations ORDER BY unix_ns"


def scraped(text: str, moment_s: float, instance: str = "dcgm:9400", **labels: str) -> Exposition:
    read = read_exposition(text, at(moment_s), PROFILES, instance=instance, labels=labels)
    assert read is not None
    return read


def test_a_reading_is_stored_once(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        assert b.writer.add_samples([scraped(dcgm(), 0)]) == 2
        assert b.writer.add_samples([scraped(dcgm(), 0), scraped(dcgm(util=10), 1)]) == 2
        told = b.rows(READINGS)
        assert [(row["device"], round(row["utilization_ratio"], 2)) for row in told] == [
            ("GPU-0", 0.87),
            ("GPU-1", 0.87),
            ("GPU-0", 0.1),
            ("GPU-1", 0.1),
        ]
        assert b.counter("device_readings") == 4
        assert b.rows("SELECT * FROM engine_samples") == []


def test_an_error_is_marked_when_it_comes_and_not_while_it_stays(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for second, xid in enumerate([0, 79, 79, 0, 79, 13]):
            b.writer.add_samples([scraped(dcgm((0,), xid=xid), second)])
            b.reopen()  # what is known of before stands in the store
        assert [(row["unix_ns"], row["kind"], row["text"]) for row in b.rows(MARKS)] == [
            (at(1), "xid", "XID 79 on GPU-0 of node-1"),
            (at(4), "xid", "XID 79 on GPU-0 of node-1"),
            (at(5), "xid", "XID 13 on GPU-0 of node-1"),
        ]


def test_recorded_pages_and_answers_of_prometheus_carry_devices_too(tmp_path: Path) -> None:
    lines = "\n".join(
        json.dumps({"unix_ns": at(second), "text": dcgm((0,)), "instance": "n:9400", "job": "dcgm"})
        for second in (0, 1)
    )
    labels = {"job": "dcgm", "instance": "n:9400", "UUID": "GPU-0", "gpu": "0", "Hostname": "node-1"}
    matrix = {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {
                    "metric": {"__name__": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", **labels},
                    "values": [[at(10) / 1e9, "0.25"], [at(25) / 1e9, "0.5"]],
                },
                {"metric": {"__name__": "DCGM_FI_DEV_FB_USED", **labels}, "values": [[at(10) / 1e9, "1024"]]},
            ],
        },
    }
    with bench(tmp_path) as b:
        assert b.writer.add_import(import_bytes(lines.encode(), "pages", PROFILES))["samples"] == 2
        assert b.writer.add_import(import_bytes(json.dumps(matrix).encode(), "range", PROFILES))["samples"] == 2
        told = b.rows(READINGS)
        assert {row["instance"] for row in told} == {"dcgm/n:9400"}
        assert [(row["tensor_active_ratio"], row["memory_used_bytes"]) for row in told[2:]] == [
            (0.25, 2**30),
            (0.5, None),
        ]


def test_our_own_engines_readings_arrive_over_otlp(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    resource = Resource.create({"service.name": "engine", "service.instance.id": "e-1", "host.name": "node-3"})
    meter = MeterProvider([reader], resource=resource, shutdown_on_exit=False).get_meter("phasewise.engine")

    def told(value: float) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda _: [Observation(value, {"hw.id": "GPU-5"})]

    for name, value in (
        ("hw.gpu.utilization", 0.5),
        ("hw.gpu.memory.usage", 2.0**30),
        ("hw.power", 250.0),
        ("hw.gpu.clock", 1.98e9),
    ):
        meter.create_observable_gauge(name, [told(value)])
    data = reader.get_metrics_data()
    assert data is not None
    points = scan_metrics(encode_metrics(data).SerializeToString(), at(0)).rows
    with bench(tmp_path) as b:
        b.journal.append("metrics", points)
        b.journal.sync()
        b.run()
        (row,) = b.rows(READINGS)
        assert (row["instance"], row["device"], row["host"], row["source"]) == ("e-1", "GPU-5", "node-3", "otlp")
        assert (row["utilization_ratio"], row["power_w"], row["sm_clock_hz"]) == (0.5, 250.0, 1.98e9)
        assert b.counter("unmapped_metric_points") == 0


def places(b: Bench) -> dict[str, tuple[str | None, str | None]]:
    return {row["instance"]: (row["host"], row["pod"]) for row in b.rows("SELECT * FROM places")}


def test_spans_and_targets_say_where_they_run(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span(resource={"service.instance.id": "e-1", "host.name": "n1", "k8s.pod.name": "vllm-0"})])
        b.receive([engine_span(resource={"service.name": "quiet"})])
        b.run(5)
        page = scraped("vllm:num_requests_running 3\n", 1, "inference/vllm-7", **{"k8s.pod.name": "vllm-7"})
        b.writer.add_samples([page, page])
        assert places(b) == {"e-1": ("n1", "vllm-0"), "inference/vllm-7": (None, "vllm-7")}
        b.reopen()
        b.writer.add_samples([scraped("vllm:num_requests_running 3\n", 9, "inference/vllm-7", **{"k8s.pod.name": "x"})])
        assert places(b)["inference/vllm-7"] == (None, "x")
