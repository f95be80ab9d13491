"""The HTTP API: the same answers as the pages and the command line, as JSON.

Errors are ``{"error", "field", "remedy"}`` with 400 for a wrong question, 404 for something that is not there, 413 and 415 for
a body that cannot be taken, 429 while too many questions wait, 503 where the store cannot be read or an answer takes longer than
15 s (up to 120 s where the request says `Prefer: wait=120`). Times are RFC 3339, `now-15m`, or digits.
"""

from __future__ import annotations

import difflib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from phasewise.analyzer.window import parse_slo
from phasewise.collector.exchange import SPANS
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard import answers as asked
from phasewise.dashboard import exporting, housekeeping, marks, request_tables, tables
from phasewise.dashboard.access import Access, Posture, Sessions, caller, log_content_access
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.data_health import data_health as data_health_of
from phasewise.dashboard.exposition import exposition
from phasewise.dashboard.login import add_login
from phasewise.dashboard.opening import AGAIN_S
from phasewise.dashboard.security import Gate, allowed_hosts
from phasewise.dashboard.state import FOREIGN_KEYS, OWN_KEYS, View
from phasewise.dashboard.work import Limits
from phasewise.rules.errors import InputError, PhasewiseError, Stopped, TooBusy
from phasewise.rules.load import Rulebook
from phasewise.rules.secret_text import hidden

LOG = logging.getLogger("phasewise.api")
_SHOWN = 80
_ANYWHERE = FOREIGN_KEYS | {"from", "to", "v"}  # a link from a board carries its time range, whatever it asks for
MAX_JSON_BYTES = 16 * 2**20
INGEST_KINDS = ("auto", "scrapes", "spans", "client", "facts")

Texts = Annotated[list[str] | None, Query()]


def error_answer(status: int, error: str, field: str = "", remedy: str = "") -> JSONResponse:
    return JSONResponse({"error": hidden(error), "field": hidden(field), "remedy": remedy}, status_code=status)


def _for_now(answer: JSONResponse) -> JSONResponse:
    answer.headers["retry-after"] = str(AGAIN_S)
    return answer


def create_app(
    store: Store,
    writer: Writer,
    rulebook: Rulebook,
    *,
    data_dir: Path,
    clock: Callable[[], int],
    serve_info: Mapping[str, object] | None = None,
    site_slo: str = "",
    posture: Posture | None = None,
) -> FastAPI:
    """The application without its pages; `dashboard.app.attach_dash` adds them.

    serve_info: `host` as bound, and the ports of the receiver, which the first-run card names. site_slo: the objectives that
    hold where a request names none, in the form of `slo=`; InputError where they cannot be read. posture: with the door that asks
    for keys; None asks nobody.
    """
    parse_slo(site_slo)
    answers = Answers(store, writer, rulebook, data_dir, clock, dict(serve_info or {}), site_slo)
    answers.posture = posture or Posture()
    app = FastAPI(title="Phasewise", version=asked.package_version(), docs_url=None, redoc_url=None, openapi_url=None)
    app.state.answers = answers
    _errors(app)
    _probes(app, answers)
    _reads(app, answers)
    _writes(app, answers)
    sessions = Sessions()
    if answers.posture.door:
        add_login(app, answers.posture.door, sessions, data_dir, clock)
    _not_found(app)
    bound = answers.serve_info.get("host")
    app.add_middleware(Limits, works=answers.works)
    if answers.posture.door:
        app.add_middleware(Access, door=answers.posture.door, sessions=sessions)
    app.add_middleware(Gate, hosts=allowed_hosts(str(bound) if bound else None), state=app.state)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(InputError)
    async def wrong_input(_: Request, error: InputError) -> JSONResponse:
        return error_answer(400, error.told, str(error.source), error.remedy)

    @app.exception_handler(RequestValidationError)
    async def wrong_type(_: Request, error: RequestValidationError) -> JSONResponse:
        """What FastAPI refuses by the types of a route: the first of its faults, in our words."""
        first = error.errors()[0]
        where = [str(part) for part in first.get("loc", ())]
        name = where[-1] if where else "request"
        if first.get("type") == "missing":
            return error_answer(400, f"{name}: is missing", name, f"send {name}= with the request")
        shown = repr(first.get("input"))[:_SHOWN]
        return error_answer(400, f"{name}: {shown}: cannot be read", name, str(first.get("msg") or "").lower())

    @app.exception_handler(Stopped)
    async def given_up(_: Request, error: Stopped) -> JSONResponse:
        if isinstance(error, TooBusy):  # alone it passes by itself
            return _for_now(error_answer(429, error.problem, "from", error.remedy))
        return error_answer(503, error.problem, "from", error.remedy)

    @app.exception_handler(PhasewiseError)
    async def not_now(_: Request, error: PhasewiseError) -> JSONResponse:
        return _for_now(error_answer(503, str(error), "", "see /api/v1/health and the server's log; try again"))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return error_answer(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        reference = secrets.token_hex(4)
        LOG.error("error %s at %s", reference, request.url.path, exc_info=error)
        return error_answer(
            500, f"internal error {reference}", "", "the server's log has the details under this number"
        )


def _probes(app: FastAPI, answers: Answers) -> None:
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    def readyz() -> Response:
        health = answers.health()
        # Answered without a key: then it names no file.
        error = None if answers.posture.door_required else health["error"]
        return JSONResponse({"status": health["status"], "error": error}, 200 if health["status"] == "ok" else 503)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(exposition(answers), media_type="text/plain; version=0.0.4; charset=utf-8")


def _takes(*names: str, view: bool = False) -> Any:
    """What a route may be asked: a parameter that nobody reads would be answered as if it had been. view: also what the
    address of a page may hold."""
    known = (*(OWN_KEYS if view else ()), *names)

    async def check(request: Request) -> None:  # a plain function would be handed to a thread, for every request
        for name in request.query_params:
            if name in known or name in _ANYWHERE or name.startswith("var-"):
                continue
            close = difflib.get_close_matches(name, known, n=1)
            guess = f"did you mean {close[0]}=? " if close else ""
            told = f"known are {', '.join(known)} and var-NAME" if known else "this address takes none"
            raise InputError(name[:_SHOWN], "", "is not a parameter of this address", f"{guess}{told}")

    return Depends(check)


def _view(request: Request) -> View:
    return View("api", None, tuple(request.query_params.multi_items()), request.app.state.answers.site_slo)


def _reads(app: FastAPI, answers: Answers) -> None:
    @app.get("/api/v1/health", dependencies=[_takes()])
    def health() -> Response:
        told = answers.health()
        return JSONResponse(told, 200 if told["status"] == "ok" else 503)

    @app.get("/api/v1/pulse", dependencies=[_takes()])
    def pulse() -> Mapping[str, object]:
        """The same for the pages, which show a degraded store themselves and need no failed request in the console."""
        return answers.health()

    @app.get("/api/v1/work", dependencies=[_takes("tab")])
    async def work(tab: str) -> Mapping[str, object]:
        """What the parts of an open page wait for. Not in a thread: those may all be taken by what is asked about."""
        return answers.works.of(tab)

    @app.delete("/api/v1/work", dependencies=[_takes("tab", "part")])
    async def cancel(tab: str, part: str) -> Mapping[str, object]:
        return {"cancelled": answers.works.cancel(tab, part)}

    @app.get("/api/v1/verdict", dependencies=[_takes(view=True)])
    def verdict(request: Request) -> Mapping[str, object]:
        view = _view(request)
        return answers.verdict(view.window(answers.clock()), view.filters, view.slo)

    @app.get("/api/v1/requests", dependencies=[_takes("cursor", "limit", "display", view=True)])
    def requests(
        request: Request, cursor: str | None = None, limit: int = 100, display: bool = False
    ) -> Mapping[str, object]:
        return request_tables.request_list(answers, _view(request), cursor=cursor, limit=limit, display=display)

    @app.get("/api/v1/requests/{identifier:path}", dependencies=[_takes()])
    async def one_request(identifier: str) -> Any:
        found = [] if answers.is_absent(identifier) else await run_in_threadpool(answers.request, identifier)
        if not found:
            return error_answer(
                404, f"no request is known as {identifier!r}", "id", "not stored, sampled out, or past retention"
            )
        return found[0] if len(found) == 1 else found

    @app.get("/api/v1/interference", dependencies=[_takes(view=True)])
    def interference(request: Request) -> Mapping[str, object]:
        view = _view(request)
        return answers.interference(view.window(answers.clock()), view.filters)

    @app.get("/api/v1/interference/{identifier:path}", dependencies=[_takes()])
    def request_interference(identifier: str) -> Any:
        found = answers.request_interference(identifier)
        if not found:
            return error_answer(
                404, f"no request is known as {identifier!r}", "id", "not stored, sampled out, or past retention"
            )
        return found[0] if len(found) == 1 else found

    @app.get("/api/v1/turns", dependencies=[_takes("from", "to", "limit")])
    def turns(request: Request, limit: int = 100) -> Mapping[str, object]:
        return request_tables.turn_list(answers, _view(request), limit)

    @app.get("/api/v1/slices", dependencies=[_takes("by", view=True)])
    def slices(request: Request, by: Texts = None, metric: str = "ttft") -> Mapping[str, object]:
        return tables.slice_list(answers, _view(request), tuple(by or ("input",)), metric)

    @app.get("/api/v1/differences", dependencies=[_takes("by", view=True)])
    def differences(request: Request, by: Texts = None, metric: str = "ttft") -> Mapping[str, object]:
        return tables.difference_list(answers, _view(request), tuple(by or ()), metric)

    @app.get("/api/v1/timeline", dependencies=[_takes(view=True)])
    def timeline(request: Request) -> Mapping[str, object]:
        return tables.timeline(answers, _view(request))

    @app.get("/api/v1/data-health", dependencies=[_takes(view=True)])
    def data_health(request: Request) -> Mapping[str, object]:
        return data_health_of(answers, _view(request))

    @app.get("/api/v1/imports/{file}", dependencies=[_takes()])
    def import_position(file: str) -> Mapping[str, object]:
        return marks.import_position(answers, file)

    @app.get("/api/v1/export/{table}", dependencies=[_takes("cursor", view=True)])
    def export(request: Request, table: str, cursor: str = "") -> Response:
        asked = request.query_params
        chosen = exporting.selection_of(asked.get("from"), asked.get("to"), _view(request).filters, answers.clock())
        with_content = caller().allows("content")
        source = (answers.reader, answers.data_dir, table, chosen, cursor)
        rows, following = exporting.page_of(*source, with_content=with_content)
        if table == SPANS and rows.num_rows and with_content and answers.posture.content:
            log_content_access(answers.data_dir, answers.clock(), f"export of {rows.num_rows} spans")
        return Response(
            exporting.to_bytes(rows),
            media_type="application/vnd.apache.arrow.stream",
            headers={"X-Next-Cursor": following},
        )

    @app.get("/api/v1/annotations", dependencies=[_takes("from", "to")])
    def annotations(request: Request) -> Mapping[str, object]:
        return marks.annotation_list(answers, _view(request))


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"the body is larger than {most >> 20} MiB; send it in parts")
        parts.append(part)
    return b"".join(parts)


async def json_body(request: Request) -> Any:
    """The JSON value of a request; InputError where it is none."""
    try:
        return json.loads(await _body(request, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError("body", "", f"is not JSON: {error}", "send one JSON object or array") from None


def _writes(app: FastAPI, answers: Answers) -> None:
    @app.post("/api/v1/explain-summary", dependencies=[_takes()])
    async def explain_summary(request: Request) -> Any:
        from phasewise.analyzer.summary import explain_summary as explain

        document = await json_body(request)
        if isinstance(document, list):
            return [
                await run_in_threadpool(explain, _object(one, f"[{i}]"), answers.rulebook)
                for i, one in enumerate(document)
            ]
        return await run_in_threadpool(explain, _object(document, ""), answers.rulebook)

    @app.post("/api/v1/annotations", dependencies=[_takes()])
    async def annotate(request: Request) -> Any:
        told = _object(await json_body(request), "")
        return JSONResponse(await run_in_threadpool(marks.annotate, answers, told), 201)

    @app.post("/api/v1/outcomes", dependencies=[_takes()])
    async def outcome(request: Request) -> Any:
        told = _object(await json_body(request), "")
        return JSONResponse(await run_in_threadpool(marks.judge, answers, told), 201)

    @app.post("/api/v1/db/snapshot", dependencies=[_takes()])
    async def snapshot(request: Request) -> Any:
        """For a backup: the answer names a folder below the data folder, which whoever asks copies and removes."""
        _object(await json_body(request), "")
        return JSONResponse(await run_in_threadpool(housekeeping.snapshot, answers.store, answers.data_dir), 201)

    @app.post("/api/v1/db/purge", dependencies=[_takes()])
    async def purge(request: Request) -> Any:
        told = _object(await json_body(request), "")
        where, before = _texts(told, "where"), str(told.get("before") or "")
        now = answers.clock()
        work = (answers.store, answers.writer, answers.data_dir, where, before, now)
        return await run_in_threadpool(housekeeping.purged, *work)

    @app.post(
        "/api/v1/ingest", dependencies=[_takes("kind", "name", "number", "file", "position", "modified", "instance")]
    )
    async def ingest(
        request: Request,
        kind: str = "auto",
        name: str = "upload",
        number: int = 0,
        file: str = "",
        position: str = "",
        modified: int = 0,
        instance: str = "",
    ) -> Any:
        if kind not in INGEST_KINDS:
            raise InputError("kind", kind, "is not a kind of data", f"one of {', '.join(INGEST_KINDS)}")
        body = await _body(request, marks.MAX_BODY_BYTES)
        if not body:
            raise InputError("body", "", "is empty", "send the content of the file")
        sent = marks.Sent(kind, name, number, file, position, modified, instance)
        asking = caller()
        return await run_in_threadpool(marks.take_in, answers, body, sent, asking.tenant if asking.key else None)


def _texts(told: Mapping[str, object], name: str) -> list[str]:
    found = told.get(name) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError("body", name, "is not a list of texts", f'send {{"{name}": ["KEY:OP:VALUE"]}}')
    return found


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InputError("body", where, "is not a JSON object", "send an object")
    return value


def _not_found(app: FastAPI) -> None:
    """Everything under these prefixes that no route above took: Dash would answer it with its page and 200."""

    def nothing(rest: str = "") -> JSONResponse:
        return error_answer(
            404,
            "there is nothing at this address",
            "path",
            "the API is under /api/v1, the pages are /triage, /requests and /slices",
        )

    methods: Sequence[str] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    paths: Iterable[str] = ("/api", "/v1", "/metrics", "/livez", "/readyz")
    for path in paths:
        app.add_api_route(f"{path}/{{rest:path}}", nothing, methods=list(methods), include_in_schema=False)
    for path in ("/api", "/v1"):
        app.add_api_route(path, nothing, methods=list(methods), include_in_schema=False)
