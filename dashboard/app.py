"""The pages: a Dash application on the FastAPI application of the API, in one process with the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dash import ALL, Dash, Input, Output, State, no_update
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from phasewise.collector.store import Store
from phasewise.dashboard import shell
from phasewise.dashboard.access import Access
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.document import Document
from phasewise.dashboard.pages import requests, slices, trace, triage
from phasewise.dashboard.regions import in_browser, sink, view_of
from phasewise.dashboard.security import Gate, content_policy
from phasewise.dashboard.states import wrong_page
from phasewise.rules.errors import PhasewiseError
from phasewise.rules.load import Rulebook

LOG = logging.getLogger("phasewise.pages")
PAGES = (triage, requests, slices, trace)
_OUTERMOST = {Gate.__name__: 0, Access.__name__: 1}
_ASSETS = Path(__file__).resolve().parent / "assets"


def attach_dash(
    app: FastAPI,
    store: Store,
    *,
    rulebook: Rulebook,
    data_dir: Path,
    clock: Callable[[], int],
) -> Dash:
    """Adds the pages at `/`. The application must come from `dashboard.api.create_app`, whose answers they share."""
    answers: Answers = app.state.answers
    assert answers.store is store and answers.rulebook is rulebook, "pages and API answer from one store"
    assert answers.data_dir == data_dir and answers.clock is clock
    pages = Document(
        __name__,
        server=app,  # type: ignore[arg-type]
        routes_pathname_prefix="/",
        requests_pathname_prefix="/",
        assets_folder=str(_ASSETS),
        title="Phasewise",
        update_title=None,  # type: ignore[arg-type]
        suppress_callback_exceptions=True,
        include_assets_files=True,
    )
    # No callback here uses the socket that Dash would otherwise open from every page.
    pages.backend.websocket_capability = False
    pages.layout = shell.shell()
    _frame(pages, answers)
    for page in PAGES:
        page.register(pages, answers)
    # After every route of Dash, before the one it adds at start-up, which would answer any address with 200.
    app.add_api_route("/{rest:path}", _nothing, methods=["GET"], include_in_schema=False)
    # The gate stays outermost, then who may come in: Dash put its own layer around it, and must see the rewritten address of a page.
    app.user_middleware.sort(key=lambda layer: _OUTERMOST.get(getattr(layer.cls, "__name__", ""), len(_OUTERMOST)))
    app.state.page_paths = tuple(f"/{page.NAME}" for page in PAGES)
    app.state.content_policy = content_policy(pages.csp_hashes())
    return pages


def _nothing(rest: str) -> JSONResponse:
    return JSONResponse(
        {"error": "there is nothing at this address", "field": "path", "remedy": "start at /triage"}, status_code=404
    )


def _frame(pages: Dash, answers: Answers) -> None:
    """Callbacks of the shell; those that need no data run in the browser."""

    in_browser(pages, "boot", Output("query", "data"), Input("boot", "data"), initial=True)
    in_browser(pages, "path", Output("path", "data"), Input("query", "data"), State("path", "data"), initial=True)
    in_browser(pages, "zoomed", sink(first=True), Input({"type": "time-chart", "name": ALL}, "relayoutData"))

    @pages.callback(Output("main", "children"), Input("path", "data"))
    def page_layout(path: Mapping[str, Any] | None) -> Any:
        if path is None:
            return no_update
        view = view_of(path)
        page = next((page for page in PAGES if view.page == page.NAME), None)
        return page.layout(view) if page else wrong_page(view)

    @pages.callback(
        Output("nav", "children"), Output("range", "children"), Output("chips", "children"), Input("query", "data")
    )
    def bar(query: Mapping[str, Any] | None) -> Any:
        if query is None:
            return no_update, no_update, no_update
        view = view_of(query)
        return shell.nav_links(view), shell.range_picker(view, answers.now()), shell.chips(view)

    @pages.callback(
        Output("strip", "children"), Output("filter-values", "children"), Input("query", "data"), Input("tick", "data")
    )
    async def health(query: Mapping[str, Any] | None, _tick: object) -> Any:
        if query is None:
            return no_update, no_update
        return await asyncio.to_thread(_health, answers, query)


def _health(answers: Answers, query: Mapping[str, Any]) -> Any:
    view = view_of(query)
    strip = values = None
    with contextlib.suppress(PhasewiseError):
        strip = shell.health_strip(answers, view)
        values = shell.filter_values(answers)
    return strip, values
