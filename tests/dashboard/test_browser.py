"""The pages in a real browser: right state, nothing in the console, nothing leaves the server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from browsing import BOUND, Browsed, listening
from endless import ENGINE, HEAT, LIST, VERDICT, slow_down
from machine_speed import slowness
from stocked import NOW_UNIX_NS, Served
from waiting import wait_for

from phasewise.collector.access_keys import KeyFile, new_key

pytestmark = pytest.mark.live
LONG = pytest.mark.slow

PAGES = [("/triage", "Evidence"), ("/requests", "160 in this window"), ("/slices", "Two-way grid")]


@pytest.mark.parametrize(("address", "text"), [PAGES[0], *(pytest.param(*page, marks=LONG) for page in PAGES[1:])])
def test_a_page_with_data(browse: Callable[[Served], Browsed], morning: Served, address: str, text: str) -> None:
    browsed = browse(morning)
    browsed.open(f"{address}?{BOUND}", text)
    browsed.settle()
    assert browsed.page.locator("h1").count() == 1
    assert browsed.page.locator(".skeleton").count() == 0
    assert browsed.problems == [] and browsed.foreign == []


def test_one_request_with_data(browse: Callable[[Served], Browsed], morning: Served) -> None:
    browsed = browse(morning)
    browsed.open(f"/requests?{BOUND}", "160 in this window")
    browsed.page.locator(".grid-table a.text-link").first.click()
    browsed.wait("Booked to causes")
    browsed.wait("Running and waiting")
    assert re.search(r"/trace/[0-9a-f]{32}\?", browsed.page.url)
    browsed.page.go_back()
    browsed.wait("160 in this window")
    assert browsed.problems == [] and browsed.foreign == []


@pytest.mark.parametrize("address", ["/triage", *(pytest.param(page, marks=LONG) for page in ("/requests", "/slices"))])
def test_a_page_without_data(browse: Callable[[Served], Browsed], serve: Callable[..., Served], address: str) -> None:
    browsed = browse(serve(filled=False))
    browsed.open(address, "Waiting for the first request")
    browsed.wait("no data yet")
    assert browsed.problems == []


@pytest.mark.parametrize(
    "address", ["/triage", *(pytest.param(page, marks=LONG) for page in ("/requests", "/slices", "/trace/abc"))]
)
def test_a_page_over_a_broken_store(browse: Callable[[Served], Browsed], served: Served, address: str) -> None:
    served.store.close()
    browsed = browse(served)
    browsed.open(address, "The store cannot be read")
    browsed.wait("store not readable")
    browsed.wait("error ")
    assert browsed.problems == []


def told(browsed: Browsed) -> list[str]:
    """The words of the page once they stand still; charts draw theirs a moment later."""
    found: list[str] = []
    for _ in range(100):
        browsed.settle()
        now = browsed.page.locator(".headline, .stats, .card, .bars, .stack").all_inner_texts()
        if now and now == found:
            break
        found = now
        browsed.page.wait_for_timeout(400)
    return found


def test_the_address_holds_the_state(browse: Callable[[Served], Browsed], morning: Served) -> None:
    browsed = browse(morning)
    browsed.open(f"/triage?{BOUND}", "160 requests")
    browsed.page.keyboard.press("/")
    browsed.page.keyboard.type("model=qwen-7b")
    browsed.page.keyboard.press("Enter")
    browsed.wait("40 requests")
    assert "f=model:eq:qwen-7b" in browsed.page.url
    browsed.settle()
    before = told(browsed)
    browsed.page.reload()
    browsed.wait("40 requests")
    browsed.wait("Waiting and running")
    browsed.settle()
    assert told(browsed) == before
    browsed.page.keyboard.press("g")
    browsed.page.keyboard.press("r")
    browsed.wait("40 in this window")
    browsed.page.go_back()
    browsed.wait("40 requests")
    assert browsed.page.url.split("?")[0].endswith("/triage")
    browsed.page.locator(".chip-remove").first.click()
    browsed.wait("160 requests")
    assert browsed.problems == []


def test_a_box_on_the_heatmap_goes_into_the_address_and_comes_back(
    browse: Callable[[Served], Browsed], morning: Served
) -> None:
    browsed = browse(morning)
    browsed.open(f"/slices?{BOUND}", "drag a box")
    browsed.settle()
    area = browsed.page.locator(".js-plotly-plot .draglayer .nsewdrag").first.bounding_box()
    browsed.page.mouse.move(area["x"] + area["width"] * 0.4, area["y"] + 5)
    browsed.page.mouse.down()
    browsed.page.mouse.move(area["x"] + area["width"] * 0.95, area["y"] + area["height"] * 0.7, steps=8)
    browsed.page.mouse.up()
    browsed.wait("Clear the box")
    assert re.search(r"sel=\d{13},\d{13},[0-9.]+,[0-9.]+", browsed.page.url)
    browsed.page.reload()
    browsed.wait("Clear the box")
    browsed.until("document.querySelector('.js-plotly-plot')?.layout?.selections?.length === 1")
    assert browsed.problems == [] and browsed.foreign == []


SCREENS = [(*page, *size) for size in ((390, 844), (1400, 900)) for page in (*PAGES, ("/trace", "Booked to causes"))]


@pytest.mark.parametrize(
    ("page", "text", "width", "height"), [*SCREENS[:2], *(pytest.param(*one, marks=LONG) for one in SCREENS[2:])]
)
def test_a_page_fits_the_screen(
    browse: Callable[[Served], Browsed], morning: Served, page: str, text: str, width: int, height: int
) -> None:
    browsed = browse(morning)
    browsed.page.set_viewport_size({"width": width, "height": height})
    browsed.open(address_of(morning, page), text)
    browsed.settle()
    assert browsed.page.evaluate("document.documentElement.scrollWidth") <= width
    overprinted = """[...document.querySelectorAll('.evidence tr')].some(row => {
        const cells = [...row.children].map(cell => cell.getBoundingClientRect()).filter(box => box.width)
        return cells.some((a, i) => cells.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1))
    })"""
    assert not browsed.page.evaluate(overprinted)
    if page == "/requests":
        browsed.page.evaluate("document.querySelector('.ag-body-horizontal-scroll-viewport').scrollLeft = 9999")
        browsed.until("document.querySelector('.grid-table a.text-link')?.getBoundingClientRect().right <= innerWidth")
    assert browsed.problems == []


@LONG
def test_a_list_with_a_wrong_order_says_so_and_comes_back(browse: Callable[[Served], Browsed], morning: Served) -> None:
    browsed = browse(morning)
    browsed.open(f"/requests?{BOUND}&sort=nope&utm=kept", "sort: nope: is not a key to sort by")
    assert browsed.page.locator(".grid-table").count() == 0
    browsed.page.get_by_text("Leave it out").click()
    browsed.wait("160 in this window")
    assert "utm=kept" in browsed.page.url and "sort" not in browsed.page.url
    assert browsed.problems == []


ENDLESS = [
    pytest.param("/triage", VERDICT, "triage-headline", "Still working, 160 requests in this window", marks=LONG),
    ("/slices", HEAT, "slices-heat", "Still working, 160 requests in this window"),
    pytest.param("/requests", LIST, "requests-table", "Still working", marks=LONG),
    pytest.param("/trace", ENGINE, "trace-body", "Still working", marks=LONG),
]


def address_of(served: Served, page: str) -> str:
    if page != "/trace":
        return f"{page}?{BOUND}"
    return f"/trace/{served.store.query('SELECT request_key FROM requests LIMIT 1')['request_key'][0]}?{BOUND}"


def part(browsed: Browsed, name: str) -> Any:
    return browsed.page.locator(f".region:has(> #{name})")


@pytest.mark.alone
@pytest.mark.parametrize(("page", "words", "name", "told"), ENDLESS)
def test_a_slow_part_tells_and_can_be_cancelled(
    browse: Callable[[Served], Browsed], served: Served, page: str, words: str, name: str, told: str
) -> None:  # fmt: skip
    slow_down(served.store, words)
    browsed = browse(served)
    browsed.page.goto(browsed.base + address_of(served, page))
    slow = part(browsed, name)
    slow.get_by_text(told).first.wait_for(state="visible", timeout=20_000)
    assert served.store._readers._running
    began = time.monotonic()
    slow.get_by_role("button", name="Cancel").click()
    slow.get_by_text("Cancelled").first.wait_for(state="visible", timeout=10_000)
    assert time.monotonic() - began < 8 * slowness()
    if page != "/triage":  # whose other parts wait for the same verdict, and begin it again for themselves
        assert wait_for(lambda: not served.store._readers._running, 5.0)
    slow_down(served.store, "nothing like it")
    slow.get_by_role("button", name="Retry").click()
    slow.get_by_text("Cancelled").first.wait_for(state="hidden", timeout=20_000)
    if page == "/requests":
        slow.locator("a.text-link").first.wait_for(state="visible", timeout=20_000)
    assert [one for one in browsed.problems if "503" not in one] == [] and browsed.foreign == []


def test_a_part_stops_by_itself_and_offers_less(browse: Callable[[Served], Browsed], served: Served) -> None:
    served.app.state.answers.works.limit_s = 5.0
    slow_down(served.store, HEAT)
    browsed = browse(served)
    browsed.page.goto(f"{browsed.base}/slices?{BOUND}")
    slow = part(browsed, "slices-heat")
    browsed.wait("Two-way grid")
    slow.get_by_text("Stopped after 5 s").wait_for(state="visible", timeout=20_000)
    assert browsed.page.get_by_text("Two-way grid").first.is_visible(), "the part, not the page"
    slow_down(served.store, "nothing like it")
    slow.get_by_text("of this window").first.click()
    slow.get_by_text("drag a box").wait_for(state="visible", timeout=20_000)
    assert "from=2025-11-29T14:05:00Z" in browsed.page.url
    assert browsed.problems == []


@LONG
def test_a_list_that_was_shown_stays_when_it_cannot_be_read_again(
    browse: Callable[[Served], Browsed], served: Served
) -> None:  # fmt: skip
    served.app.state.answers.works.limit_s = 2.0
    browsed = browse(served)
    browsed.open(f"/requests?{BOUND}", "160 in this window")
    browsed.page.locator(".grid-table a.text-link").first.wait_for()
    slow_down(served.store, LIST)
    browsed.page.keyboard.press("d")
    browsed.page.keyboard.press("r")
    part(browsed, "requests-table").get_by_text("The figures below are from before").wait_for(timeout=20_000)
    assert browsed.page.locator(".grid-table a.text-link").count() > 5


def test_moving_on_stops_what_the_page_asked(browse: Callable[[Served], Browsed], served: Served) -> None:
    slow_down(served.store, HEAT)
    browsed = browse(served)
    browsed.page.goto(f"{browsed.base}/slices?{BOUND}")
    browsed.wait("Two-way grid")
    assert served.store._readers._running
    browsed.page.keyboard.press("g")
    browsed.page.keyboard.press("r")
    browsed.wait("160 in this window")
    end = time.monotonic() + 3
    while served.store._readers._running and time.monotonic() < end:
        time.sleep(0.05)
    assert not served.store._readers._running
    assert browsed.problems == []


@LONG
def test_a_page_outlives_the_server(browse: Callable[[Served], Browsed], served: Served, chromium: Any) -> None:
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    with listening(served) as (base, _):
        page.goto(f"{base}/triage?{BOUND}")
        page.get_by_text("160 requests").first.wait_for(timeout=60_000)
    page.get_by_text("The server does not answer").first.wait_for(timeout=60_000)
    assert page.get_by_text("Evidence").first.is_visible()
    assert page.evaluate("document.body.classList.contains('is-stale')")
    context.close()


def test_a_key_opens_the_pages_and_its_end_closes_them(browse: Callable[[Served], Browsed], served: Served) -> None:
    data = served.app.state.answers.data_dir
    key, token = new_key(("read",), now_unix_ns=NOW_UNIX_NS)
    KeyFile(data).add(key)
    door = served.app.state.answers.posture.door
    door.reload()
    browsed = browse(served)
    page = browsed.page
    page.goto(f"{browsed.base}/requests?{BOUND}")
    assert page.url.startswith(f"{browsed.base}/login?next=")
    page.fill("#key", "phw_wrong")
    page.click("button")
    page.get_by_text("the key is not known").wait_for()
    page.fill("#key", token)
    page.click("button")
    browsed.wait("160 in this window")
    assert page.url == f"{browsed.base}/requests?{BOUND}"
    assert page.evaluate("document.cookie") == "" and token not in page.content()
    KeyFile(data).revoke(key.key_id, NOW_UNIX_NS)
    door.reload()
    page.wait_for_url("**/login?next=**", timeout=30_000)
    assert browsed.foreign == []


def test_a_login_leads_nowhere_else(browse: Callable[[Served], Browsed], served: Served) -> None:
    key, token = new_key(("read",), now_unix_ns=NOW_UNIX_NS)
    KeyFile(served.app.state.answers.data_dir).add(key)
    served.app.state.answers.posture.door.reload()
    browsed = browse(served)
    for away in ("//evil.example/", "https://evil.example/", "/%5Cevil.example", "javascript:alert(1)"):
        browsed.page.goto(f"{browsed.base}/login?next={away}")
        browsed.page.fill("#key", token)
        browsed.page.click("button")
        browsed.page.wait_for_url("**/triage**")
    assert browsed.foreign == []
