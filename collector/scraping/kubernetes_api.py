"""The Kubernetes API as far as discovery needs it: list a kind of objects in pages, then watch it change."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phasewise.collector.scraping.http import Refused, client_of, headers_of
from phasewise.collector.scraping.jobs import EVERY_NAMESPACE, SERVICE_ACCOUNT, Access, Kubernetes
from phasewise.rules.errors import InputError

PAGE = 500
OBJECTS = 5_000  # more pods than this are no set of engines: narrow the selector
ANSWER_BYTES = 64 << 20
LINE_BYTES = 4 << 20
LIST_S = 30.0
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_PATHS = {
    "pod": ("/api/v1", "pods"),
    "endpointslice": ("/apis/discovery.k8s.io/v1", "endpointslices"),
}
Object = Mapping[str, Any]


class Expired(Exception):
    """410: what was watched from is too old; list again."""


class Unanswered(Exception):
    """The API did not answer as asked: why, and what to do."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API is, and whose token is used."""

    url: str
    access: Access
    namespaces: tuple[str, ...]


def cluster_of(wanted: Kubernetes, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> Cluster:
    """The stated API, else that of the cluster around this process. Raises Unanswered outside of one."""
    url, access = wanted.api_url, wanted.access
    if not url:
        host, port = environment.get(_HOST), environment.get(_PORT, "443")
        if not host:
            raise Unanswered(f"{_HOST} is not set: this runs in no cluster; give api_url, token_file and ca_file")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        access = Access(access.token_file or account / "token", access.ca_file or account / "ca.crt")
    namespaces = wanted.namespaces
    if not namespaces:
        try:
            namespaces = ((account / "namespace").read_text(encoding="utf-8").strip(),)
        except OSError:
            raise Unanswered('which namespace is meant is not known; give namespaces = ["NAME"]') from None
    return Cluster(url, access, (EVERY_NAMESPACE,) if EVERY_NAMESPACE in namespaces else namespaces)


class Collection:
    """The objects of one kind in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, wanted: Kubernetes, watch_s: float) -> None:
        root, self._kind = _PATHS[wanted.role]
        inside = "" if namespace == EVERY_NAMESPACE else f"/namespaces/{namespace}"
        self._where = "every namespace" if namespace == EVERY_NAMESPACE else f"namespace {namespace}"
        self._url = f"{cluster.url}{root}{inside}/{self._kind}"
        self._access = cluster.access
        self._selector = {"labelSelector": wanted.selector} if wanted.selector else {}
        self._watch_s = watch_s
        try:
            self._client = client_of(cluster.access, LIST_S, "kubernetes")
        except InputError as error:
            raise Unanswered(str(error)) from None

    def close(self) -> None:
        self._client.close()

    def listed(self) -> tuple[list[Object], str]:
        """All objects, and the version to watch from. Raises Unanswered, Expired."""
        found: list[Object] = []
        page: dict[str, str] = {}
        while True:
            answer = self._json({"limit": str(PAGE), **self._selector, **page})
            items, metadata = answer.get("items"), answer.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict):
                raise Unanswered(f"{self._url} does not answer like a list of {self._kind}; check api_url")
            found += [item for item in items if isinstance(item, dict)]
            if len(found) > OBJECTS:
                raise Unanswered(f"more than {OBJECTS:,} {self._kind} match in {self._where}; narrow the selector")
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            page = {"continue": str(metadata["continue"])}

    def watch(self, version: str) -> Iterator[list[tuple[str, Object]]]:
        """Changes as they come: (ADDED, MODIFIED, DELETED or BOOKMARK, the object), those of one packet together.

        Ends when the server ends it. Raises Unanswered, Expired.
        """
        asked = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{self._watch_s:.0f}",
            **self._selector,
        }
        rest = b""
        patience = httpx.Timeout(LIST_S, read=self._watch_s + LIST_S)
        with self._asked(asked, patience) as answer:
            for chunk in answer.iter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LINE_BYTES:
                    raise Unanswered(f"one change of {self._kind} is longer than {LINE_BYTES >> 20} MiB")
                if lines:
                    yield [self._change(line) for line in lines if line.strip()]

    def _change(self, line: bytes) -> tuple[str, Object]:
        try:
            change = json.loads(line)
            kind, found = str(change["type"]), change["object"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unanswered(f"a change of {self._kind} cannot be read: {line[:60]!r}") from None
        if kind == "ERROR":
            if isinstance(found, dict) and found.get("code") == 410:
                raise Expired
            raise Unanswered(f"watching {self._kind} failed: {_message(found)}")
        if not isinstance(found, dict):
            raise Unanswered(f"a change of {self._kind} holds no object")
        return kind, found

    def _json(self, parameters: Mapping[str, str]) -> Mapping[str, Any]:
        body, size = [], 0
        until = time.monotonic() + LIST_S
        with self._asked(parameters, httpx.Timeout(LIST_S)) as answer:
            for chunk in answer.iter_bytes():
                size += len(chunk)
                if size > ANSWER_BYTES or time.monotonic() > until:
                    raise Unanswered(f"a page of {self._kind} takes more than {ANSWER_BYTES >> 20} MiB or {LIST_S:g} s")
                body.append(chunk)
        try:
            told = json.loads(b"".join(body))
        except (ValueError, RecursionError):
            raise Unanswered(f"{self._url} does not answer with JSON; check api_url") from None
        return told if isinstance(told, dict) else {}

    def _asked(self, parameters: Mapping[str, str], patience: httpx.Timeout) -> _Answer:
        try:
            headers = {**headers_of(self._access), "Accept": "application/json"}
        except Refused as error:
            raise Unanswered(str(error)) from None
        return _Answer(
            self, self._client.build_request("GET", self._url, params=dict(parameters), headers=headers), patience
        )

    def send(self, request: httpx.Request) -> httpx.Response:
        return self._client.send(request, stream=True)

    def refusal(self, status: int, said: str) -> Exception:
        """What an answer other than 200 means."""
        if status == 410:
            return Expired()
        if status == 401:
            return Unanswered(f"the API refuses the token (401{said}): mount the service account's, or give token_file")
        if status == 403:
            return Unanswered(
                f"the API forbids it (403{said}): let a Role of this service account get, list and watch {self._kind} "
                f"in {self._where}, as deploy/kubernetes does"
            )
        if 300 <= status < 400:
            return Unanswered(f"the API answers {status} and leads elsewhere: give the address it leads to as api_url")
        return Unanswered(f"the API answers {status}{said}")


class _Answer:
    """A streamed answer, checked; its faults in our words."""

    def __init__(self, owner: Collection, request: httpx.Request, patience: httpx.Timeout) -> None:
        request.extensions["timeout"] = patience.as_dict()
        self._owner, self._request = owner, request
        self._answer: httpx.Response | None = None

    def __enter__(self) -> _Answer:
        try:
            self._answer = self._owner.send(self._request)
            if self._answer.status_code != 200:
                body = self._answer.read()[:4096]
                self._answer.close()
                raise self._owner.refusal(self._answer.status_code, _said(body))
        except httpx.HTTPError as error:
            raise Unanswered(_unreachable(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        assert self._answer is not None
        self._answer.close()

    def iter_bytes(self) -> Iterator[bytes]:
        assert self._answer is not None
        try:
            yield from self._answer.iter_bytes()
        except httpx.HTTPError as error:
            raise Unanswered(_unreachable(error)) from None


def _unreachable(error: httpx.HTTPError) -> str:
    told = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        return f"the API's certificate is not trusted: name its authority in ca_file ({told[:120]})"
    return f"no answer from the API: {told[:200]}"


def _said(body: bytes) -> str:
    try:
        return f": {_message(json.loads(body))}"
    except (ValueError, RecursionError):
        return ""


def _message(status: object) -> str:
    """What a Status object says, in a line."""
    told = status.get("message") if isinstance(status, dict) else None
    return "".join(sign if sign.isprintable() else " " for sign in str(told or "no reason given"))[:200]
