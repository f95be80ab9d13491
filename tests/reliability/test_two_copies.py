"""F17 and F35: a second copy, on the same data or the same ports, is refused in one line; the first one does not notice."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from serving import Served, phasewise, serving
from span_ledger import Ledger, Sender, assert_account, request_body

pytestmark = [pytest.mark.live, pytest.mark.slow]
ANY = ("--port", 0, "--otlp-grpc-port", 0, "--otlp-http-port", 0)


def refused(*arguments: object, saying: str) -> None:
    done = phasewise("serve", *arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert saying in done.stderr


def test_a_second_copy_takes_nothing_from_the_first(tmp_path: Path) -> None:
    ledger = Ledger()
    data = tmp_path / "data"
    with serving(data) as first:
        sender = Sender(ledger, lambda: int(first.ready["otlp_grpc_port"]), "grpc")
        assert sender.send(*request_body(5)) == "acknowledged"
        (tmp_path / "link").symlink_to(data)
        pid = first.process.pid
        for path in (data, tmp_path / "link"):
            refused("--data", path, *ANY, saying=f"served by process {pid} at {first.url}")
        (data / "serve.lock").rename(data / "elsewhere")  # as on a file system whose locks do not work
        refused("--data", data, *ANY, saying=f"at {first.url}")
        (data / "serve.lock").unlink()
        (data / "elsewhere").rename(data / "serve.lock")
        busy = busy_ports(first)
        refused("--data", tmp_path / "other", *busy, saying="choose another with --port")
        assert not (tmp_path / "other" / "serve.json").exists()
        assert sender.send(*request_body(5)) == "acknowledged"
        assert first.stop() == 0
    assert_account(data, ledger)


def busy_ports(first: Served) -> tuple[object, ...]:
    return (
        "--port",
        first.ready["port"],
        "--otlp-grpc-port",
        first.ready["otlp_grpc_port"],
        "--otlp-http-port",
        first.ready["otlp_http_port"],
    )


@pytest.mark.parametrize("option", ["--port", "--otlp-grpc-port", "--otlp-http-port"])
def test_a_port_that_is_taken_in_ipv6(tmp_path: Path, option: str) -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        busy = taken.getsockname()[1]
        ports = dict(zip(ANY[::2], ANY[1::2], strict=True)) | {option: busy}
        given = [part for pair in ports.items() for part in pair]
        refused("--data", tmp_path / "data", "--host", "::1", *given, saying=f"by process {os.getpid()}")
    assert not (tmp_path / "data" / "serve.json").exists()
