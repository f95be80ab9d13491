"""Scrape jobs: what `[[scrape]]` of `phasewise.toml` says, checked, and the plain URLs of `--scrape` in the same form."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phasewise.rules.errors import InputError

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
LONGEST_S = 3600.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ROLES = ("pod", "endpointslice")
EVERY_NAMESPACE = "*"
_LABELS = 64  # of a target; more say nothing that joins
_LABEL_LENGTH = 256
_SELECTOR = re.compile(r"[A-Za-z0-9_.\-/=!,() ]*")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to scrape. instance: its name in the store; labels: of its resource (k8s.pod.name, host.name, ...)."""

    url: str
    instance: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown_url(self) -> str:
        """Without a password."""
        parts = urlsplit(self.url)
        return self.url.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1) if "@" in parts.netloc else self.url


@dataclass(frozen=True, slots=True)
class Access:
    """How an address is reached. token_file: read for each request, since such tokens are renewed; ca_file: PEM."""

    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Whose pods are targets. port: name or number, None: what annotations or the only port say; annotated: only pods that
    carry prometheus.io/scrape. api_url "": that of the cluster this process runs in."""

    role: str = "pod"
    namespaces: tuple[str, ...] = ()
    selector: str = ""
    port: str | int | None = None
    annotated: bool = False
    api_url: str = ""
    access: Access = field(default_factory=Access)


@dataclass(frozen=True, slots=True)
class Job:
    """One `[[scrape]]`: its addresses, where more of them are found, and how each is read."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    files: tuple[str, ...] = ()
    kubernetes: Kubernetes | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    scheme: str = "http"
    path: str = "/metrics"
    interval_s: float = INTERVAL_S
    timeout_s: float = TIMEOUT_S
    access: Access = field(default_factory=Access)


def url_job(urls: Sequence[str], interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S) -> Job:
    """The job of `--scrape URL`. Raises InputError for what is no address."""
    found = tuple(endpoint_of(url, "--scrape") for url in dict.fromkeys(urls))
    return Job("--scrape", found, interval_s=interval_s, timeout_s=timeout_s)


def endpoint_of(
    text: str, source: str, scheme: str = "http", path: str = "/metrics", labels: Mapping[str, str] | None = None
) -> Endpoint:
    """HOST:PORT or a URL. Raises InputError naming `source`."""
    parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
    try:
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        fits = False
    if not fits:
        raise InputError(source, text, "is no address to scrape", "write http://HOST:PORT/metrics")
    own = parts.path if parts.path not in ("", "/") else path
    query = f"?{parts.query}" if parts.query else ""
    told = bounded(labels or {})
    name = told.get("service.instance.id") or parts.netloc.rpartition("@")[2]
    return Endpoint(f"{parts.scheme}://{parts.netloc}{own}{query}", name, told)


def bounded(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as they are kept: not too many, not too long; the first ones stay."""
    return {key: value[:_LABEL_LENGTH] for key, value in list(labels.items())[:_LABELS]}


def read_jobs(source: Path | str, tables: object) -> tuple[Job, ...]:
    """Jobs out of `[[scrape]]`. Raises InputError naming file, job and key."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(source, "scrape", "is no list of jobs", 'write [[scrape]] and below it job = "NAME"')
    jobs = tuple(_Table(source, f"scrape[{number}]", table).job() for number, table in enumerate(tables))
    for number, job in enumerate(jobs):
        if job.name in [earlier.name for earlier in jobs[:number]]:
            raise InputError(source, f"scrape[{number}].job", f"{job.name!r} is there twice", "name each job once")
    return jobs


class _Table:
    """One TOML table, read key by key; what is left over is unknown."""

    def __init__(self, source: Path | str, where: str, table: Mapping[str, Any]) -> None:
        self._source, self._where, self._table = source, where, table
        self._known: list[str] = []

    def job(self) -> Job:
        name = self.text("job", "")
        if not name:
            raise self.wrong("job", "is missing", 'name the job: job = "vllm"')
        scheme = self.choice("scheme", ("http", "https"), "http")
        path = self.text("path", "/metrics")
        if not path.startswith("/"):
            raise self.wrong("path", f"{path!r} is no path", 'write path = "/metrics"')
        labels = self.labels()
        texts = self.texts("targets")
        endpoints = tuple(
            endpoint_of(text, f"{self._source}: {self._where}.targets", scheme, path, labels) for text in texts
        )
        kubernetes = self.table("kubernetes")
        job = Job(
            name=name,
            endpoints=endpoints,
            files=tuple(self.files()),
            kubernetes=kubernetes.kubernetes() if kubernetes else None,
            labels=labels,
            scheme=scheme,
            path=path,
            interval_s=self.seconds("interval_s", INTERVAL_S),
            timeout_s=self.seconds("timeout_s", TIMEOUT_S),
            access=self.access("bearer_token_file"),
        )
        self.end()
        if not (job.endpoints or job.files or job.kubernetes):
            raise self.wrong("", "has nothing to scrape", "give targets, files or a [scrape.kubernetes] table")
        return job

    def kubernetes(self) -> Kubernetes:
        port = self.value("port", None, "a port's name or number", _is_port)
        namespaces = self.texts("namespaces")
        for one in namespaces:
            if one != EVERY_NAMESPACE and not _NAMESPACE.fullmatch(one):
                raise self.wrong("namespaces", f"{one!r} is no namespace", 'name them, or say ["*"] for every one')
        selector = self.text("selector", "")
        if not _SELECTOR.fullmatch(selector):
            raise self.wrong("selector", f"{selector!r} is no label selector", 'write app=vllm or "tier in (a,b)"')
        found = Kubernetes(
            role=self.choice("role", ROLES, "pod"),
            namespaces=tuple(namespaces),
            selector=selector,
            port=port,
            annotated=bool(self.value("annotated", False, "true or false", lambda value: isinstance(value, bool))),
            api_url=self.text("api_url", "").rstrip("/"),
            access=self.access("token_file"),
        )
        self.end()
        return found

    def files(self) -> list[str]:
        found = self.texts("files")
        for one in found:
            if not Path(one).name or "*" in str(Path(one).parent):
                raise self.wrong(
                    "files", f"{one!r} is no file pattern", 'only its last part may hold a star: "/etc/t/*.json"'
                )
        return found

    def access(self, token_key: str) -> Access:
        token, authority = self.text(token_key, ""), self.text("ca_file", "")
        return Access(Path(token) if token else None, Path(authority) if authority else None)

    def labels(self) -> dict[str, str]:
        told = self.value("labels", {}, "a table of texts", lambda value: isinstance(value, dict))
        if not all(isinstance(value, str) for value in told.values()):
            raise self.wrong("labels", "holds something that is no text", 'write { "host.name" = "node-1" }')
        return dict(told)

    def table(self, key: str) -> _Table | None:
        told = self.value(key, None, "a table", lambda value: isinstance(value, dict))
        return None if told is None else _Table(self._source, f"{self._where}.{key}", told)

    def text(self, key: str, default: str) -> str:
        return str(self.value(key, default, "a text", lambda value: isinstance(value, str)))

    def texts(self, key: str) -> list[str]:
        told = self.value(key, [], "a list of texts", _are_texts)
        return list(told)

    def choice(self, key: str, options: Sequence[str], default: str) -> str:
        return str(self.value(key, default, f"one of {', '.join(options)}", lambda value: value in options))

    def seconds(self, key: str, default: float) -> float:
        return float(self.value(key, default, f"seconds, 0.1 to {LONGEST_S:g}", _is_duration))

    def value(self, key: str, default: Any, words: str, fits: Callable[[Any], bool]) -> Any:
        self._known.append(key)
        if key not in self._table:
            return default
        told = self._table[key]
        if not fits(told):
            raise self.wrong(key, f"{told!r} is not right", f"give {words}")
        return told

    def wrong(self, key: str, problem: str, remedy: str) -> InputError:
        return InputError(self._source, f"{self._where}.{key}" if key else self._where, problem, remedy)

    def end(self) -> None:
        for key in self._table:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, 1)
                raise self.wrong(
                    key, "is unknown", f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_port(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and 0 < value < 65536
    return isinstance(value, str) and bool(value)


def _is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0.1 <= value <= LONGEST_S
