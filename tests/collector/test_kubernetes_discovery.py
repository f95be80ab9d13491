"""Discovery against a local API server: list, watch, a lost thread, refusals, and TLS."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import ApiServer, kubernetes, pod, status
from waiting import until

from phasewise.collector.scraping.jobs import Endpoint, read_jobs
from phasewise.collector.scraping.kubernetes_discovery import KubernetesDiscovery

pytestmark = pytest.mark.live


class Seen:
    """What a discovery told last."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.problem = ""
        self.told = 0

    def __call__(self, endpoints: Sequence[Endpoint], problem: str) -> None:
        self.names, self.problem = [one.instance for one in endpoints], problem
        self.told += 1


@contextmanager
def discovering(api: ApiServer, account: Path = Path("/nowhere"), **told: Any) -> Iterator[Seen]:
    table = {"api_url": api.url, "namespaces": ["inference"], **told}
    (job,) = read_jobs("test", [{"job": "vllm", "kubernetes": table}])
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": api.url.rpartition(":")[2]}
    seen, stopping = Seen(), threading.Event()
    discovery = KubernetesDiscovery(job, environment, account, watch_s=30, pause_s=0.01)
    thread = threading.Thread(target=discovery.run, args=(stopping, seen), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        api.ended = True
        thread.join(10)
        assert not thread.is_alive()


def test_pods_that_come_change_and_go_are_followed() -> None:
    with kubernetes() as api:
        api.objects = [pod("vllm-0")]
        with discovering(api, selector="app=vllm") as seen:
            until(lambda: seen.names == ["inference/vllm-0"])
            api.change("ADDED", pod("vllm-1", None, phase="Pending", version="101"))
            api.change("MODIFIED", pod("vllm-1", "10.0.0.2", version="102"))
            until(lambda: seen.names == ["inference/vllm-0", "inference/vllm-1"])
            api.change("DELETED", pod("vllm-0", version="103"))
            until(lambda: seen.names == ["inference/vllm-1"])
            api.change("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "150"}})
            api.changes.put(None)  # the server ends a watch after its time
            until(lambda: len(api.watches()) == 2)
        assert api.lists() == [{"limit": "500", "labelSelector": "app=vllm"}]
        assert [query["resourceVersion"] for query in api.watches()] == ["100", "150"]
        assert api.asked[0][0] == "/api/v1/namespaces/inference/pods"
        assert seen.problem == ""


def test_a_version_that_is_gone_means_listing_again() -> None:
    with kubernetes() as api:
        api.objects = [pod("vllm-0")]
        with discovering(api) as seen:
            until(lambda: seen.names == ["inference/vllm-0"])
            api.objects, api.version = [pod("vllm-7")], "900"
            api.changes.put({"type": "ERROR", "object": status(410, "too old resource version: 100 (899)")})
            until(lambda: seen.names == ["inference/vllm-7"])
            until(lambda: api.watches()[-1]["resourceVersion"] == "900")
            api.objects = [pod("vllm-8")]
            api.watch_refusing = (410, "The provided continue parameter is too old")
            api.changes.put(None)
            until(lambda: seen.names == ["inference/vllm-8"])


def test_objects_of_odd_shapes_hide_no_other() -> None:
    with kubernetes() as api:
        api.objects = [{"metadata": "?"}, {"spec": []}, pod("vllm-0")]
        with discovering(api) as seen:
            until(lambda: seen.names == ["inference/vllm-0"])
            api.change("ADDED", {"metadata": ["?"], "status": 7})
            api.change("ADDED", pod("vllm-1", "10.0.0.2", version="101"))
            until(lambda: seen.names == ["inference/vllm-0", "inference/vllm-1"])


def test_long_lists_come_in_pages() -> None:
    with kubernetes() as api:
        api.page = 2
        api.objects = [pod(f"vllm-{number}", f"10.0.0.{number + 1}") for number in range(5)]
        with discovering(api) as seen:
            until(lambda: len(seen.names) == 5)
        assert [query.get("continue") for query in api.lists()] == [None, "2", "4"]


@pytest.mark.parametrize(
    ("code", "message", "said"),
    [
        (
            403,
            'pods is forbidden: User "system:serviceaccount:x:y" cannot list resource "pods"',
            "get, list and watch pods",
        ),
        (401, "Unauthorized", "give token_file"),
        (500, "etcdserver: leader changed", "etcdserver: leader changed"),
    ],
)
def test_a_refusal_names_its_remedy_and_what_was_known_stays(code: int, message: str, said: str) -> None:
    with kubernetes() as api:
        api.objects = [pod("vllm-0")]
        with discovering(api) as seen:
            until(lambda: seen.names == ["inference/vllm-0"])
            api.refusing = (code, message)
            api.changes.put(None)
            until(lambda: said in seen.problem)
            assert str(code) in seen.problem
            assert seen.names == ["inference/vllm-0"]
            api.refusing = None
            until(lambda: seen.problem == "")


def test_an_api_that_answers_something_else_is_said() -> None:
    with kubernetes() as api:
        api.objects = [pod("vllm-0")]
        with discovering(api) as seen:
            until(lambda: bool(seen.names))
            api.changes.put({"type": "ERROR", "object": status(500, "etcd is gone")})
            until(lambda: len(api.lists()) > 1)
    with kubernetes() as api:
        gone = api.url
    with kubernetes() as api:
        api.url = gone
        with discovering(api) as seen:
            until(lambda: "no answer from the API" in seen.problem)


def test_outside_of_a_cluster_it_says_what_to_state() -> None:
    (job,) = read_jobs("test", [{"job": "vllm", "kubernetes": {}}])
    seen, stopping = Seen(), threading.Event()
    discovery = KubernetesDiscovery(job, {}, Path("/nowhere"), pause_s=0.01)
    thread = threading.Thread(target=discovery.run, args=(stopping, seen), daemon=True)
    thread.start()
    until(lambda: "give api_url" in seen.problem)
    stopping.set()
    thread.join(10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *extension], check=True, capture_output=True)
    return cert, key


def test_in_a_cluster_the_service_account_is_used_and_its_token_read_anew(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "namespace").write_text("inference\n")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_bytes(certificate[0].read_bytes())
    with kubernetes(tls=certificate) as api:
        api.objects = [pod("vllm-0")]
        with discovering(api, tmp_path, api_url="", namespaces=[]) as seen:
            until(lambda: seen.names == ["inference/vllm-0"])
            until(lambda: len(api.watches()) == 1)
            (tmp_path / "token").write_text("second\n")
            api.changes.put(None)
            until(lambda: len(api.watches()) == 2)
        assert (api.tokens[0], api.tokens[-1]) == ("Bearer first", "Bearer second")


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    with (
        kubernetes(tls=certificate) as api,
        discovering(api, token_file=str(tmp_path / "token")) as seen,
    ):
        until(lambda: "ca_file" in seen.problem)
        assert api.tokens == []
        assert "secret-token" not in seen.problem
