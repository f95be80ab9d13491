"""The OpenAI-compatible server of the engine: routes, health, metrics, and an orderly end.

SIGTERM or SIGINT: new calls get 503 while running ones may end within `drain_s`, then telemetry is flushed and the exit code is 0.
A second signal ends what runs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from phasewise.instrumented_engine.export import SpanExport, StepBatch, make_exporter
from phasewise.instrumented_engine.metrics import counter_lines
from phasewise.instrumented_engine.serving.call import Call, told
from phasewise.instrumented_engine.serving.context_store import ContextStore
from phasewise.instrumented_engine.serving.desk import Desk
from phasewise.instrumented_engine.serving.launch import Launched, launch
from phasewise.instrumented_engine.serving.openai_answers import Answer
from phasewise.instrumented_engine.serving.openai_api import error_document, parse_body
from phasewise.instrumented_engine.serving.server_settings import ServerSettings
from phasewise.instrumented_engine.serving.trace_parent import parse_traceparent
from phasewise.instrumented_engine.serving.wall_clock import WallClock
from phasewise.rules.errors import InputError, MachineError

LOGGER = logging.getLogger("phasewise.engine")
FLUSH_S = 5.0
LOOK_S = 0.02
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class TooLarge(Exception):
    """The body is longer than the server takes."""


class EngineServer:
    """One engine behind HTTP, in the process and loop that run it."""

    def __init__(self, settings: ServerSettings) -> None:
        """Loads the model. Raises InputError or MachineError."""
        self.settings = settings
        self.clock = WallClock()
        self.launched: Launched = launch(settings, self.clock)
        self.instance = settings.instance or uuid.uuid4().hex[:16]
        service = self.launched.service
        exporter = make_exporter(settings.export)
        self.export = SpanExport(exporter, settings.export, self._resource()) if exporter else None
        if self.export is not None:
            service.steps = StepBatch(self.export, os.urandom(16), service.kv_blocks_total)
        self.gpu_metrics, self.gpu_told = None, "device readings are switched off"
        if settings.gpu_metrics and settings.executor == "torch":
            from phasewise.instrumented_engine.serving.gpu_metrics import open_gpu_metrics

            self.gpu_metrics, self.gpu_told = open_gpu_metrics(settings.export, self._resource())
        folder = settings.context_folder
        self.desk = Desk(
            service=service,
            tokenizer=self.launched.tokenizer,
            simulated=settings.executor == "simulated",
            export=self.export,
            store=ContextStore(folder, delay_s=settings.context_delay_s) if folder else None,
            tools={tool.name: tool for tool in settings.tools},
            fail_on_tool_error=settings.fail_on_tool_error,
            output_tokens=settings.output_tokens,
        )
        self.app = self._routes()
        self.ready: dict[str, Any] | None = None  # the ready line, once clients can come
        self._calls = itertools.count()
        self._created_s = int(time.time())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._signals = 0

    # --- routes -------------------------------------------------------------------------------------------------------

    def _routes(self) -> FastAPI:
        app = FastAPI(title="Phasewise engine", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/version", self._version, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_exception_handler(HTTPException, _no_such_route)
        return app

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        arrival_ns = self.clock.now_ns()
        given = request.headers.get("x-request-id")
        client_id = given if given and _REQUEST_ID.fullmatch(given) else None
        request_id = client_id or uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        if self.desk.draining:
            document = error_document("the server is shutting down", "server_error", code="shutting_down")
            return JSONResponse(document, 503, headers={**headers, "Retry-After": "5"})
        try:
            generation = parse_body(await _body(request, self.settings.max_body_bytes), chat=chat)
        except ClientDisconnect:  # before the call was whole: nobody is there to be answered
            return Response(status_code=499)
        except TooLarge:
            message = f"the body is longer than {self.settings.max_body_bytes} bytes (send a shorter prompt)"
            return JSONResponse(error_document(message, "invalid_request_error"), 413, headers=headers)
        except InputError as problem:
            document = error_document(told(problem), "invalid_request_error", problem.field)
            return JSONResponse(document, 400, headers=headers)
        if generation.model != self.launched.model:
            return JSONResponse(self._other_model(generation.model), 404, headers=headers)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        call = Call(
            self.desk,
            generation,
            Answer(name, chat, self.launched.model, int(time.time())),
            arrival_ns=arrival_ns,
            key=f"{name}-{next(self._calls)}",
            route=request.url.path,
            client_request_id=client_id,
            parent=parse_traceparent(request.headers.get("traceparent")),
            headers=headers,
        )
        return _CallResponse(call)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described()]}

    async def _model(self, name: str) -> Response:
        served = name == self.launched.model
        return JSONResponse(self._described()) if served else JSONResponse(self._other_model(name), 404)

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.launched.model, "object": "model", "created": self._created_s, "owned_by": "phasewise",
            "max_model_len": self.launched.service.config.max_model_tokens,
        }  # fmt: skip

    def _other_model(self, name: str) -> dict[str, Any]:
        message = f"the model {name!r} is not served here; {self.launched.model!r} is (GET /v1/models)"
        return error_document(message, "invalid_request_error", "model", "model_not_found")

    async def _health(self) -> Response:
        alive = self.launched.service.alive
        status = "draining" if self.desk.draining else "ok" if alive else "engine stopped"
        document = {"status": status, "model": self.launched.model, "instance": self.instance, **self.launched.facts}
        return JSONResponse(document, 200 if status == "ok" else 503)

    async def _version(self) -> dict[str, str]:
        return {"version": _version()}

    async def _metrics(self) -> Response:
        lines = counter_lines(
            "phasewise_engine_step_failures", "Steps that raised.", self.launched.service.step_failures
        )
        if self.export is not None:
            for name in ("sent", "failed", "dropped"):
                told_of = f"Telemetry spans {name}."
                lines += counter_lines(f"phasewise_engine_spans_{name}", told_of, getattr(self.export, name))
        text = self.launched.service.render_metrics() + "\n".join(lines) + "\n"
        return PlainTextResponse(text, media_type=_METRICS_TYPE)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def serve(self, opened: socket.socket) -> None:
        """Until a signal; prints the ready line when clients can come."""
        self._loop = loop = asyncio.get_running_loop()
        self.launched.service.start(loop)
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, lifespan="off", server_header=False, timeout_keep_alive=60, ws="none",
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        http = _QuietServer(config)
        serving = loop.create_task(http.serve(sockets=[opened]))
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self._signalled)
        while not http.started and not serving.done():
            await asyncio.sleep(0.005)
        if http.started:
            self._say_ready(opened)
            waiting = loop.create_task(self._ending.wait())
            await asyncio.wait((waiting, serving), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self.desk.draining = True
            await self._drain()
        http.should_exit = True
        await serving
        await self._flush()

    def end(self) -> None:
        """What a signal does, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        self._signals += 1
        self.desk.draining = True
        self._ending.set()
        if self._signals > 1:
            self._stop_calls()

    async def _drain(self) -> None:
        """Running calls may end; what is left after `drain_s` is ended."""
        until = time.monotonic() + self.settings.drain_s
        while self.desk.calls and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if self.desk.calls:
            LOGGER.warning(
                "%d calls did not end within %g s and are cancelled", len(self.desk.calls), self.settings.drain_s
            )
            self._stop_calls()
            until = time.monotonic() + FLUSH_S
            while self.desk.calls and time.monotonic() < until:
                await asyncio.sleep(LOOK_S)

    def _stop_calls(self) -> None:
        for call in list(self.desk.calls):
            call.stop()

    async def _flush(self) -> None:
        if self.desk.tasks:
            await asyncio.wait(self.desk.tasks, timeout=FLUSH_S)
        await self.launched.service.stop(FLUSH_S)
        if self.export is not None and not await asyncio.to_thread(self.export.close, FLUSH_S):
            LOGGER.warning("the receiver of spans did not answer in time; the last ones are lost")
        if self.gpu_metrics is not None:
            await asyncio.to_thread(self.gpu_metrics.close)

    def _say_ready(self, opened: socket.socket) -> None:
        host, port = opened.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.ready = {
            "ready": True, "url": f"http://{shown}:{port}", "port": port, "model": self.launched.model,
            "instance": self.instance, **self.launched.facts,
        }  # fmt: skip
        print(json.dumps(self.ready), flush=True)

    def _resource(self) -> dict[str, str | int | float]:
        about = {f"phasewise.{name}": value for name, value in self.launched.facts.items()}
        return {
            "service.name": self.settings.service_name, "service.instance.id": self.instance, "service.version": _version(),
            "phasewise.model": self.launched.model, **about, **self.settings.marks,
        }  # fmt: skip


def serve(settings: ServerSettings) -> int:
    """Serves until SIGTERM or SIGINT; 0. Raises InputError or MachineError where it cannot begin."""
    opened = listen(settings.host, settings.port)
    try:
        server = EngineServer(settings)
        where = "to " + (settings.export.endpoint or "the endpoint of the environment") if server.export else "nowhere"
        said = f"executor {settings.executor}, spans go {where}"
        if settings.executor == "torch":
            said += f"; {server.gpu_told}"
        print(f"phasewise engine: {said}", file=sys.stderr, flush=True)
        asyncio.run(server.serve(opened))
    finally:
        opened.close()
    return 0


class _CallResponse(Response):
    """Hands the connection to the call, which writes its own bytes."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call.run(receive, send)


class _QuietServer(uvicorn.Server):
    """Signals are the engine's own business: new calls are answered with 503 until the running ones have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _no_such_route(request: Request, problem: Exception) -> Response:
    """404 and 405 in the shape in which clients of the API read errors."""
    assert isinstance(problem, HTTPException)
    said = "no such address" if problem.status_code == HTTPStatus.NOT_FOUND else problem.detail
    document = error_document(f"{request.method} {request.url.path}: {said}", "invalid_request_error")
    return JSONResponse(document, problem.status_code, headers=problem.headers)


async def _body(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise TooLarge
    return bytes(body)


def listen(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded, so that a busy port is known at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((host, port))
        except OSError:
            opened.close()
            raise
    except OSError as problem:
        raise MachineError(
            f"cannot listen on {host}:{port}: {problem.strerror or problem} (give another --port)"
        ) from problem
    return opened


def _version() -> str:
    try:
        return version("phasewise")
    except PackageNotFoundError:
        return "unknown"
