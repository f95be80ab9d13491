"""Pods and EndpointSlices, as the Kubernetes API answers them, to addresses to scrape. Pure: objects in, endpoints out.

An address comes from the cluster, and only from it: an IP number, a port, a path of the same host; annotations cannot lead
elsewhere. Which pods count: those that run and have an address; `prometheus.io/scrape: "false"` leaves one out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phasewise.collector.scraping.jobs import Endpoint, Job, Kubernetes, bounded

SCRAPE, PORT, PATH, SCHEME = (f"prometheus.io/{name}" for name in ("scrape", "port", "path", "scheme"))
_METRIC_PORTS = ("metrics", "http-metrics", "prometheus")
_LONGEST_ANNOTATION = 128  # longer ones are settings of controllers, not names
Object = Mapping[str, Any]


def key_of(found: Object) -> str:
    """What an object is known by as it changes: its uid, which a successor of the same name does not have."""
    metadata = _mapping(found.get("metadata"))
    return str(metadata.get("uid") or f"{metadata.get('namespace')}/{metadata.get('name')}")


def version_of(found: Object) -> str:
    """What a watch goes on from after this object; "" where it does not say."""
    return str(_mapping(found.get("metadata")).get("resourceVersion") or "")


def endpoints_of(objects: Iterable[Object], job: Job) -> tuple[list[Endpoint], str]:
    """Addresses of all objects, in order of their names, each once; and what the first object that gives none lacks."""
    assert job.kubernetes is not None
    read = _of_pod if job.kubernetes.role == "pod" else _of_slice
    found: dict[str, Endpoint] = {}
    problem = ""
    for one in objects:
        try:
            for endpoint in read(one, job, job.kubernetes):
                found.setdefault(endpoint.url, endpoint)
        except _Unusable as error:
            problem = problem or f"{key_name(one)}: {error}"
    return sorted(found.values(), key=lambda one: (one.instance, one.url)), problem


def key_name(found: Object) -> str:
    metadata = _mapping(found.get("metadata"))
    return f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"


class _Unusable(Exception):
    """A pod that is meant, and cannot be scraped: why."""


def _of_pod(pod: Object, job: Job, wanted: Kubernetes) -> Iterator[Endpoint]:
    metadata, spec, status = (_mapping(pod.get(part)) for part in ("metadata", "spec", "status"))
    annotations = _texts(metadata.get("annotations"))
    said = annotations.get(SCRAPE, "").lower()
    if said == "false" or (wanted.annotated and said != "true"):
        return
    address = _address(status.get("podIP"))
    if status.get("phase") != "Running" or metadata.get("deletionTimestamp") or address is None:
        return
    containers = [_mapping(one) for one in _items(spec.get("containers"))]
    ports = [(_mapping(port), container) for container in containers for port in _items(container.get("ports"))]
    tcp = [(port, container) for port, container in ports if port.get("protocol", "TCP") == "TCP"]
    for number, container in _chosen(tcp, wanted, annotations):
        labels = _pod_labels(metadata, spec, annotations, container)
        yield _endpoint(address, number, annotations, job, labels, _pod_name(metadata))


def _chosen(
    ports: list[tuple[Object, Object]], wanted: Kubernetes, annotations: Mapping[str, str]
) -> list[tuple[int, Object]]:
    """The ports meant: by the job, else by the annotation, else the one named for metrics, else the only one."""
    told: str | int | None = wanted.port if wanted.port is not None else annotations.get(PORT)
    if told is None:
        named = [pair for pair in ports if pair[0].get("name") in _METRIC_PORTS]
        meant = named[:1] or ports
        if len(meant) != 1:
            names = ", ".join(str(port.get("name") or port.get("containerPort")) for port, _ in ports)
            raise _Unusable(f"which port is meant? ({names or 'it declares none'}: give port, or {PORT})")
        return [(number, container) for port, container in meant if (number := _port(port.get("containerPort")))]
    if (number := _port(told)) is not None:  # a port need not be declared to be open
        owner = next((container for port, container in ports if port.get("containerPort") == number), {})
        return [(number, owner)]
    found = [(_port(port.get("containerPort")), container) for port, container in ports if port.get("name") == told]
    if not found:
        raise _Unusable(f"no container has a port named {told!r}")
    return [(number, container) for number, container in found if number]


def _pod_name(metadata: Object) -> str:
    """As spans of this pod are named where they name no instance (identity.instance_of)."""
    return f"{metadata.get('namespace', 'default')}/{metadata.get('name')}"


def _pod_labels(metadata: Object, spec: Object, annotations: Mapping[str, str], container: Object) -> dict[str, str]:
    found = {
        "k8s.namespace.name": metadata.get("namespace"),
        "k8s.pod.name": metadata.get("name"),
        "k8s.pod.uid": metadata.get("uid"),
        "k8s.node.name": spec.get("nodeName"),
        "k8s.container.name": container.get("name"),
    }
    labels = {key: value for key, value in found.items() if isinstance(value, str) and value}
    labels |= {f"k8s.pod.label.{key}": value for key, value in _texts(metadata.get("labels")).items()}
    short = {key: value for key, value in annotations.items() if len(value) <= _LONGEST_ANNOTATION}
    return labels | {f"k8s.pod.annotation.{key}": value for key, value in short.items()}


def _of_slice(found: Object, job: Job, wanted: Kubernetes) -> Iterator[Endpoint]:
    metadata = _mapping(found.get("metadata"))
    annotations = _texts(metadata.get("annotations"))
    said = annotations.get(SCRAPE, "").lower()
    if said == "false" or (wanted.annotated and said != "true"):
        return
    ports = [_mapping(port) for port in _items(found.get("ports"))]
    pairs: list[tuple[Object, Object]] = [
        ({"name": port.get("name"), "containerPort": port.get("port")}, {})
        for port in ports
        if port.get("protocol", "TCP") == "TCP"
    ]
    for endpoint in (_mapping(one) for one in _items(found.get("endpoints"))):
        conditions = _mapping(endpoint.get("conditions"))
        if conditions.get("ready") is False and conditions.get("serving") is not True:
            continue
        pod = _mapping(endpoint.get("targetRef"))
        of_pod = pod.get("kind") == "Pod"
        known = {
            "k8s.namespace.name": metadata.get("namespace"),
            "k8s.service.name": _texts(metadata.get("labels")).get("kubernetes.io/service-name"),
            "k8s.node.name": endpoint.get("nodeName") or _old_node(endpoint),
            "k8s.pod.name": pod.get("name") if of_pod else None,
            "k8s.pod.uid": pod.get("uid") if of_pod else None,
        }
        labels = {key: value for key, value in known.items() if isinstance(value, str) and value}
        for address in (_address(one) for one in _items(endpoint.get("addresses"))[:1]):  # the rest are the same pod
            if address is not None:
                name = f"{metadata.get('namespace', 'default')}/{pod.get('name')}" if of_pod else ""
                for number, _ in _chosen(pairs, wanted, annotations):
                    yield _endpoint(address, number, annotations, job, labels, name)


def _old_node(endpoint: Object) -> object:
    """The node as slices of the API's v1beta1 name it; v1 shows what was written through that as deprecatedTopology."""
    topology = _mapping(endpoint.get("deprecatedTopology") or endpoint.get("topology"))
    return topology.get("kubernetes.io/hostname")


def _endpoint(
    address: str, port: int, annotations: Mapping[str, str], job: Job, labels: Mapping[str, str], name: str
) -> Endpoint:
    host = f"[{address}]" if ":" in address else address
    scheme, path = annotations.get(SCHEME, job.scheme), annotations.get(PATH, job.path)
    if scheme not in ("http", "https"):
        raise _Unusable(f"{SCHEME} is {scheme!r}, neither http nor https")
    if not path.startswith("/") or any(sign in path for sign in "\\\r\n\t #"):
        raise _Unusable(f"{PATH} is {path!r}, no path")
    return Endpoint(f"{scheme}://{host}:{port}{path}", name or f"{host}:{port}", bounded({**job.labels, **labels}))


def _address(value: object) -> str | None:
    try:
        return str(ipaddress.ip_address(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def _port(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536 else None


def _mapping(value: object) -> Object:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: object) -> dict[str, str]:
    return {str(key): text for key, text in _mapping(value).items() if isinstance(text, str)}
