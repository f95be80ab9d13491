"""Answers of real clusters, as public repositories keep them: what they hold besides what we need, and leave out.

Written anew with an engine's facts in the shape that was recorded. Read 2026-11-30: VictoriaMetrics @eba0e6db and @0ad887fd
lib/promscrape/discovery/kubernetes/{endpointslice,pod}_test.go
"""

from __future__ import annotations

from typing import Any

import pytest
from local_http import answering

from phasewise.collector.scraping.jobs import Access, Job, read_jobs
from phasewise.collector.scraping.kubernetes_api import Cluster, Collection
from phasewise.collector.scraping.kubernetes_objects import endpoints_of

pytestmark = pytest.mark.live


def managed(manager: str) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {
        "f:addressType": {},
        "f:endpoints": {},
        "f:metadata": {"f:labels": {".": {}}},
        "f:ports": {},
    }
    one = {"manager": manager, "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields}
    return [{**one, "apiVersion": "discovery.k8s.io/v1", "time": "2026-11-29T14:27:22Z"}]


def slices() -> dict[str, Any]:
    """Items of a list tell no kind. The API's own slice has no pod; that of a service names the node as v1beta1 did."""
    own = {
        "metadata": {
            "name": "kubernetes",
            "namespace": "default",
            "uid": "a60d9173-5fe4-4bc3-87a6-269daee71f8a",
            "resourceVersion": "159",
            "generation": 1,
            "labels": {"kubernetes.io/service-name": "kubernetes"},
            "managedFields": managed("kube-apiserver"),
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["172.18.0.2"], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "protocol": "TCP", "port": 6443}],
    }
    engine = {
        "metadata": {
            "name": "vllm-22mvb",
            "generateName": "vllm-",
            "namespace": "default",
            "uid": "7c95c854-f34c-48e1-86f5-bb8269113c11",
            "resourceVersion": "604",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "vllm",
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-29T14:28:35Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "vllm", "controller": True}],
            "managedFields": managed("kube-controller-manager"),
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["10.244.0.3"],
                "conditions": {"ready": True},
                "targetRef": {
                    "kind": "Pod",
                    "namespace": "default",
                    "name": "vllm-66bff467f8-z8czk",
                    "uid": "36a545ff-dbba-4192-a5f6-1dbb0c21c73d",
                    "resourceVersion": "603",
                },
                "topology": {"kubernetes.io/hostname": "kind-control-plane"},
            }
        ],
        "ports": [{"name": "metrics", "protocol": "TCP", "port": 9153}, {"name": "dns", "protocol": "UDP", "port": 53}],
    }
    emptied = {
        "metadata": {"name": "scaled-down-x2x2x", "namespace": "default", "uid": "u", "labels": {}},
        "addressType": "IPv4",
        "endpoints": None,
        "ports": None,
    }
    return {
        "kind": "EndpointSliceList",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"selfLink": "/apis/discovery.k8s.io/v1/endpointslices", "resourceVersion": "1177"},
        "items": [own, engine, emptied],
    }


def pods() -> dict[str, Any]:
    """A pod of the host's network with a port, as a node's kubelet reports it: null probe times, a container that ended before."""
    pod = {
        "metadata": {
            "name": "vllm-m01",
            "namespace": "default",
            "selfLink": "/api/v1/namespaces/default/pods/vllm-m01",
            "uid": "9d328156-75d1-411a-bdd0-aeacb53a38de",
            "resourceVersion": "22318",
            "creationTimestamp": "2026-11-16T20:44:30Z",
            "labels": {"component": "vllm", "tier": "inference"},
            "annotations": {"kubernetes.io/config.seen": "2026-11-16T20:44:26.538136233Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "m01", "controller": True}],
        },
        "spec": {
            "volumes": [{"name": "models", "hostPath": {"path": "/models", "type": "DirectoryOrCreate"}}],
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm/vllm-openai:v0.33.0",
                    "command": ["vllm", "serve", "--port=8000"],
                    "resources": {},
                    "ports": [{"name": "http", "containerPort": 8000, "hostPort": 8000, "protocol": "TCP"}],
                    "livenessProbe": {"httpGet": {"path": "/health", "port": 8000, "scheme": "HTTP"}},
                }
            ],
            "nodeName": "m01",
            "hostNetwork": True,
            "securityContext": {},
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}],
            "hostIP": "172.17.0.2",
            "podIP": "172.17.0.2",
            "podIPs": [{"ip": "172.17.0.2"}],
            "containerStatuses": [
                {"name": "vllm", "lastState": {"terminated": {"exitCode": 0}}, "ready": True, "restartCount": 2}
            ],
            "qosClass": "BestEffort",
        },
    }
    listed = {"selfLink": "/api/v1/pods", "resourceVersion": "72425"}
    return {"kind": "PodList", "apiVersion": "v1", "metadata": listed, "items": [pod]}


def job_of(role: str) -> Job:
    (job,) = read_jobs("test", [{"job": "vllm", "kubernetes": {"role": role, "namespaces": ["default"]}}])
    return job


@pytest.mark.parametrize(
    ("role", "path", "answer", "version", "expected"),
    [
        (
            "endpointslice",
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
            slices(),
            "1177",
            {
                "http://10.244.0.3:9153/metrics": (
                    "default/vllm-66bff467f8-z8czk",
                    {
                        "k8s.namespace.name": "default",
                        "k8s.service.name": "vllm",
                        "k8s.node.name": "kind-control-plane",
                        "k8s.pod.name": "vllm-66bff467f8-z8czk",
                        "k8s.pod.uid": "36a545ff-dbba-4192-a5f6-1dbb0c21c73d",
                    },
                ),
                "http://172.18.0.2:6443/metrics": (
                    "172.18.0.2:6443",
                    {"k8s.namespace.name": "default", "k8s.service.name": "kubernetes"},
                ),
            },
        ),
        (
            "pod",
            "/api/v1/namespaces/default/pods",
            pods(),
            "72425",
            {
                "http://172.17.0.2:8000/metrics": (
                    "default/vllm-m01",
                    {
                        "k8s.namespace.name": "default",
                        "k8s.node.name": "m01",
                        "k8s.pod.name": "vllm-m01",
                        "k8s.pod.uid": "9d328156-75d1-411a-bdd0-aeacb53a38de",
                        "k8s.container.name": "vllm",
                        "k8s.pod.label.component": "vllm",
                        "k8s.pod.label.tier": "inference",
                        "k8s.pod.annotation.kubernetes.io/config.seen": "2026-11-16T20:44:26.538136233Z",
                    },
                )
            },
        ),
    ],
    ids=["slices", "pods"],
)
def test_a_list_of_a_real_cluster_gives_its_targets(
    role: str, path: str, answer: dict[str, Any], version: str, expected: dict[str, tuple[str, dict[str, str]]]
) -> None:
    job = job_of(role)
    assert job.kubernetes is not None
    with answering(
        lambda asked, _: (200, answer) if asked == path else (404, {"kind": "Status", "code": 404})
    ) as server:
        collection = Collection(Cluster(server.url, Access(), ("default",)), "default", job.kubernetes, 1.0)
        objects, from_version = collection.listed()
        collection.close()
    found, problem = endpoints_of(objects, job)
    assert (from_version, problem) == (version, "")
    assert {one.url: (one.instance, dict(one.labels)) for one in found} == expected
