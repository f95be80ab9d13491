"""What doctor says of scrape jobs and of this machine's devices."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from kubernetes_server import kubernetes, pod
from local_http import answering

from phasewise.collector.access_keys import KeyFile, new_key
from phasewise.dashboard.commands import doctor

pytestmark = pytest.mark.live


def told(*tables: Mapping[str, object]) -> list[tuple[str, bool, str]]:
    return [(check.name, check.ok, check.text) for check in doctor._jobs(tables)]


def test_a_target_is_asked_as_the_job_would_ask_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")

    def answer(path: str, _: object) -> tuple[int, str]:
        return (200, "vllm:num_requests_running 3\nup 1\n") if path == "/metrics" else (403, "no")

    with answering(answer) as server:
        job: dict[str, Any] = {"job": "a", "targets": [server.url, f"{server.url}/secret"]}
        (good, bad) = told(job | {"bearer_token_file": str(tmp_path / "token")})
        assert good == (f"metrics {server.url}/metrics", True, "2 metrics")
        assert server.asked[0].headers["Authorization"] == "Bearer t"
        assert not bad[1] and "403" in bad[2] and "bearer_token_file" in bad[2]
        (missing, _) = told(job | {"bearer_token_file": str(tmp_path / "none")})
        assert not missing[1] and "cannot be read" in missing[2]


def test_files_and_clusters_say_how_many_targets_they_tell_or_why_not(tmp_path: Path) -> None:
    files = {"job": "f", "files": [str(tmp_path / "*.json")]}
    assert told(files) == [("targets of f", False, f"no file matches {tmp_path / '*.json'}")]
    (tmp_path / "a.json").write_text(json.dumps([{"targets": ["h:1", "h:2"]}]))
    assert told(files) == [("targets of f", True, "2 found")]
    with kubernetes() as api:
        cluster = {"job": "k", "kubernetes": {"api_url": api.url, "namespaces": ["inference"]}}
        api.objects = [pod("vllm-0")]
        assert told(cluster) == [("targets of k", True, "1 found")]
        api.refusing = (403, "pods is forbidden")
        ((_, ok, text),) = told(cluster)
        assert not ok and "get, list and watch pods in namespace inference" in text


def test_an_address_of_the_command_line_is_asked_as_serve_asks_it() -> None:
    def answer(path: str, _: object) -> tuple[int, str]:
        return (200, "up 1\n") if path == "/metrics" else (302, "")

    with answering(answer) as server:
        named = server.url.replace("://", "://me:secret@")
        (good, moved, wrong) = doctor._urls([named, f"{server.url}/moved", "http://me:secret@h:port/"])
        assert (good.name, good.ok) == (f"metrics {server.url}/metrics", True)
        assert server.asked[0].headers["Authorization"].startswith("Basic ")
        assert not moved.ok and "leads elsewhere" in moved.text
        assert not wrong.ok and "secret" not in wrong.name


def test_keys_and_certificates_that_would_stop_the_start_are_told(tmp_path: Path) -> None:
    def told(**more: str) -> tuple[bool, str]:
        check = doctor._tried("access", lambda: doctor._access(Namespace(data=tmp_path, **more)))
        return check.ok, check.text

    assert told() == (True, "no keys: anybody who reaches it may come in; no certificates")
    ok, text = told(tls_cert=str(tmp_path / "none.pem"))
    assert not ok and "--tls-key" in text
    KeyFile(tmp_path).add(new_key(("read",), now_unix_ns=time.time_ns())[0])
    assert told() == (True, "keys are asked for; no certificates")
    (tmp_path / "keys.json").chmod(0o644)
    ok, text = told()
    assert not ok and "keys.json" in text


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert doctor._devices() == "2 devices read once a second while serve runs"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in doctor._devices()
