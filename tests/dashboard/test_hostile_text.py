"""Strangers' texts through the API, the pages, the reports and the terminal: shown as they are, and nothing else happens."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from hostile_texts import FIRST, all_texts, in_every_column
from plotly.utils import PlotlyJSONEncoder
from rich.console import Console
from shared_data import ROOT
from stocked import Served

from phasewise.dashboard.app import PAGES
from phasewise.dashboard.cards import card_of, markdown
from phasewise.dashboard.regions import filled
from phasewise.dashboard.state import parse_view
from phasewise.dashboard.terminal import show

WINDOW = "from=0&to=now"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# What a component may be made of: none of these turns text into markup, a script or a foreign address.
FORBIDDEN_TYPES = {"Markdown", "Script", "Iframe", "DangerouslySetInnerHTML", "Object", "Embed", "Base", "Form"}
FORBIDDEN_PROPS = {"dangerously_allow_html", "dangerously_allow_code", "dangerouslySetInnerHTML", "srcDoc"}


def nodes(content: object) -> Iterator[Mapping[str, Any]]:
    """Every component and property below."""
    if isinstance(content, Mapping):
        yield content
        for one in content.values():
            yield from nodes(one)
    elif isinstance(content, list):
        for one in content:
            yield from nodes(one)


def check_page(content: Any, texts: Sequence[str]) -> None:
    for one in nodes(content):
        assert one.get("type") not in FORBIDDEN_TYPES or "namespace" not in one, one.get("type")
        assert not FORBIDDEN_PROPS & set(one)
        for name in ("href", "src", "action"):
            target = one.get(name)
            if isinstance(target, str) and not target.startswith("data:image/svg+xml,"):  # our own sparklines
                assert target.startswith(("/", "#")) and not target.startswith(("//", "/\\")), target
            elif isinstance(target, str):
                assert not any(text in unquote(target) for text in texts if "<" in text)
    # Plotly reads a little markup in labels: there a stranger's `<` must not be one.
    for figure in (one["figure"] for one in nodes(content) if isinstance(one.get("figure"), Mapping)):
        labels = list(_labels(figure))
        assert [text for text in texts if "<" in text and any(text in label for label in labels)] == []


def _labels(figure: Mapping[str, Any]) -> Iterator[str]:
    for one in nodes(figure):
        for name in ("text", "name", "hovertext", "hovertemplate", "title", "ticktext", "customdata"):
            value = one.get(name)
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))


def check(serve: Callable[..., Served], texts: Sequence[str]) -> None:
    served = in_every_column(serve(filled=False), texts)
    verdict: dict[str, Any] = {}
    for path in ("verdict", "requests", "slices?by=model", "differences", "timeline", "data-health", "annotations"):
        answer = served.client.get(f"/api/v1/{path}{'&' if '?' in path else '?'}{WINDOW}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path == "verdict":
            verdict = answer.json()
    metrics = served.client.get("/metrics").text
    assert all(line.startswith(("#", "phasewise_")) for line in metrics.split("\n") if line)
    assert CONTROL.search(metrics) is None
    key = served.store.query("SELECT request_key FROM requests LIMIT 1")["request_key"][0]
    for page in PAGES:
        path = f"/{page.NAME}" + (f"/{key}" if page.NAME == "trace" else "")
        view = parse_view(path, WINDOW)
        for one in page.REGIONS:
            content = filled(served.app.state.answers, view, one, False)[0]
            check_page(json.loads(json.dumps(content, cls=PlotlyJSONEncoder)), texts)
    card = card_of(verdict)
    drawn = io.StringIO()
    show(card, to=Console(file=drawn, force_terminal=False, width=100))
    for told in (markdown(card), drawn.getvalue()):
        assert CONTROL.search(told) is None


def test_strangers_texts_are_only_text(serve: Callable[..., Served]) -> None:
    check(serve, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(all_texts()), 60))
def test_the_whole_list_of_them(serve: Callable[..., Served], start: int) -> None:
    assert len(all_texts()) > 300
    check(serve, all_texts()[start : start + 60])


@pytest.mark.parametrize("folder", ["dashboard"])
def test_no_page_asks_for_markup_of_texts(folder: str) -> None:
    """The source itself, so that what no test renders is looked at as well."""
    words = re.compile(r"dangerously_allow_html|dangerously_allow_code|dcc\.Markdown|dash_dangerously|innerHTML|eval\(|new Function|document\.write")  # fmt: skip
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".js")
        for match in words.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("module", PAGES, ids=lambda page: page.NAME)
def test_links_on_pages_stay_on_this_server(served: Served, module: ModuleType) -> None:
    key = served.store.query("SELECT request_key FROM requests LIMIT 1")["request_key"][0]
    view = parse_view(f"/{module.NAME}" + (f"/{key}" if module.NAME == "trace" else ""), WINDOW)
    for one in module.REGIONS:
        content = json.loads(json.dumps(filled(served.app.state.answers, view, one, False)[0], cls=PlotlyJSONEncoder))
        check_page(content, ())


def test_the_log_is_one_line_an_event_whatever_a_sender_writes(tmp_path: Path) -> None:
    """Errors quote names by repr(), so that a line break in one is no line break in the log."""
    from phasewise.rules.errors import InputError

    assert "\n" not in str(InputError("file", repr("a\nb"), "is wrong"))
