"""The example manifests, as far as they can be checked without a cluster: they parse, fit each other and fit the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from shared_data import ROOT

from phasewise.collector.scraping.jobs import read_jobs
from phasewise.collector.scraping.kubernetes_api import _PATHS
from phasewise.dashboard.cli import parser
from phasewise.dashboard.commands.configuration import places, read_configuration

FILE = ROOT / "deploy" / "kubernetes" / "phasewise.yaml"
OBJECTS: dict[str, dict[str, Any]] = {found["kind"]: found for found in yaml.safe_load_all(FILE.read_text())}
DEPLOYMENT = OBJECTS["Deployment"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_every_object_has_a_kind_a_version_and_a_place() -> None:
    found = list(yaml.safe_load_all(FILE.read_text()))
    assert len(found) == len(OBJECTS) == 8
    for one in found:
        assert one["apiVersion"] and one["metadata"]["name"]
        assert one["metadata"]["namespace"] == ("inference" if one["kind"].startswith("Role") else "phasewise")


def test_the_role_lets_discovery_do_what_it_does_and_no_more() -> None:
    rules = OBJECTS["Role"]["rules"]
    allowed = {(group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    groups = {"/api/v1": "", "/apis/discovery.k8s.io/v1": "discovery.k8s.io"}
    assert allowed == {(groups[root], resource) for root, resource in _PATHS.values()}
    assert all(rule["verbs"] == ["get", "list", "watch"] for rule in rules)


def test_the_binding_gives_the_role_to_the_account_that_the_pod_runs_as() -> None:
    binding, account = OBJECTS["RoleBinding"], OBJECTS["ServiceAccount"]["metadata"]
    assert binding["roleRef"]["name"] == OBJECTS["Role"]["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert POD["serviceAccountName"] == account["name"]
    assert POD.get("automountServiceAccountToken", True)


def test_the_configuration_can_be_read_where_it_is_mounted(tmp_path: Path) -> None:
    text = OBJECTS["ConfigMap"]["data"]["phasewise.toml"]
    (mount,) = (one for one in CONTAINER["volumeMounts"] if one["name"] == "configuration")
    assert Path(mount["mountPath"]) / "phasewise.toml" in list(places({}, Path("/")))
    for shown in (text, text.replace("# [", "[").replace("# job", "job").replace("# interval", "interval")
                  .replace("# namespaces", "namespaces").replace("# selector", "selector")):  # fmt: skip
        (tmp_path / "phasewise.toml").write_text(shown)
        jobs = read_jobs("phasewise.toml", list(read_configuration([tmp_path / "phasewise.toml"]).scrape_jobs))
        for job in jobs:
            assert job.kubernetes is not None and job.kubernetes.namespaces and job.kubernetes.selector
    assert [job.name for job in jobs] == ["engines", "devices"]
    assert jobs[0].kubernetes is not None
    assert jobs[0].kubernetes.namespaces == (OBJECTS["Role"]["metadata"]["namespace"],)


def test_the_container_is_started_with_options_and_ports_that_exist() -> None:
    options = parser().parse_args(CONTAINER["args"])
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": options.port, "otlp-grpc": options.otlp_grpc_port, "otlp-http": options.otlp_http_port}
    assert {port["targetPort"] for port in OBJECTS["Service"]["spec"]["ports"]} <= set(ports)
    policy = OBJECTS["NetworkPolicy"]["spec"]
    assert {port["port"] for port in policy["ingress"][0]["ports"]} == {4317, 4318}


def test_probes_ask_addresses_that_answer() -> None:
    source = (ROOT / "dashboard" / "api.py").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert f'@app.get("{asked["path"]}")' in source
        assert asked["port"] == "http"


def test_selectors_choose_the_pod_and_it_may_do_little() -> None:
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    assert DEPLOYMENT["selector"]["matchLabels"] == labels == OBJECTS["Service"]["spec"]["selector"]
    assert OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert (DEPLOYMENT["replicas"], DEPLOYMENT["strategy"]["type"]) == (1, "Recreate")
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    assert f"USER {POD['securityContext']['runAsUser']}" in (ROOT / "Dockerfile").read_text()
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}
