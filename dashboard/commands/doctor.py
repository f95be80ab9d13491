"""`phasewise doctor`: would it run here, and does it run? Every failed line ends with the fix."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.dashboard.commands.connection import find_server, make_directory, store_path
from phasewise.dashboard.commands.otlp import trace_sender
from phasewise.dashboard.commands.ports import Wanted, require_free
from phasewise.rules.errors import MachineError, PhasewiseError
from phasewise.rules.secret_text import hidden

if TYPE_CHECKING:
    from phasewise.collector.scraping.jobs import Endpoint, Job

FREE_BYTES = 2 * 2**30
START_S = 30.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    text: str


def run(options: Namespace) -> int:
    """Exit code 1 where a check failed."""
    checks = []
    for check in _quick(options) if options.quick else _all(options):
        checks.append(check)
        if not options.json:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.text}", flush=True)
    good = all(check.ok for check in checks)
    if options.json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}, indent=2, ensure_ascii=False))
    return 0 if good else 1


def _tried(name: str, work: Callable[[], str]) -> Check:
    """A check by doing: what it says, or the error and its remedy."""
    try:
        return Check(name, True, work())
    except PhasewiseError as error:
        return Check(name, False, str(error))


def _quick(options: Namespace) -> Iterator[Check]:
    """What a container's health check wants to know, in one request."""

    def ready() -> str:
        server = find_server(options.data)
        if server is None:
            raise MachineError(f"no server runs on {options.data} (start phasewise serve, or name its --data)")
        server.ask("/readyz")
        return f"ready at {server.url}"

    yield _tried("server", ready)


def _all(options: Namespace) -> Iterator[Check]:
    yield _tried("python", _python)
    yield _tried("rules", _rules)
    yield _tried("accelerator", lambda: _accelerator(getattr(options, "hardware", {})))
    yield _tried("data", lambda: _data(options.data))
    yield _tried("disk", lambda: _disk(options.data))
    yield _tried("access", lambda: _access(options))
    yield _tried("devices", _devices)
    try:
        server = find_server(options.data)
    except PhasewiseError as error:
        yield Check("server", False, str(error))
        return
    if server is None:
        yield _tried("ports", lambda: _ports(options))
        yield _tried("store", lambda: _store(options.data))
        yield _tried("OTLP round trip", _trial)
    else:
        yield from _quick(options)
        yield _tried("OTLP round trip", lambda: _round_trip(options.data))
    yield from _urls(options.scrape)
    yield from _jobs(getattr(options, "scrape_jobs", ()))


def _python() -> str:
    return f"{sys.version.split()[0]} at {sys.executable}"


def _rules() -> str:
    from phasewise.rules.load import load_rulebook

    rulebook = load_rulebook()
    return f"{len(rulebook.techniques)} techniques, {len(rulebook.engines)} engines, version {rulebook.version}"


def _accelerator(stated: Mapping[str, Any]) -> str:
    """What the configuration names, as `serve` will look it up. To name none is no fault: an engine may tell."""
    from phasewise.dashboard.commands.configuration import require_known
    from phasewise.rules.engine_settings import NAME_IT
    from phasewise.rules.load import load_rulebook

    rulebook = load_rulebook()
    require_known(stated, rulebook)
    gpu = rulebook.find_gpu(stated.get("accelerator"))
    if gpu is None:
        return f"none is named; where an engine tells none either, {NAME_IT}"
    return f"{gpu.id}, {'by its data sheet' if gpu.peak_flops else 'as it was measured'}"


def _data(data: Path) -> str:
    existed = data.exists()
    make_directory(data)
    if not existed:
        data.rmdir()
    return f"{data.resolve()} can be written"


def _disk(data: Path) -> str:
    place = next(path for path in (data.resolve(), *data.resolve().parents) if path.exists())
    usage = shutil.disk_usage(place)
    text = f"{usage.free / 2**30:.1f} GiB free at {place}"
    if usage.free < FREE_BYTES:
        raise MachineError(
            f"{text}; at least {FREE_BYTES // 2**30} GiB are needed: free some, or choose another --data"
        )
    return text


def _access(options: Namespace) -> str:
    """Keys and certificates as `serve` will read them: what would stop its start is said here."""
    from phasewise.collector.tls import SETTINGS, Tls
    from phasewise.dashboard.commands.keys import require_keys

    keys = "keys are asked for" if require_keys(options.data) else "no keys: anybody who reaches it may come in"
    told = Tls.of({name: getattr(options, name, None) for name in SETTINGS})
    return f"{keys}; {'certificates fit' if told else 'no certificates'}"


def _devices() -> str:
    """Not having any is no fault: engines run elsewhere, or DCGM's exporter tells."""
    from phasewise.collector.nvml import open_nvml

    nvml, said = open_nvml()
    if nvml is None:
        return f"none of this machine are read: {said} (scrape a DCGM exporter for those of other machines)"
    nvml.nvmlShutdown()
    return f"{said} read once a second while serve runs"


def _ports(options: Namespace) -> str:
    wanted = (
        Wanted(options.port, "--port"),
        Wanted(options.otlp_grpc_port, "--otlp-grpc-port"),
        Wanted(options.otlp_http_port, "--otlp-http-port"),
    )
    require_free(options.host, wanted)
    return f"{', '.join(str(want.port) for want in wanted)} are free on {options.host}"


def _store(data: Path) -> str:
    from phasewise.collector.store import Store

    if store_path(data).exists():
        Store(store_path(data)).close()
        return f"{store_path(data)} opens"
    with tempfile.TemporaryDirectory(prefix="phasewise-doctor-") as scratch:
        Store(store_path(Path(scratch))).close()
    return "a new one can be made"


def _trial() -> str:
    """Starts receive in a folder of its own on free ports and sends one span each way; the user's data is not touched."""
    from phasewise.dashboard.commands.supervisor import Child

    with tempfile.TemporaryDirectory(prefix="phasewise-doctor-") as scratch:
        settings: dict[str, object] = {"data": scratch, "host": "127.0.0.1", "grpc_port": 0, "http_port": 0}
        child = Child("receive", "phasewise.collector.receiver", settings)
        child.start()
        try:
            until = time.monotonic() + START_S
            while child.poll_ready() is None:
                if child.exit_code is not None or time.monotonic() > until:
                    raise MachineError(f"receive did not start (exit code {child.exit_code}; its reason stands above)")
                time.sleep(0.05)
            assert child.ready is not None
            return _send("127.0.0.1", child.ready, _one_span())
        finally:
            child.terminate()
            child.wait(time.monotonic() + 5)


def _round_trip(data: Path) -> str:
    """An empty request each way to the running server: answered like any other, and leaves no span in the user's data."""
    told = json.loads((data / "serve.json").read_text(encoding="utf-8"))
    return _send(str(told.get("host", "127.0.0.1")), told, b"")


def _send(host: str, told: Mapping[str, Any], body: bytes) -> str:
    times = []
    pinned = Path(told["tls_cert"]) if told.get("tls_cert") else None
    ports = (int(told["otlp_grpc_port"]), int(told["otlp_http_port"]))
    with trace_sender(host, *ports, key=str(told.get("local_key") or ""), pinned=pinned) as send:
        for transport in ("grpc", "http"):
            start = time.monotonic()
            send(transport, body)
            times.append(f"{transport} {time.monotonic() - start:.2f} s")
    return ", ".join(times)


def _one_span() -> bytes:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = b"\1" * 16, b"\1" * 8, "phasewise.doctor"
    span.start_time_unix_nano = span.end_time_unix_nano = time.time_ns()
    return request.SerializeToString()


def _urls(urls: Sequence[str]) -> Iterator[Check]:
    """Each `--scrape` once, as `serve` would ask it."""
    from phasewise.collector.scraping.jobs import url_job

    for url in urls:
        try:
            job = url_job([url], timeout_s=ANSWER_S)
        except PhasewiseError as error:
            yield Check(f"metrics {hidden(url)}", False, str(error))
            continue
        for endpoint in job.endpoints:
            yield _tried(f"metrics {endpoint.shown_url}", partial(_target, job, endpoint))


def _jobs(tables: Sequence[Mapping[str, object]]) -> Iterator[Check]:
    """Each `[[scrape]]` once: what its files and its cluster tell, and every target that it states."""
    from phasewise.collector.scraping.jobs import read_jobs
    from phasewise.dashboard.commands.configuration import NAME

    for job in read_jobs(NAME, list(tables)):
        if job.files:
            yield _tried(f"targets of {job.name}", partial(_files, job))
        if job.kubernetes:
            yield _tried(f"targets of {job.name}", partial(_cluster, job))
        for endpoint in job.endpoints:
            yield _tried(f"metrics {endpoint.shown_url}", partial(_target, job, endpoint))


def _files(job: Job) -> str:
    from phasewise.collector.scraping.file_discovery import FileDiscovery

    return _found(*FileDiscovery(job).look())


def _cluster(job: Job) -> str:
    from phasewise.collector.scraping.kubernetes_discovery import look_once

    return _found(*look_once(job))


def _found(endpoints: Sequence[Endpoint], problem: str) -> str:
    if problem:
        raise MachineError(problem)
    return f"{len(endpoints)} found"


def _target(job: Job, endpoint: Endpoint) -> str:
    import httpx

    from phasewise.collector.scraping.http import Refused, client_of, read_body, unreached

    try:
        with client_of(job.access, job.timeout_s, f"job {job.name}") as client:
            text = read_body(client, endpoint.url, job.access, job.timeout_s)
    except (httpx.HTTPError, Refused) as error:
        reason = unreached(error) if isinstance(error, httpx.HTTPError) else error
        raise MachineError(f"no answer: {reason} (is it up, and are its metrics switched on?)") from None
    return _counted(text)


def _counted(text: str) -> str:
    names = {
        line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")
    }
    if not names:
        raise MachineError("answers, but with no metric (is this the /metrics page of the engine?)")
    return f"{len(names)} metrics"
