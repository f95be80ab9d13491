"""A Kubernetes API of one kind of object, for tests: lists in pages, and watches that send what a test gives them.

Answers have the shape of those of a real API server (v1.33): a list with metadata.resourceVersion and continue, changes as JSON
lines, faults as Status objects.
"""

from __future__ import annotations

import json
import queue
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from local_http import serving_aside

Object = dict[str, Any]
_REASONS = {401: "Unauthorized", 403: "Forbidden", 410: "Expired", 500: "InternalError"}


def pod(name: str, address: str | None = "10.0.0.1", *, uid: str | None = None, **parts: Any) -> Object:
    """A pod of one container, as `kubectl get pod -o json` shows it. parts: annotations, labels, ports, phase, version, deleted."""
    metadata: Object = {
        "name": name,
        "namespace": parts.get("namespace", "inference"),
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(parts.get("version", "100")),
        "labels": parts.get("labels", {"app": "vllm"}),
        "annotations": parts.get("annotations", {}),
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-7d9c5b8f6b", "controller": True}
        ],
    }
    if parts.get("deleted"):
        metadata["deletionTimestamp"] = "2026-11-29T10:00:00Z"
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {
            "nodeName": parts.get("node", "node-1"),
            "serviceAccountName": "default",
            "containers": [
                {
                    "name": "engine",
                    "image": "vllm/vllm-openai:v0.33.0",
                    "ports": parts.get("ports", [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]),
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }
            ],
        },
        "status": {
            "phase": parts.get("phase", "Running"),
            "podIP": address,
            "hostIP": "192.168.1.4",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def status(code: int, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS.get(code, "Unknown"),
        "code": code,
    }


@dataclass
class ApiServer:
    """objects: what a list answers; changes: what watches send, in order; None ends a watch. refusing: a fault for all."""

    url: str = ""
    objects: list[Object] = field(default_factory=list)
    version: str = "100"
    page: int = 500
    refusing: tuple[int, str] | None = None
    watch_refusing: tuple[int, str] | None = None
    changes: queue.Queue[Object | None] = field(default_factory=queue.Queue)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    ended: bool = False

    def change(self, kind: str, found: Object) -> None:
        self.changes.put({"type": kind, "object": found})

    def lists(self) -> list[dict[str, str]]:
        return [query for _, query in self.asked if "watch" not in query]

    def watches(self) -> list[dict[str, str]]:
        return [query for _, query in self.asked if "watch" in query]


@contextmanager
def kubernetes(tls: tuple[Path, Path] | None = None) -> Iterator[ApiServer]:
    """tls: certificate and key."""
    api = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            api.asked.append((parts.path, query))
            api.tokens.append(self.headers.get("Authorization", ""))
            refusing = api.refusing or (api.watch_refusing if "watch" in query else None)
            if refusing:
                self._json(refusing[0], status(*refusing))
            elif "watch" in query:
                self._watch()
            else:
                self._json(200, self._list(parts.path, query))

        def _list(self, path: str, query: Mapping[str, str]) -> Object:
            start, limit = int(query.get("continue", "0")), min(int(query["limit"]), api.page)
            metadata: Object = {"resourceVersion": api.version}
            if start + limit < len(api.objects):
                metadata |= {"continue": str(start + limit), "remainingItemCount": len(api.objects) - start - limit}
            kind = "EndpointSliceList" if path.endswith("endpointslices") else "PodList"
            return {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": api.objects[start : start + limit]}

        def _watch(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not api.ended:
                try:
                    change = api.changes.get(timeout=0.05)
                except queue.Empty:
                    continue
                if change is None:
                    break
                line = json.dumps(change).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
                if change["type"] == "ERROR":
                    break
            self.wfile.write(b"0\r\n\r\n")

        def _json(self, code: int, value: Object) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    api.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    with serving_aside(server):
        try:
            yield api
        finally:
            api.ended = True
