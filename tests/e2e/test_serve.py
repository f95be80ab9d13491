"""`phasewise serve` as an operator meets it: starts whole or not at all, survives the loss of a part, ends in order."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import captures
import pytest
from device_pages import dcgm
from local_http import answering, serving_aside
from machine_speed import slowness
from process_tree import children, gone
from serving import PHASEWISE, Served, phasewise, serving
from shared_data import shared_path
from waiting import wait_for

from phasewise.dashboard.commands.recording import Scrape, Traces, load

pytestmark = pytest.mark.live
EVERYTHING = ("--from", "0", "--to", "4102444800")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def bodies(name: str) -> list[bytes]:
    return [event.body for event in load(name).events if isinstance(event, Traces)]


@pytest.mark.alone
def test_a_server_starts_answers_survives_a_lost_part_and_ends_in_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as served:
        assert set(served.ready) == {"ready", "url", "port", "otlp_grpc_port", "otlp_http_port"}
        told = json.loads((data / "serve.json").read_text())
        assert told["pid"] == served.process.pid
        assert {key: told[key] for key in served.ready} == dict(served.ready)
        assert served.get("/livez") == {"status": "alive"}

        second = phasewise("serve", "--data", data, "--port", 0, "--otlp-grpc-port", 0, "--otlp-http-port", 0)
        assert second.returncode == 4
        assert f"served by process {served.process.pid} at {served.url}" in second.stderr

        sent = bodies("vllm-kv-starvation")
        for body in sent[:5]:
            served.send_traces(body)
        parts = children(served.process.pid)
        assert set(parts) == {"receive", "store"}
        os.kill(parts["receive"], signal.SIGKILL)
        assert wait_for(lambda: gone(parts["receive"]))
        assert served.get("/livez") == {"status": "alive"}
        assert wait_for(lambda: listens(served.ready["otlp_http_port"]))
        for body in sent:  # the first five again: a resend changes nothing
            _send_when_ready(served, body)
        assert served.verdict(24)["requests"] == 24

        assert phasewise("doctor", "--quick", "--data", data).returncode == 0
        doctor = phasewise("doctor", "--data", data, "--json")
        assert doctor.returncode == 0, doctor.stdout

        start = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - start < 10 * slowness()
        assert not (data / "serve.json").exists()
        assert all(gone(pid) for pid in children(served.process.pid).values())
        assert not listens(served.ready["port"])
    after = phasewise("analyze", "--data", data, *EVERYTHING, "--json")
    assert json.loads(after.stdout)["requests"] == 24


def _send_when_ready(served: Served, body: bytes) -> None:
    """A sender that tries again, as every exporter does."""
    until = time.monotonic() + 20
    while True:
        try:
            served.send_traces(body)
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served:
        parts = children(served.process.pid)
        served.process.kill()
        served.process.wait()
        assert wait_for(lambda: all(gone(pid) for pid in parts.values()), 15)
    with serving(tmp_path / "data") as again:
        assert again.get("/livez") == {"status": "alive"}


@pytest.mark.parametrize("option", ["--port", "--otlp-grpc-port", "--otlp-http-port"])
def test_a_busy_port_is_one_line_and_nothing_is_started(tmp_path: Path, option: str) -> None:
    data = tmp_path / "data"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        ports = {"--port": 0, "--otlp-grpc-port": 0, "--otlp-http-port": 0, option: busy}
        arguments = [part for name, port in ports.items() for part in (name, port)]
        done = phasewise("serve", "--data", data, *arguments)
    assert done.returncode == 4
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"port {busy}" in done.stderr and option in done.stderr and f"process {os.getpid()}" in done.stderr
    assert not (data / "serve.json").exists()


def test_a_directory_without_permission_is_one_line(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    done = phasewise("serve", "--data", place / "data", "--port", 0, "--otlp-grpc-port", 0, "--otlp-http-port", 0)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1
    assert "--data" in done.stderr


@pytest.mark.slow
def test_files_give_the_same_verdict_through_a_server_and_without_one(tmp_path: Path) -> None:
    recording = load("vllm-overload")
    lines = [
        json.dumps({"unix_ns": event.unix_ns, "text": event.text})
        for event in recording.events
        if isinstance(event, Scrape)
    ]
    scrapes = tmp_path / "scrapes.jsonl"
    scrapes.write_text("\n".join(lines) + "\n")
    with serving(tmp_path / "data", "--all-in-one") as served:
        assert set(children(served.process.pid)) == {"receive"}
        for body in bodies("vllm-overload"):
            served.send_traces(body)
        done = phasewise("ingest", "--server", served.url, "--scrapes", scrapes)
        assert done.returncode == 0, done.stderr
        assert served.verdict(96)["requests"] == 96
        live = phasewise("analyze", "--data", served.data, *EVERYTHING, "--json")
        asked = served.get("/api/v1/verdict", [("from", "0"), ("to", str(4102444800 * 10**9))])
        assert json.loads(live.stdout) == asked
        found = phasewise("explain", asked["examples"][0]["request_key"], "--data", served.data)
        assert found.returncode == 0 and "verdict" in found.stdout
        assert served.stop(signal.SIGINT) == 0
    alone = phasewise("analyze", "--data", tmp_path / "data", *EVERYTHING, "--json")
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == asked
    card = phasewise("analyze", "--data", tmp_path / "data", *EVERYTHING)
    assert "batch slot" in card.stdout and "\x1b" not in card.stdout
    empty = phasewise("analyze", "--data", tmp_path / "data", "--from", "1", "--to", "2")
    assert empty.returncode == 3


def test_files_are_imported_without_a_server(tmp_path: Path) -> None:
    folder = shared_path("captures", "vllm-light")
    scrapes = tmp_path / "scrapes.jsonl"
    scrapes.write_text(
        "".join(json.dumps({"unix_ns": ns, "text": text}) + "\n" for ns, text in captures.scrapes(folder))
    )
    client = next(folder.glob("client-aiperf.jsonl"))
    done = phasewise("ingest", "--data", tmp_path / "data", "--scrapes", scrapes, client, "--json")
    assert done.returncode in (0, 5), done.stderr
    assert json.loads(done.stdout)["counts"]


@pytest.mark.slow
def test_an_engine_that_is_scraped_is_seen(tmp_path: Path) -> None:
    page = next(event.text for event in load("vllm-overload").events if isinstance(event, Scrape)).encode()

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Silence."""

    engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    with serving_aside(engine):
        url = f"http://127.0.0.1:{engine.server_port}/metrics"
        with serving(tmp_path / "data", "--scrape", url) as served:
            assert wait_for(lambda: served.get("/api/v1/health")["samples"] >= 2)
            assert phasewise("doctor", "--data", served.data, "--scrape", url).returncode == 0
    done = phasewise(
        "doctor",
        "--data",
        tmp_path / "other",
        "--port",
        0,
        "--otlp-grpc-port",
        0,
        "--otlp-http-port",
        0,
        "--scrape",
        url,
    )
    assert done.returncode == 1
    assert "FAIL  metrics" in done.stdout and "no answer: connection refused (is it up" in done.stdout


@pytest.mark.slow
def test_jobs_of_the_configuration_are_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of targets, picked up while the server runs; an engine and the exporter of its device."""
    pages = {"/metrics": "vllm:num_requests_running 3\n", "/dcgm": dcgm((0,), xid=79)}

    def answer(path: str, _: object) -> tuple[int, str]:
        return 200, pages[path]

    targets = tmp_path / "targets.json"
    (tmp_path / "phasewise.toml").write_text(f'[[scrape]]\njob = "gpus"\nfiles = ["{targets}"]\ninterval_s = 0.5\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(str(Path(part).resolve()) for part in sys.path if part))
    with answering(answer) as server, serving(tmp_path / "data") as served:

        def told() -> dict[str, Any]:
            found: dict[str, Any] = served.get("/api/v1/data-health", [("from", "now-5m"), ("to", "now")])
            return found

        (source,) = told()["scrape_sources"]
        assert "no file matches" in source["problem"]
        host = {"host.name": "node-1"}
        targets.write_text(
            json.dumps(
                [
                    {"targets": [server.url], "labels": host},
                    {"targets": [f"{server.url}/dcgm"], "labels": {**host, "service.instance.id": "dcgm"}},
                ]
            )
        )
        assert wait_for(lambda: bool(told()["devices"]) and told()["engine_samples"] > 0, 40)
        assert wait_for(lambda: len(told()["scrapes"]) == 2 and all(one["up"] for one in told()["scrapes"]))
        health = told()
        assert {one["engine"] for one in health["scrapes"]} == {"vllm_v1", "devices"}
        assert all(one["up"] for one in health["scrapes"])
        (device,) = health["devices"]
        assert (device["device"], device["xid"], device["tensor_active_ratio"]) == ("GPU-0", 79, 0.125)
        assert (device["engines"], device["joined_by"]) == ([server.url.removeprefix("http://")], "host")
        marks = served.get("/api/v1/annotations", [("from", "now-5m"), ("to", "now")])["annotations"]
        assert [mark["kind"] for mark in marks] == ["xid"]


def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ports = [part for option in ("--port", "--otlp-grpc-port", "--otlp-http-port") for part in (option, "0")]
    process = subprocess.Popen([*PHASEWISE, "serve", "--data", str(data), *ports], stdout=subprocess.PIPE, text=True)
    assert wait_for(lambda: bool(children(process.pid)))
    parts = children(process.pid)
    process.terminate()
    assert process.wait(15) == 0
    assert process.stdout is not None and process.stdout.read() == ""
    process.stdout.close()
    assert all(gone(pid) for pid in parts.values())
    assert not (data / "serve.json").exists()
