"""Regions: the parts of a page that load by themselves.

A region is built by a pure function of the answers and the view. Here stands, once, what happens around it: it runs off the
event loop, old figures stay while new ones load or fail, a failure becomes a sentence with a number, and what takes too long
is stopped, by the clock or by whoever waits for it (`dashboard.work`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, no_update

from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View, parse_view
from phasewise.dashboard.states import failed, stopped, wrong_question
from phasewise.dashboard.work import Work, at_hand
from phasewise.rules.errors import InputError, MachineError, Stopped

LOG = logging.getLogger("phasewise.pages")
Build = Callable[[Answers, View], Any]


def in_browser(app: Dash, function: str, output: Output, *inputs: Input | State, initial: bool = False) -> None:
    """A callback that runs in the browser: a function of `assets/phasewise.js`."""
    name = ClientsideFunction(namespace="phasewise", function_name=function)
    app.clientside_callback(name, output, *inputs, prevent_initial_call=not initial)  # type: ignore[no-untyped-call]


def sink(*, first: bool = False) -> Output:
    """The output of callbacks that only act: Dash wants one. The first that names it owns it."""
    return Output("sink", "data", allow_duplicate=not first)


def view_of(query: Mapping[str, Any] | None) -> View:
    """The view in the browser's query store."""
    told = query or {}
    return parse_view(str(told.get("path") or "/"), str(told.get("search") or ""))


def started(answers: Answers, part: str, query: Mapping[str, Any], tick: Mapping[str, Any] | None = None) -> Work:
    """The work for a part of a page, under the name by which its tab can call it off."""
    at = (int(query.get("order") or 0), int((tick or {}).get("at") or 0))
    return answers.works.start(str(query.get("tab") or ""), part, at)


@dataclass(frozen=True, slots=True)
class Region:
    """name: of its `panels.slot`; build: what it shows. lead: tells of a failure that all share; the others stay quiet."""

    name: str
    build: Build
    lead: bool = False


def region(app: Dash, answers: Answers, page: str, one: Region) -> None:
    """Registers the callback that fills a slot whenever the view or the data change."""

    @app.callback(
        Output(one.name, "children"),
        Output(f"{one.name}-notice", "children"),
        Output(f"{one.name}-ok", "data"),
        Input("query", "data"),
        Input("tick", "data"),
        State(f"{one.name}-ok", "data"),
    )
    async def fill(query: Mapping[str, Any] | None, tick: Mapping[str, Any] | None, loaded: bool | None) -> Any:
        view = replace(view_of(query), site_slo=answers.site_slo)
        if query is None or view.page != page:
            return no_update, no_update, no_update
        work = started(answers, one.name, query, tick)
        return await answers.works.run(work, filled, answers, view, one, bool(loaded))


def filled(answers: Answers, view: View, one: Region, loaded: bool) -> tuple[Any, Any, Any]:
    """What becomes of a region: its content, a notice above it, and whether it ever loaded."""
    try:
        view.check()
        return one.build(answers, view), None, True
    except InputError as error:
        return (wrong_question(error, view) if one.lead else None), None, False
    except Stopped as error:
        if at_hand().overtaken:
            return no_update, no_update, no_update
        told = stopped(error, view, answers.now(), kept=loaded)
        return (no_update, told, no_update) if loaded else (told, None, no_update)
    except MachineError as error:
        if not one.lead:
            return (no_update, None, no_update) if loaded else (None, None, no_update)
        return _failure(f"The store cannot be read: {error}", loaded)
    except Exception as error:
        return _failure("Something went wrong on the server while this part was computed", loaded, error)


def _failure(sentence: str, loaded: bool, error: Exception | None = None) -> tuple[Any, Any, Any]:
    reference = secrets.token_hex(4)
    LOG.error("error %s: %s", reference, sentence, exc_info=error)
    told = failed(sentence, reference, kept=loaded)
    return (no_update, told, no_update) if loaded else (told, None, no_update)
