"""A small HTTP server for tests: paths answered by functions of the query, and what was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Query = Mapping[str, str]
Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]  # status, JSON value or text, headers
Answers = Callable[[str, Query], Answer]
_POLL_S = 0.01


@dataclass
class Asked:
    """One request as it came."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class LocalServer:
    url: str
    asked: list[Asked] = field(default_factory=list)

    def of(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path == path]


@contextmanager
def answering(answers: Answers, port: int = 0) -> Iterator[LocalServer]:
    """Answers GET and POST (a form) by `answers(path, query)`; port 0: any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            texts = parts.query or self.rfile.read(length).decode()
            query = {key: values[-1] for key, values in parse_qs(texts, keep_blank_values=True).items()}
            server.asked.append(Asked(parts.path, query, dict(self.headers)))
            status, value, *more = answers(parts.path, query)
            body = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            headers: Mapping[str, str] = dict(*more)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server = LocalServer(f"http://127.0.0.1:{listening.server_port}")
    with serving_aside(listening):
        yield server


@contextmanager
def serving_aside(server: HTTPServer) -> Iterator[None]:
    """It answers in a thread of its own, and ends with the block at once: by itself it looks only twice a second whether it may."""
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
