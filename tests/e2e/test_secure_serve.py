"""`phasewise serve` with keys and certificates: every way in, from a browser's to an exporter's, and a change of both while it runs."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from certificates import authority
from serving import PHASEWISE, phasewise, serving
from waiting import wait_for

from phasewise.collector.journal import JournalReader

pytestmark = pytest.mark.live


def made(data: Path, *options: str) -> str:
    return phasewise("keys", "create", "--data", data, *options).stdout.strip()


def named(url: str, key: str, ca: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line against a named server, as from another machine."""
    environment = {**os.environ, "PHASEWISE_API_KEY": key, "PHASEWISE_CA_FILE": str(ca), **more}
    command = [*PHASEWISE, *map(str, arguments), "--server", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.slow
def test_keys_and_certificates_from_start_to_end(tmp_path: Path) -> None:
    ours, data = authority("ours"), tmp_path / "data"
    pair = ours.issue("served")
    cert, key = tmp_path / "server.crt", tmp_path / "server.key"
    shutil.copy(pair.cert, cert)
    shutil.copy(pair.key, key)
    reader, sender = made(data, "--scope", "read"), made(data, "--scope", "ingest")
    options = ("--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key))
    with serving(data, *options) as served:
        assert served.url.startswith("https://")
        url = f"https://localhost:{served.ready['port']}"
        assert stat.S_IMODE((data / "serve.json").stat().st_mode) == 0o600

        # The same user on the same machine needs no key; doctor speaks to all three ports.
        doctor = phasewise("doctor", "--data", data, "--json")
        assert doctor.returncode == 0, doctor.stdout
        assert phasewise("analyze", "--data", data, "--json").returncode == 3
        assert phasewise("db", "backup", "--data", data, "--out", tmp_path / "backup").returncode == 0
        assert phasewise("db", "purge", "--data", data, "--tenant", "nobody").returncode == 0

        analyze = ("analyze", "--json")
        assert named(url, reader, ours.pair.cert, *analyze).returncode == 3
        refused = named(url, sender, ours.pair.cert, *analyze)
        assert refused.returncode == 2 and "has no scope read" in refused.stderr
        assert "no key" in named(url, "", ours.pair.cert, *analyze).stderr
        distrusted = named(url, reader, authority("theirs").pair.cert, *analyze)
        assert distrusted.returncode == 4 and "CERTIFICATE_VERIFY_FAILED" in distrusted.stderr

        new = ours.issue("renewed")
        shutil.copy(new.cert, cert)
        shutil.copy(new.key, key)
        phasewise("keys", "revoke", reader, "--data", data)
        served.process.send_signal(signal.SIGHUP)
        expected = ssl.PEM_cert_to_DER_cert(new.cert.read_text())
        ports = [served.ready[name] for name in ("port", "otlp_grpc_port", "otlp_http_port")]
        assert wait_for(lambda: {_shown(port) for port in ports * 3} == {expected})
        assert wait_for(lambda: named(url, reader, ours.pair.cert, *analyze).returncode == 2)
        assert served.stop() == 0
    log = served.log.read_text()
    told = log + (data / "audit.jsonl").read_text()
    for token in (reader, sender):
        assert token.split("_", 2)[2] not in told
    assert "without authentication" not in log and "plain text" not in log
    actions = [json.loads(line)["action"] for line in (data / "audit.jsonl").read_text().splitlines()]
    assert actions == ["key_created", "key_created", "started", "purge", "key_revoked"]
    assert [path for path in data.rglob("*") if path.stat().st_mode & 0o077] == []


def _shown(port: int) -> bytes:
    import socket

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as secure:
            return secure.getpeercert(True) or b""
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_without_keys_only_by_saying_so_and_loudly(tmp_path: Path, host: str) -> None:
    data = tmp_path / "data"
    refused = phasewise("serve", "--data", data, "--host", host)
    assert refused.returncode == 2 and "--insecure-no-auth" in refused.stderr and not data.exists()
    with serving(data, "--host", host, "--insecure-no-auth") as served:
        connection = http.client.HTTPConnection(
            "::1" if host == "::" else "127.0.0.1", served.ready["port"], timeout=20
        )
        connection.request("GET", "/api/v1/pulse")
        told: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        assert any("No access keys" in notice for notice in told["notices"])
        assert "without authentication" in served.log.read_text()
        # A first key closes the door while it runs.
        made(data)
        asked = http.client.HTTPConnection("::1" if host == "::" else "127.0.0.1", served.ready["port"], timeout=20)

        def closed() -> bool:
            asked.request("GET", "/api/v1/pulse")
            answer = asked.getresponse()
            answer.read()
            return answer.status == 401

        assert wait_for(closed)
        asked.close()


@pytest.mark.slow
def test_content_is_kept_by_file_and_environment_and_shown_to_few(tmp_path: Path) -> None:
    from otlp_messages import span_message, trace_request

    data, canary = tmp_path / "data", "the quick brown canary"
    (tmp_path / "phasewise.toml").write_text("[serve]\ncontent = true\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path("build/ns").absolute()) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    }
    ports = [part for option in ("--port", "--otlp-grpc-port", "--otlp-http-port") for part in (option, "0")]
    command = [*PHASEWISE, "serve", "--data", str(data), *ports]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert alone.returncode == 2 and "PHASEWISE_KEEP_CONTENT=1" in alone.stderr
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**environment, "PHASEWISE_KEEP_CONTENT": "1"}
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        attributes = {"gen_ai.input.messages": canary, "http.request.header.authorization": "a secret of somebody"}
        body = trace_request(span_message(attributes)).SerializeToString()
        connection = http.client.HTTPConnection("127.0.0.1", ready["otlp_http_port"], timeout=20)
        connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
        assert connection.getresponse().status == 200
        connection.close()
        kept = b"".join(path.read_bytes() for path in data.rglob("*.seg"))
        assert canary.encode() in kept and b"a secret of somebody" not in kept
        pulse = http.client.HTTPConnection("127.0.0.1", ready["port"], timeout=20)
        pulse.request("GET", "/api/v1/pulse")
        assert json.loads(pulse.getresponse().read())["notices"] == ["This server stores prompts and answers."]
        pulse.close()
    finally:
        process.terminate()
        process.wait(15)
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_no_word_of_a_prompt_or_credential_is_anywhere_on_the_disk(tmp_path: Path) -> None:
    """In every sensitive field of spans, resources, events, links and points, over every way in; found again nowhere: journal, WAL,
    database, Parquet, reports, logs. A marker beside each canary shows that it would have been found."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span
    from otlp_messages import key_values, otlp_json, span_message, trace_request

    from phasewise.collector.redact import CONTENT_KEYS, MESSAGE_EVENTS

    canary, marker = "thequickbrowncanary", "kept-marker-of-a-span"
    credentials = (
        "http.request.header.authorization",
        "cookie",
        "my_api_key",
        "db.password",
        "client_secret",
        "x-api-key",
    )
    nested = {"gen_ai.prompt.0.content": [canary], "gen_ai.completion.1.content": {"parts": [{"text": canary}]}}
    sensitive = {**dict.fromkeys((*CONTENT_KEYS, *credentials), canary), **nested, "url.full": f"http://x/y?q={canary}"}

    def request(name: str) -> ExportTraceServiceRequest:
        now = time.time_ns()
        times = {"start_time_unix_nano": now - 10**9, "end_time_unix_nano": now}
        span = span_message({**sensitive, "marker": marker, "gen_ai.request.model": name}, name="llm_request", **times)
        span.trace_id, span.span_id = os.urandom(16), os.urandom(8)
        span.events.extend(
            Span.Event(name=event, attributes=key_values({"content": canary, "text": canary}))
            for event in MESSAGE_EVENTS
        )
        span.links.append(Span.Link(trace_id=os.urandom(16), span_id=os.urandom(8), attributes=key_values(sensitive)))
        return trace_request(span, resource={**sensitive, "service.name": "vllm"})

    data = tmp_path / "data"
    with serving(data) as served:
        served.send_traces(request("by protobuf").SerializeToString())
        connection = http.client.HTTPConnection("127.0.0.1", served.ready["otlp_http_port"], timeout=20)
        connection.request(
            "POST", "/v1/traces", json.dumps(otlp_json(request("by JSON"))), {"content-type": "application/json"}
        )
        assert connection.getresponse().status == 200
        connection.close()
        file = tmp_path / "spans.bin"
        file.write_bytes(request("by file").SerializeToString())
        assert phasewise("ingest", file, "--data", data).returncode == 0

        assert wait_for(lambda: served.get("/api/v1/health")["requests"] >= 1, 30)
        _no_canary(data, canary)
        told = json.dumps(served.get("/api/v1/data-health")) + json.dumps(
            served.get("/api/v1/requests", [("from", "0")])
        )
        assert canary not in told
        assert served.stop() == 0
    _no_canary(data, canary)
    assert canary not in served.log.read_text()
    held = {kind: "".join(_told(path) for path in data.rglob(f"*{kind}")) for kind in (".parquet", ".duckdb", ".seg")}
    assert marker in held[".parquet"] or marker in held[".seg"], (
        "what may be kept is kept, so that its absence would show"
    )
    assert "vllm" in held[".duckdb"]


def _told(path: Path) -> str:
    """Everything that a file says: its bytes, and what is packed in them."""
    import duckdb
    import pyarrow.parquet as pq

    said = path.read_bytes().decode("latin-1")
    if path.suffix == ".parquet":
        said += str(pq.read_table(path).to_pylist())
    if path.suffix == ".seg":
        entries = JournalReader(path.parent).read(None, limit=10**9, limit_rows=10**9)
        said += "".join(str(entry.rows.to_pylist()) for entry in entries)
    if path.suffix == ".duckdb":
        try:
            with duckdb.connect(str(path), read_only=True) as store:
                for (name,) in store.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                    said += str(store.execute(f'SELECT * FROM "{name}"').fetchall())
        except duckdb.IOException:  # its owner has it still
            pass
    return said


def _no_canary(data: Path, canary: str) -> None:
    for path in data.rglob("*"):
        if path.is_file():
            assert canary not in _told(path), path
