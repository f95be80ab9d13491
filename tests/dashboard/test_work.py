"""Answers that take too long or are no longer wanted: the API, the regions, and what they share."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from builders import SECOND_NS
from dash import no_update
from endless import HEAT, VERDICT, slow_down
from plotly.utils import PlotlyJSONEncoder
from stocked import NOW_UNIX_NS, Served

from phasewise.collector.patience import REPORT_LIMIT_S, Patience
from phasewise.collector.store import Store
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.app import PAGES
from phasewise.dashboard.pages import slices
from phasewise.dashboard.regions import Region, filled
from phasewise.dashboard.state import View, parse_view
from phasewise.dashboard.states import narrower
from phasewise.dashboard.work import Limits, Work, Works, at_hand, doing
from phasewise.rules.errors import Cancelled, TooBusy, TooSlow

BOUND = "from=2025-11-29T14:00:00Z&to=2025-11-29T14:10:00Z"
HEAT_REGION = next(one for one in slices.REGIONS if one.name == "slices-heat")


def shown(content: object) -> str:
    return json.dumps(content, cls=PlotlyJSONEncoder, ensure_ascii=False)


def answers(served: Served, limit_s: float = 15.0) -> Answers:
    found: Answers = served.app.state.answers
    found.works.limit_s = limit_s
    return found


def test_an_answer_over_its_limit_is_503_with_a_remedy_and_the_next_one_comes(served: Served) -> None:
    answers(served, 0.4)
    slow_down(served.store, VERDICT)
    answer = served.client.get(f"/api/v1/verdict?{BOUND}")
    assert answer.status_code == 503
    assert answer.json() == {
        "error": "stopped after 0.4 s", "field": "from", "remedy": "narrow the range or add a filter",
    }  # fmt: skip
    answers(served)
    assert served.client.get(f"/api/v1/slices?{BOUND}").status_code == 200
    slow_down(served.store, "nothing like it")
    assert served.client.get(f"/api/v1/verdict?{BOUND}").json()["requests"] == 160


def test_too_many_questions_are_429(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise TooBusy(32)

    monkeypatch.setattr(Store, "query", busy)
    answer = served.client.get(f"/api/v1/verdict?{BOUND}")
    assert answer.status_code == 429 and answer.json()["remedy"]
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("prefer", "limit_s"),
    [
        (None, 15.0),
        ("wait=120", REPORT_LIMIT_S),
        ("respond-async, wait=40", 40.0),
        ("wait=9999", 120.0),
        ("wait=x", 15),
    ],
)
def test_a_request_may_ask_for_more_time(prefer: str | None, limit_s: float) -> None:
    seen: list[float] = []

    async def app(*_: object) -> None:
        seen.append(at_hand().patience.limit_s)

    headers = [(b"prefer", prefer.encode())] if prefer else []
    asyncio.run(Limits(app, works=Works())({"type": "http", "headers": headers}, None, None))
    assert seen == [limit_s]


def filled_under(answers: Answers, at: View, one: Region, loaded: bool, work: Work) -> Any:
    with doing(work):
        return filled(answers, at, one, loaded)


def test_a_slow_region_says_so_and_offers_less_while_the_others_show_their_data(served: Served) -> None:
    slow_down(served.store, HEAT)
    at = parse_view("/slices", f"{BOUND}&f=model:eq:qwen-7b")
    for one in slices.REGIONS:
        patience = Patience(0.5 if one is HEAT_REGION else 30.0)  # the others need their time on a busy machine
        content, notice, loaded = filled_under(answers(served), at, one, False, Work(patience))
        if one is HEAT_REGION:
            told = shown(content)
            assert "Stopped after 0.5 s" in told and "Narrow the range or add a filter." in told and "Retry" in told
            assert "Last 300\u202fs of this window" in told and loaded is no_update
        else:
            assert (notice, loaded) == (None, True)


def test_figures_from_before_stay_under_the_notice(served: Served) -> None:
    slow_down(served.store, HEAT)
    content, notice, loaded = filled_under(
        answers(served), parse_view("/slices", BOUND), HEAT_REGION, True, Work(Patience(0.3))
    )
    assert content is no_update and loaded is no_update
    assert "Stopped after" in shown(notice) and "from before" in shown(notice)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_every_region_tells_that_it_was_cancelled(served: Served, page: Any) -> None:
    work = Work(Patience(60))
    work.patience.cancel()
    for one in page.REGIONS:
        content, _, _ = filled_under(answers(served), parse_view(f"/{page.NAME}/x", BOUND), one, False, work)
        assert "Cancelled" in shown(content)


@pytest.mark.parametrize(
    ("address", "search", "offered"),
    [
        ("/triage", "from=now-24h&to=now", [("Last 12 h", "from=now-43200s"), ("Last 15 minutes", "from=now-900s")]),
        ("/triage", "", [("Last 450 s", "from=now-450s")]),
        ("/triage", "from=now-30m", [("Last 15 minutes", "from=now-900s")]),
        ("/slices", "from=0&to=now&rows=input", [("Last 15 minutes", "rows=input&from=now-900s")]),
        ("/slices", "from=2025-11-29T10:00:00Z&to=2025-11-29T14:00:00Z",
         [("Last 2 h of this window", "from=2025-11-29T12:00:00Z"), ("Last 15 minutes of this window", "from=2025-11-29T13:45:00Z")]),
        ("/trace/abc", "from=now-24h&to=now", []),
    ],
)  # fmt: skip
def test_what_is_offered_instead(address: str, search: str, offered: list[tuple[str, str]]) -> None:
    found = narrower(parse_view(address, search), NOW_UNIX_NS)
    assert [name.replace("\u202f", " ") for name, _ in found] == [name for name, _ in offered]
    for (_, link), (_, part) in zip(found, offered, strict=True):
        assert part in link
        assert parse_view("/triage", link.partition("?")[2]).window(NOW_UNIX_NS).seconds > 0


@dataclass
class Asker:
    """A thread with work of its own, and what became of it."""

    patience: Patience
    thread: threading.Thread
    outcome: list[object]


def ask(limit_s: float, compute: Callable[[], object]) -> Asker:
    patience, outcome = Patience(limit_s), list[object]()

    def run() -> None:
        try:
            with doing(Work(patience)):
                outcome.append(compute())
        except Exception as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return Asker(patience, thread, outcome)


def test_a_shared_answer_outlives_the_one_who_began_it(served: Served) -> None:
    shared = answers(served)
    runs: list[int] = []

    def compute() -> int:
        runs.append(1)
        while len(runs) == 1:
            at_hand().patience.check()
            time.sleep(0.01)
        return 7

    first = ask(60, lambda: shared.once("k", compute))
    while not runs:
        time.sleep(0.01)
    second = ask(60, lambda: shared.once("k", compute))
    third = ask(60, lambda: shared.once("k", compute))
    third.patience.cancel()
    third.thread.join(5)
    assert third.outcome == [Cancelled] and len(runs) == 1, "who only waits may leave without ending it"
    first.patience.cancel()
    for one in (first, second):
        one.thread.join(5)
    assert first.outcome == [Cancelled] and second.outcome == [7]


def test_a_tab_that_moved_on_calls_off_what_it_asked_before() -> None:
    works = Works()
    old, other_tab = works.start("a", "heat", (1, 0)), works.start("b", "heat", (1, 0))
    same_view = works.start("a", "grid", (1, 0))
    assert not old.patience.over
    again = works.start("a", "heat", (1, 5))
    assert old.overtaken and old.patience.over and not same_view.patience.over
    works.start("a", "head", (2, 0))
    late = works.start("a", "heat", (1, 6))
    assert again.overtaken and same_view.overtaken
    assert not other_tab.patience.over and not late.patience.over
    assert works.of("a")["parts"] == ["grid", "head", "heat"]


def test_cancel_reaches_the_query_of_a_part_and_only_that(served: Served) -> None:
    shared = answers(served)
    slow_down(served.store, HEAT)

    async def scene() -> tuple[Any, dict[str, object]]:
        work = shared.works.start("tab", "slices-heat", (1, 0))
        view = parse_view("/slices", BOUND)
        running = asyncio.create_task(shared.works.run(work, filled, shared, view, HEAT_REGION, False))
        while shared.works.of("tab")["requests"] is None or not served.store._readers._running:
            await asyncio.sleep(0.02)
        told = shared.works.of("tab")
        assert shared.works.cancel("tab", "slices-head") == 0
        assert shared.works.cancel("tab", "slices-heat") == 1
        return await asyncio.wait_for(running, 5), told

    (content, _, _), told = asyncio.run(scene())
    assert told == {"parts": ["slices-heat"], "requests": 160}
    assert "Cancelled" in shown(content)
    assert shared.works.of("tab") == {"parts": [], "requests": None}
    assert served.client.get("/api/v1/work?tab=tab").json() == {"parts": [], "requests": None}


def test_what_nobody_will_look_at_changes_nothing(served: Served) -> None:
    work = Work(Patience(60), overtaken=True)
    work.patience.cancel()
    told = filled_under(answers(served), parse_view("/slices", BOUND), HEAT_REGION, False, work)
    assert all(one is no_update for one in told)


def test_slow_readers_do_not_make_the_store_look_dead(serve: Callable[..., Served]) -> None:
    now = [NOW_UNIX_NS]
    served = serve(clock=lambda: now[0])
    assert served.client.get("/api/v1/pulse").json()["requests"] == 160
    now[0] += 5 * SECOND_NS
    answers(served, 0.2)
    slow_down(served.store, "max(")
    told = served.client.get("/api/v1/pulse").json()
    assert (told["status"], told["requests"]) == ("ok", 160)


def test_a_stopped_report_is_an_error_of_the_command_line(served: Served) -> None:
    shared = answers(served)
    slow_down(served.store, VERDICT)
    with doing(Work(Patience(0.3))), pytest.raises(TooSlow, match="narrow the range") as raised:
        shared.reader.query(f"SELECT * {VERDICT} true")
    assert raised.value.exit_code == 4
