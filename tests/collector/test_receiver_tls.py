"""Certificates on the real sockets of `receive`: right ones, none, wrong CA, expired, of clients, and a change under load."""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from certificates import Pair, authority
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otlp_messages import span_message, trace_request
from receive_process import EXPORT, Receiving, receiving

from phasewise.collector.tls import Tls
from phasewise.rules.errors import InputError

pytestmark = pytest.mark.live
TRANSPORTS = ("http", "grpc")


@dataclass(frozen=True, slots=True)
class Trust:
    """What a client believes and shows."""

    ca: Path
    own: Pair | None = None

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if self.own:
            context.load_cert_chain(self.own.cert, self.own.key)
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        own = (self.own.key.read_bytes(), self.own.cert.read_bytes()) if self.own else (None, None)
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), *own)


def sent(running: Receiving, transport: str, trust: Trust) -> bool:
    """Whether a span sent like that is stored."""
    span = span_message()
    body = trace_request(span).SerializeToString()
    if transport == "http":
        client = http.client.HTTPSConnection("127.0.0.1", running.http_port, timeout=10, context=trust.context())
        with closing(client):
            try:
                client.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
                assert client.getresponse().status == 200
            except OSError:
                return False
    else:
        with grpc.secure_channel(f"127.0.0.1:{running.grpc_port}", trust.credentials()) as channel:
            call: Any = cast(Any, channel).unary_unary(EXPORT.format("trace", "Trace"))
            try:
                call(body, timeout=5)
            except grpc.RpcError:
                return False
    assert span.span_id.hex() in running.span_ids()
    return True


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """Shows a certificate; asks for none."""
    data = tmp_path_factory.mktemp("tls")
    pair = authority("ours").issue("server")
    cert, key = data / "server.crt", data / "server.key"
    shutil.copy(pair.cert, cert)
    shutil.copy(pair.key, key)
    with receiving(data, tls_cert=str(cert), tls_key=str(key)) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_trusts_the_ca_gets_through_and_who_trusts_another_does_not(secured: Receiving, transport: str) -> None:
    assert sent(secured, transport, Trust(authority("ours").pair.cert))
    assert not sent(secured, transport, Trust(authority("theirs").pair.cert))


def test_plain_text_is_not_answered(secured: Receiving) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        secured.post(b"")
    with pytest.raises(grpc.RpcError):
        secured.export(b"", timeout_s=2)


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
@pytest.mark.parametrize(
    ("version", "works"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_tls_1_2_is_the_least(secured: Receiving, port: str, version: ssl.TLSVersion, works: bool) -> None:
    context = ssl.create_default_context(cafile=str(authority("ours").pair.cert))
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", getattr(secured, port)), 10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as shown:
                assert works and shown.version() == version.name.replace("v1_", "v1.")
        except ssl.SSLError:
            assert not works


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_stock_exporters_trust_a_certificate_file(
    secured: Receiving, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # of the machine: they win over the exporter's own setting
        monkeypatch.delenv(name, raising=False)
    ca = authority("ours").pair.cert
    exporter: SpanExporter = (
        GrpcExporter(
            endpoint=f"https://127.0.0.1:{secured.grpc_port}", credentials=grpc.ssl_channel_credentials(ca.read_bytes())
        )
        if transport == "grpc"
        else HttpExporter(endpoint=f"https://127.0.0.1:{secured.http_port}/v1/traces", certificate_file=str(ca))
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("secured").start_span(f"secured {transport}").end()
    provider.shutdown()
    assert f"secured {transport}" in {row["name"] for row in secured.stored()}


def shown(port: int) -> bytes:
    """The certificate that a port shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as secure:
            return secure.getpeercert(True) or b""
    except OSError:  # broken off while the workers change
        return b""


@pytest.mark.slow
def test_a_new_certificate_is_taken_on_sighup_under_load(secured: Receiving) -> None:
    trust = Trust(authority("ours").pair.cert)
    failed: list[str] = []
    done = threading.Event()

    def load(transport: str) -> None:
        while not done.is_set():
            # Once more, as every exporter does: a handshake under way when the workers change is broken off.
            if not sent(secured, transport, trust) and not sent(secured, transport, trust):
                failed.append(transport)

    threads = [threading.Thread(target=load, args=(transport,)) for transport in TRANSPORTS]
    for thread in threads:
        thread.start()
    ports = (secured.http_port, secured.grpc_port)
    try:
        for name in ("second", "third"):
            pair = authority("ours").issue(name)
            shutil.copy(pair.cert, secured.data / "server.crt")
            shutil.copy(pair.key, secured.data / "server.key")
            secured.process.send_signal(signal.SIGHUP)
            expected = ssl.PEM_cert_to_DER_cert(pair.cert.read_text())
            until = time.monotonic() + 15
            # While one worker hands over to the other, either may answer.
            while not (settled := {shown(port) for port in ports * 5} == {expected}) and time.monotonic() < until:
                time.sleep(0.2)
            assert settled
        (secured.data / "server.crt").write_text("half a certifi")
        secured.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert {shown(port) for port in ports} == {expected}, "a certificate that cannot be used changes nothing"
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failed == []


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """Asks clients for a certificate of our CA."""
    ours = authority("ours")
    pair = ours.issue("mutual")
    told = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.pair.cert)}
    with receiving(tmp_path_factory.mktemp("mtls"), **told) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("shows", "works"), [("none", False), ("wrong CA", False), ("expired", False), ("right", True)]
)
@pytest.mark.slow
def test_clients_are_asked_for_a_certificate(mutual: Receiving, transport: str, shows: str, works: bool) -> None:
    own = None
    if shows != "none":
        own = authority("theirs" if shows == "wrong CA" else "ours").issue("client", expired=shows == "expired")
    assert sent(mutual, transport, Trust(authority("ours").pair.cert, own)) == works


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"tls_cert": "server.crt"}, "--tls-key: is missing"),
        ({"tls_key": "server.key"}, "--tls-cert: is missing"),
        ({"tls_client_ca": "ca.crt"}, "--tls-cert: is missing"),
        ({"tls_cert": "none.crt", "tls_key": "server.key"}, "--tls-cert: .*none.crt: no such file"),
        ({"tls_cert": "server.crt", "tls_key": "other.key"}, "cannot be used: key values mismatch"),
        ({"tls_cert": "server.crt", "tls_key": "locked.key"}, "has a passphrase"),
        ({"tls_cert": "words.txt", "tls_key": "server.key"}, "--tls-cert: .*words.txt"),
        (
            {"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "words.txt"},
            "--tls-client-ca: .*words.txt",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, told: dict[str, str], said: str) -> None:
    import subprocess

    ours = authority("ours")
    server, other = ours.issue("named"), ours.issue("other")
    for name, source in (("server.crt", server.cert), ("server.key", server.key), ("other.key", other.key)):
        shutil.copy(source, tmp_path / name)
    shutil.copy(ours.pair.cert, tmp_path / "ca.crt")
    (tmp_path / "words.txt").write_text("no certificate\n")
    locking = ["openssl", "ec", "-in", server.key, "-out", tmp_path / "locked.key", "-aes128", "-passout", "pass:word"]
    subprocess.run(list(map(str, locking)), check=True, capture_output=True)
    with pytest.raises(InputError, match=said):
        Tls.of({name: str(tmp_path / file) for name, file in told.items()})
