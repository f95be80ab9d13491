"""Strangers' texts on every page of a real browser: none of them runs, links, loads, or asks anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from browsing import BOUND, Browsed
from builders import attributed, make_request, request_table
from hostile_texts import FIRST, all_texts, in_every_column
from stocked import Served

from phasewise.dashboard.app import PAGES

pytestmark = pytest.mark.live
HOSTILE = '<img src=x onerror="window.hit=1"><a href="http://evil.example/">x</a>'
AT_ONCE = 60  # texts in one store, each of them in every column


def test_strangers_text_runs_nothing_and_loads_nothing(
    browse: Callable[[Served], Browsed], serve: Callable[..., Served]
) -> None:
    served = serve(filled=False)
    rows = [
        attributed(
            make_request(
                at_s=i,
                model=HOSTILE,
                instance=HOSTILE + str(i % 2),
                route="x" * 10_000,
                tenant="\u202eright-to-left\n🙂",
            )
        )
        for i in range(40)
    ]
    with served.store.write() as transaction:
        transaction.insert("requests", request_table(rows))
    browsed = browse(served)
    for address, text in (
        ("/triage", "40 requests"),
        ("/slices?rows=instance&cols=model", "Two-way grid"),
        ("/requests", "40 in this window"),
    ):
        browsed.open(f"{address}{'&' if '?' in address else '?'}{BOUND}", text)
        browsed.settle()
        assert browsed.page.evaluate("window.hit") is None
        assert browsed.page.locator("img[src=x]").count() == 0
        assert browsed.page.evaluate("[...document.links].every(link => link.host === location.host)")
        assert browsed.page.evaluate("document.documentElement.scrollWidth") <= 1440
    assert browsed.problems == [] and browsed.foreign == []


def check(browse: Callable[[Served], Browsed], served: Served, texts: Sequence[str]) -> None:
    with ThreadPoolExecutor(1) as elsewhere:  # the browser's loop runs in this thread
        elsewhere.submit(in_every_column, served, texts).result()
    keys = served.store.query("SELECT request_key FROM requests ORDER BY arrival_unix_ns")["request_key"].to_list()
    browsed = browse(served)
    dialogs: list[str] = []
    shown = 0

    def dismiss(dialog: object) -> None:
        dialogs.append(str(dialog))
        dialog.dismiss()  # type: ignore[attr-defined]

    browsed.page.on("dialog", dismiss)
    addresses = [f"/{page.NAME}" for page in PAGES if page.NAME != "trace"] + [f"/trace/{key}" for key in keys[::10]]
    for address in addresses:
        browsed.page.goto(f"{browsed.base}{address}?from=0&to=now")
        browsed.until("!!document.querySelector('h1')")
        browsed.settle()
        seen = browsed.page.inner_text("body")
        shown += sum(text in seen for text in texts)
        # Who looks moves the pointer over what is drawn, and the focus through what takes one.
        browsed.page.mouse.move(700, 300, steps=5)
        browsed.page.mouse.move(700, 700, steps=5)
        for _ in range(5):
            browsed.page.keyboard.press("Tab")
        assert browsed.page.evaluate("window.hit") is None, address
        assert browsed.page.evaluate("[...document.links].every(link => link.host === location.host)"), address
        assert browsed.page.evaluate(
            "[...document.querySelectorAll('iframe,object,embed,base,form,img')]"
            ".every(one => one.tagName === 'IMG' && one.src.startsWith('data:image/svg+xml,'))"
        ), address
    assert dialogs == browsed.problems == browsed.foreign == []
    assert shown > len(addresses), "the pages did not show what strangers wrote"


@pytest.mark.slow
def test_the_first_of_them_on_every_page(browse: Callable[[Served], Browsed], serve: Callable[..., Served]) -> None:
    check(browse, serve(filled=False), FIRST)


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(0, len(all_texts()), AT_ONCE))
def test_the_whole_list_on_every_page(
    browse: Callable[[Served], Browsed], serve: Callable[..., Served], start: int
) -> None:
    check(browse, serve(filled=False), all_texts()[start : start + AT_ONCE])
