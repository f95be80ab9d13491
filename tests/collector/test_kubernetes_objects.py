"""Pods and EndpointSlices to addresses: which port, which name, which labels, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes_server import pod

from phasewise.collector.scraping.jobs import Endpoint, Job, read_jobs
from phasewise.collector.scraping.kubernetes_objects import endpoints_of


def job_of(**kubernetes: Any) -> Job:
    (job,) = read_jobs("test", [{"job": "vllm", "labels": {"team": "chat"}, "kubernetes": kubernetes}])
    return job


def urls(found: list[Endpoint]) -> list[str]:
    return [one.url for one in found]


def test_a_pod_with_one_port_is_a_target_named_as_its_spans_are() -> None:
    found, problem = endpoints_of([pod("vllm-0", labels={"app": "vllm", "pod-template-hash": "7d9"})], job_of())
    assert problem == ""
    assert urls(found) == ["http://10.0.0.1:8000/metrics"]
    assert found[0].instance == "inference/vllm-0"
    assert dict(found[0].labels) == {
        "team": "chat",
        "k8s.namespace.name": "inference",
        "k8s.pod.name": "vllm-0",
        "k8s.pod.uid": "uid-vllm-0",
        "k8s.node.name": "node-1",
        "k8s.container.name": "engine",
        "k8s.pod.label.app": "vllm",
        "k8s.pod.label.pod-template-hash": "7d9",
    }


PORTS = [
    {"name": "http", "containerPort": 8000},
    {"name": "metrics", "containerPort": 9090},
    {"name": "dns", "containerPort": 53, "protocol": "UDP"},
]


@pytest.mark.parametrize(
    ("told", "annotations", "url"),
    [
        ({}, {}, "http://10.0.0.1:9090/metrics"),
        ({"port": "http"}, {}, "http://10.0.0.1:8000/metrics"),
        ({"port": 7000}, {}, "http://10.0.0.1:7000/metrics"),
        ({}, {"prometheus.io/port": "8081", "prometheus.io/path": "/m"}, "http://10.0.0.1:8081/m"),
        ({}, {"prometheus.io/port": "http", "prometheus.io/scheme": "https"}, "https://10.0.0.1:8000/metrics"),
        ({"port": "http"}, {"prometheus.io/port": "1"}, "http://10.0.0.1:8000/metrics"),
    ],
)
def test_the_port_is_that_of_the_job_else_of_the_annotation_else_the_metrics_port(
    told: dict[str, Any], annotations: dict[str, str], url: str
) -> None:
    found, problem = endpoints_of([pod("a", ports=PORTS, annotations=annotations)], job_of(**told))
    assert (urls(found), problem) == ([url], "")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"ports": [{"name": "a", "containerPort": 1}, {"name": "b", "containerPort": 2}]}, "which port is meant"),
        ({"ports": []}, "declares none"),
        ({"annotations": {"prometheus.io/port": "grpc"}}, "no container has a port named 'grpc'"),
        ({"annotations": {"prometheus.io/scheme": "file"}}, "neither http nor https"),
        ({"annotations": {"prometheus.io/path": "@evil.example/"}}, "no path"),
    ],
)
def test_a_pod_that_cannot_be_scraped_says_why_and_hides_no_other(parts: dict[str, Any], said: str) -> None:
    found, problem = endpoints_of([pod("bad", **parts), pod("good", "10.0.0.2")], job_of())
    assert urls(found) == ["http://10.0.0.2:8000/metrics"]
    assert problem.startswith("inference/bad: ")
    assert said in problem


def test_pods_that_do_not_run_or_do_not_want_to_are_no_targets() -> None:
    left_out = [
        pod("pending", None, phase="Pending"),
        pod("done", phase="Succeeded"),
        pod("going", deleted=True),
        pod("refused", annotations={"prometheus.io/scrape": "false"}),
        pod("odd", "metadata.google.internal"),
    ]
    assert endpoints_of(left_out, job_of()) == ([], "")
    asked = pod("asked", annotations={"prometheus.io/scrape": "true"})
    assert [one.instance for one in endpoints_of([pod("silent"), asked], job_of(annotated=True))[0]] == [
        "inference/asked"
    ]


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert urls(endpoints_of([pod("a", "fd00::12")], job_of())[0]) == ["http://[fd00::12]:8000/metrics"]


def test_slices_give_their_ready_endpoints_with_the_pods_behind_them() -> None:
    found, problem = endpoints_of(
        [
            {
                "metadata": {
                    "name": "vllm-abc12",
                    "namespace": "inference",
                    "uid": "s1",
                    "labels": {"kubernetes.io/service-name": "vllm"},
                },
                "addressType": "IPv4",
                "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
                "endpoints": [
                    {
                        "addresses": ["10.0.0.1"],
                        "conditions": {"ready": True, "serving": True},
                        "nodeName": "node-1",
                        "targetRef": {"kind": "Pod", "name": "vllm-0", "namespace": "inference", "uid": "u0"},
                    },
                    {"addresses": ["10.0.0.2"], "conditions": {"ready": False, "serving": False}},
                    {"addresses": ["10.0.0.3"], "conditions": {}},
                ],
            }
        ],
        job_of(role="endpointslice"),
    )
    assert problem == ""
    assert [(one.instance, one.url) for one in found] == [
        ("10.0.0.3:8000", "http://10.0.0.3:8000/metrics"),
        ("inference/vllm-0", "http://10.0.0.1:8000/metrics"),
    ]
    assert found[1].labels["k8s.service.name"] == "vllm"
    assert found[1].labels["k8s.pod.uid"] == "u0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["metadata", "spec", "status", "containers", "ports", "annotations", "podIP", "containerPort", "name", "endpoints"]
    ), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # speaks of the machine's load, not of the code
@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status", "endpoints", "ports"]), JSON))
def test_no_object_of_any_shape_breaks_the_reading(found: dict[str, Any]) -> None:
    for role in ("pod", "endpointslice"):
        endpoints, _ = endpoints_of([found], job_of(role=role))
        assert all(one.url.startswith("http") for one in endpoints)
